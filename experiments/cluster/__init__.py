"""What the figures of the cluster stand on: cost models from rows of other figures (step_costs.py)."""
