"""One script per figure of the paper; see `experiments.harness` for how to add one."""
