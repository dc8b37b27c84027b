"""What times an operator, a layer, a load or a step; `experiments.harness` makes rows of it."""
