"""Checks of plain values that several modules share: one wording for one mistake. A leaf without torch."""

import math
import numbers
import operator

MOST_MIXED = 8
"""Most adapters of one request, or of one row of a step."""
_MOST_SHOWN = 200  # characters of a value in a message; a request may contain megabytes


def clip(value: object) -> str:
    """Return ``repr(value)`` truncated for a message; its type where that fails (nesting or digits beyond limits)."""
    length = ""
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > _MOST_SHOWN:
        value, length = value[:_MOST_SHOWN], f" (first of {len(value)})"
    try:
        shown = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"
    return shown if len(shown) <= _MOST_SHOWN and not length else f"{shown[:_MOST_SHOWN]}...{length}"


def as_int(name: str, value: object) -> int:
    """Convert an integer of Python, numpy or torch to int; TypeError for all else, booleans included."""
    if type(value) is int:
        return value
    if not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")):
        try:
            return operator.index(value)  # type: ignore[arg-type]  # without __index__ a TypeError
        except TypeError:
            pass
    raise TypeError(f"{name} must be an int, got {type(value).__name__} {clip(value)}")


def check_count(name: str, value: object, lowest: int = 1, meaning: str = "") -> int:
    """Convert to an int >= ``lowest`` (``meaning``: of that limit, for messages); TypeError / ValueError otherwise."""
    number = as_int(name, value)
    if number < lowest:
        raise ValueError(f"{name} is {clip(number)}, must be >= {lowest}" + (f" ({meaning})" if meaning else ""))
    return number


def check_int(name: str, value: object) -> int:
    """Return ``value``; TypeError unless it is an int of Python, as numbers in keys must be: tensors change."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {clip(value)}")
    return value


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {clip(value)} ({type(value).__name__})")


def check_number(name: str, value: object) -> float:
    """Convert any real number but a boolean to a finite float; TypeError / ValueError otherwise."""
    item = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if isinstance(item, bool) or not isinstance(item, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {clip(value)}")
    try:
        number = float(item)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def check_encodable(name: str, text: str) -> None:
    """Check for lone surrogates, which no tokenizer encodes: ValueError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, half of a "
            "character; decode its bytes with errors='replace', or remove it"
        ) from error
