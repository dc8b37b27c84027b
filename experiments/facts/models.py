"""The paper's models, ours of their sizes, and units of time."""

MODELS = {"7B": ("llama2-7b", "7B"), "13B": ("llama2-13b", "13B"), "70B": ("llama2-70b", "70B")}
"""The paper's model -> ours of that size, and its name in the paper's own rows."""
STAND_INS = {"llama-small": "7B"}
"""Smaller model -> the paper's model that it stands in for where no model of that size was measured (on a CPU)."""
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Unit of time -> seconds."""
