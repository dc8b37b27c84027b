"""Benches: operators, layers, loads and steps, checked and timed; `experiments.harness` makes rows of them."""
