"""Checks of plain values that several modules share: one wording for one mistake. A leaf without torch."""

_MOST_SHOWN = 200  # characters of a value in a message; what a stranger sends may have megabytes


def clip(value: object) -> str:
    """``repr(value)`` for a message, cut where it is long; of what cannot be shown (too deeply nested, an integer of
    too many digits) the type.
    """
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > _MOST_SHOWN:
        shown, length = repr(value[:_MOST_SHOWN]), f" (first of {len(value)})"
    else:
        try:
            shown, length = repr(value), ""
        except (ValueError, RecursionError):
            return f"a {type(value).__name__} too large to show"
    return shown if len(shown) <= _MOST_SHOWN and not length else f"{shown[:_MOST_SHOWN]}...{length}"


def check_count(name: str, value: object, lowest: int = 1, meaning: str = "") -> int:
    """``value`` as an int >= ``lowest``; TypeError / ValueError naming the argument otherwise.

    ``meaning`` says in the message what the limit stands for.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {clip(value)}")
    if value < lowest:
        raise ValueError(f"{name} is {clip(value)}, must be >= {lowest}" + (f" ({meaning})" if meaning else ""))
    return value
