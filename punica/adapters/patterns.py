"""Regular expressions over module names, matched by RE2: in linear time, with the same answer on every rank.

Python's `re` backtracks: `([a-z0-9_.]+)+!` against a name of forty letters takes exponential time, and holds the
interpreter lock meanwhile. RE2 has no lookarounds, back-references, conditions, atomic groups and possessive
repetitions; they are refused.

The work of an adapter's expressions is bounded by a count that does not depend on the clock.
"""

import re
import warnings
from collections.abc import Sequence

from punica.checks import clip

MOST_CHARACTERS = 4096  # of one expression
MOST_WORK = 2_000_000_000  # about a nanosecond each: instructions of RE2's programs times characters of names
_LEAST_PROGRAM = 50  # instructions that a call costs, however small its program
_MOST_MEMORY = 8 << 20  # bytes of one expression's automaton


class UnboundedPattern(ValueError):
    """A valid expression that takes too long, or cannot be matched in bounded time."""


class NamePattern:
    r"""A key of PEFT's patterns as a regular expression, `(?:.*\.)?(?:KEY)`. ValueError: none of RE2's, or too long."""

    def __init__(self, pattern: str) -> None:
        import re2  # few adapters have expressions

        if len(pattern) > MOST_CHARACTERS:
            raise UnboundedPattern(f"{clip(pattern)} has {len(pattern)} characters, at most {MOST_CHARACTERS} are read")
        whole = rf"(?:.*\.)?(?:{pattern})"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of sets that other languages read differently
                re.compile(whole)
        except RecursionError:
            raise UnboundedPattern(f"{clip(pattern)} is too deeply nested") from None
        except (re.error, OverflowError, ValueError) as error:
            raise ValueError(f"{clip(pattern)} is not a regular expression: {error}") from error
        options = re2.Options()
        options.log_errors, options.max_mem = False, _MOST_MEMORY
        whole = re.sub(r"\\(.)", lambda found: r"\z" if found[1] == "Z" else found[0], whole, flags=re.DOTALL)
        try:
            self._compiled = re2.compile(whole, options)  # which has `\z` for Python's `\Z`
        except re2.error as error:
            said = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            raise UnboundedPattern(
                f"{clip(pattern)} cannot be matched in bounded time ({clip(said)}); lookarounds, back-references, "
                "conditions, atomic groups and possessive repetitions are not supported: write the alternatives out"
            ) from error
        self.size = max(_LEAST_PROGRAM, self._compiled.programsize)

    def matches(self, name: str) -> bool:
        return self._compiled.fullmatch(name) is not None


class ModuleNames:
    """Module names to be matched: one account of work, `MOST_WORK`, for all expressions."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._left = names, MOST_WORK
        self._characters = sum(map(len, names)) + len(names)

    def matching(self, pattern: NamePattern) -> list[bool]:
        """Tell of every name if the whole of it matches. UnboundedPattern: too much work."""
        self._left -= pattern.size * self._characters
        if self._left < 0:
            raise UnboundedPattern("matching takes too long over all patterns; use fewer or simpler ones")
        return [pattern.matches(name) for name in self._names]
