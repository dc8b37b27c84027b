r"""Regular expressions over module names, matched by RE2: in linear time, with the same answer on every rank.

Python's `re` backtracks: `([a-z0-9_.]+)+!` against a name of forty letters takes exponential time, and holds the
interpreter lock meanwhile. RE2 has no back-references, conditions, atomic groups, possessive repetitions and
lookarounds; they are refused. But negative lookaheads at the start, by which adapters of multimodal models leave the
vision tower out (`^(?!.*vision).*q_proj`), are matches of their own.

The work of an adapter's expressions is bounded by a count that does not depend on the clock.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from punica.adapters.names import starts_of_parts
from punica.checks import clip

MOST_CHARACTERS = 4096  # of one expression
MOST_WORK = 2_000_000_000  # about a nanosecond each: instructions of RE2's programs times characters of names
_LEAST_PROGRAM = 50  # instructions that a call costs, however small its program
_MOST_MEMORY = 8 << 20  # bytes of one expression's automaton
_MOST_COMPARISONS = 250_000  # of names that `exclude_modules` explain
_LOOKAHEAD = re.compile(r"\^?\(\?!")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)  # a bar or parenthesis, or what hides one


class UnboundedPattern(ValueError):
    """A valid expression that takes too long, or cannot be matched in bounded time."""


class NamePattern:
    r"""A compiled regular expression; with `suffix` as PEFT reads the keys of its patterns, `(?:.*\.)?(?:KEY)`.

    ValueError: no regular expression. UnboundedPattern (a ValueError): too long, or of a kind that RE2 does not have.
    """

    def __init__(self, pattern: str, suffix: bool = True) -> None:
        if len(pattern) > MOST_CHARACTERS:
            raise UnboundedPattern(f"{clip(pattern)} has {len(pattern)} characters, at most {MOST_CHARACTERS} are read")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of sets that other languages read differently
                re.compile(rf"(?:.*\.)?(?:{pattern})" if suffix else pattern)
        except RecursionError:
            raise UnboundedPattern(f"{clip(pattern)} is too deeply nested") from None
        except (re.error, OverflowError, ValueError) as error:
            raise ValueError(f"{clip(pattern)} is not a regular expression: {error}") from error
        ahead, rest = _split_lookaheads(pattern)
        self._ahead = [_compile(pattern, inside) for inside in ahead]
        self._parts = suffix and not pattern.startswith("^") and not rest.startswith(("^", r"\A"))
        self._rest = _compile(pattern, rf"(?:.*\.)?(?:{rest})" if suffix and not ahead else rest)
        self.size = sum(max(_LEAST_PROGRAM, each.programsize) for each in (self._rest, *self._ahead))

    def matches(self, name: str) -> bool:
        starts = starts_of_parts(name) if self._ahead and self._parts else [0]
        return any(
            self._rest.fullmatch(part) is not None and not any(ahead.match(part) for ahead in self._ahead)
            for part in (name[start:] for start in starts)
        )


class ModuleNames:
    """Module names to be matched: one account of work, `MOST_WORK`, for all expressions."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._left = names, MOST_WORK
        self._characters = sum(map(len, names)) + len(names)

    def matching(self, pattern: NamePattern) -> list[bool]:
        """Tell of every name if the whole of it matches. UnboundedPattern: too much work."""
        self._left -= pattern.size * self._characters
        if self._left < 0:
            raise UnboundedPattern(
                "matching takes too long over all patterns; use fewer or simpler ones, such as plain module names"
            )
        return [pattern.matches(name) for name in self._names]


def not_excluded(targets: list[str], excluded: list[str] | str) -> list[str]:
    """Return the targets that `exclude_modules` do not explain: all of them, if matching takes too long.

    A name explains those that end in it, and those in which it ends; an expression those that it matches.
    """
    if isinstance(excluded, str):
        try:
            names = ModuleNames([*targets, *(f".{target}" for target in targets)])  # also inside of another module
            found = names.matching(NamePattern(excluded, suffix=False))
        except ValueError:
            return targets
        both = zip(targets, found[: len(targets)], found[len(targets) :], strict=True)
        return [target for target, as_module, inside in both if not as_module and not inside]
    if len(targets) * len(excluded) > _MOST_COMPARISONS:
        return targets
    ends = tuple(f".{name}" for name in excluded)
    return [
        target for target in targets
        if not f".{target}".endswith(ends) and not any(name.endswith(f".{target}") for name in excluded)
    ]  # fmt: skip


def _compile(pattern: str, part: str) -> Any:
    """Compile a part of an expression by RE2, which has `\\z` for Python's `\\Z`."""
    import re2  # few adapters have expressions

    options = re2.Options()
    options.log_errors, options.max_mem = False, _MOST_MEMORY
    part = re.sub(r"\\(.)", lambda found: r"\z" if found[1] == "Z" else found[0], part, flags=re.DOTALL)
    try:
        return re2.compile(part, options)
    except re2.error as error:
        said = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise UnboundedPattern(
            f"{clip(pattern)} cannot be matched in bounded time ({clip(said)}); lookarounds but for a leading (?!...), "
            "back-references, conditions, atomic groups and possessive repetitions are not supported: write the "
            "alternatives out"
        ) from error


def _split_lookaheads(pattern: str) -> tuple[list[str], str]:
    """Split negative lookaheads off the start of a valid expression, unless they belong to one of its branches."""
    ahead, rest = [], pattern
    while found := _LOOKAHEAD.match(rest):
        end = next(token for token, depth in _depths(rest, found.end(), 1) if not depth)
        ahead.append(rest[found.end() : end.start()])
        rest = rest[end.end() :]
    has_branches = any(token[0] == "|" and not depth for token, depth in _depths(rest, 0, 0))
    return ([], pattern) if has_branches else (ahead, rest)


def _depths(pattern: str, start: int, depth: int) -> Iterator[tuple[re.Match[str], int]]:
    """Yield tokens from `start` on, and the depth of groups after each."""
    for token in _TOKEN.finditer(pattern, start):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        yield token, depth
