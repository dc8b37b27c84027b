"""Checks of plain values that several modules share: one wording for one mistake. A leaf without torch."""


def check_count(name: str, value: object, lowest: int = 1, meaning: str = "") -> int:
    """``value`` as an int >= ``lowest``; TypeError / ValueError naming the argument otherwise.

    ``meaning`` says in the message what the limit stands for.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < lowest:
        raise ValueError(f"{name} is {value}, must be >= {lowest}" + (f" ({meaning})" if meaning else ""))
    return value
