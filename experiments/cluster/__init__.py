"""What the figures of the cluster stand on: step costs from other figures (step_costs.py), the paper's hour."""
