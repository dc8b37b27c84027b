"""Checks of arguments that several modules share: one wording for one mistake. A leaf."""

import torch


def check_count(name: str, value: object, lowest: int = 1, meaning: str = "") -> int:
    """``value`` as an int >= ``lowest``; TypeError / ValueError naming the argument otherwise.

    ``meaning`` says in the message what the limit stands for.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < lowest:
        raise ValueError(f"{name} is {value}, must be >= {lowest}" + (f" ({meaning})" if meaning else ""))
    return value


def check_slot_vector(name: str, slots: torch.Tensor) -> None:
    """TypeError unless ``slots`` is an integer tensor, ValueError unless it is 1-D."""
    if not isinstance(slots, torch.Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(slots).__name__}")
    if slots.is_floating_point() or slots.is_complex() or slots.dtype == torch.bool:
        raise TypeError(f"{name} must have an integer dtype, got {slots.dtype}")
    if slots.ndim != 1:
        raise ValueError(f"{name} must be 1-D, one slot per token, got shape {tuple(slots.shape)}")
