"""References and solutions for FlashInfer-Bench, each a file with a `run`; they import nothing of `experiments`."""
