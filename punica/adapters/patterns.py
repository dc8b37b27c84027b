"""Regular expressions over module names, matched in bounded time: a bit-parallel NFA instead of backtracking.

Python's `re` backtracks: `([a-z0-9_.]+)+!` against a name of forty letters takes exponential time, and holds the
interpreter lock meanwhile. Here `re`'s own parser parses the expression, whose parts then map *sets of positions*,
where they may begin, to those where they may end. No position is tried twice. A set is the bits of one integer, over
the names of all modules in a row:

    q_proj|k_proj|...     `[a-z]` maps the set S to  (S & positions of letters) << 1
                          a lookahead keeps the positions of S from which its inside, walked backwards, can end

Back-references, conditions on groups, atomic groups and possessive repetitions depend on the path of a match; they are
refused. Matching is counted in steps of about a microsecond, and an expression that exceeds its adapter's budget is
refused too. The limit does not depend on the clock, so all tensor-parallel ranks reach the same verdict.

The parser is private to `re`; `tests/adapters/test_patterns.py` runs it on every supported Python.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]  # the parser's vocabulary; the same since Python 2
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from punica.checks import clip

MOST_CHARACTERS = 4096  # of one expression
MOST_STEPS = 250_000  # of all expressions of an adapter together
_MOST_NESTED = 40
_BITS_PER_STEP = 4096
_FLAGS = int(re.IGNORECASE | re.ASCII | re.DOTALL)  # that matter to one character
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
_STARTS, _ENDS = {op.AT_BEGINNING, op.AT_BEGINNING_STRING}, {op.AT_END, op.AT_END_STRING}
_ANCHORS = _STARTS | _ENDS | {op.AT_BOUNDARY, op.AT_NON_BOUNDARY}
_CHARACTERS = {op.ANY, op.LITERAL, op.NOT_LITERAL, op.IN}
_MEMBERS = {op.LITERAL, op.RANGE, op.CATEGORY, op.NEGATE}  # of a set of characters
_KNOWN = _CHARACTERS | {
    op.BRANCH, op.SUBPATTERN, op.MAX_REPEAT, op.MIN_REPEAT, op.ASSERT, op.ASSERT_NOT, op.AT,
    op.FAILURE,  # the empty negative lookahead `(?!)`, from Python 3.13 on
}  # fmt: skip


class UnboundedPattern(ValueError):
    """A valid expression that takes too long, or cannot be matched in bounded time."""


class Steps:
    """Budget of steps; :meth:`take` raises UnboundedPattern when it is exceeded."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.most = self.left = most

    def take(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise UnboundedPattern(
                f"matching takes more than {self.most} steps over all patterns; use fewer or simpler ones, such as "
                "plain module names"
            )


class NamePattern:
    """A parsed and checked regular expression, for :meth:`ModuleNames.matching`.

    Args:
        pattern: the expression; with `suffix` as PEFT reads the keys of its patterns, `(?:.*\\.)?(?:KEY)`.

    Raises:
        ValueError: no regular expression. UnboundedPattern (a ValueError): too long, too deeply nested, or of a kind
            that cannot be bounded.
    """

    def __init__(self, pattern: str, suffix: bool = True) -> None:
        if len(pattern) > MOST_CHARACTERS:
            raise UnboundedPattern(f"{clip(pattern)} has {len(pattern)} characters, at most {MOST_CHARACTERS} are read")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of sets that other languages read differently
                parsed = parser.parse(rf"(?:.*\.)?(?:{pattern})" if suffix else pattern)
                _check_parts(parsed, 0)
        except UnboundedPattern as error:
            raise UnboundedPattern(f"{clip(pattern)} cannot be matched: {error}") from error
        except RecursionError:
            raise UnboundedPattern(f"{clip(pattern)} is too deeply nested; at most {_MOST_NESTED} groups") from None
        except (re.error, OverflowError, ValueError) as error:
            raise ValueError(f"{clip(pattern)} is not a regular expression: {error}") from error
        self.pattern = pattern
        self.parts, self.flags = parsed, parsed.state.flags


def _check_parts(parts: Iterable[tuple[Any, Any]], depth: int) -> None:
    """UnboundedPattern for parts that sets of positions cannot match."""
    if depth > _MOST_NESTED:
        raise UnboundedPattern(f"it is nested more than {_MOST_NESTED} deep")
    for code, value in parts:
        if code in (op.GROUPREF, op.GROUPREF_EXISTS):
            raise UnboundedPattern(
                "back-references and conditions on groups are not supported; write the alternatives out"
            )
        if code in (op.ATOMIC_GROUP, op.POSSESSIVE_REPEAT):
            raise UnboundedPattern(
                "atomic groups and possessive repetitions are not supported; leave out the '+' or '?>'"
            )
        if not _is_known(code, value):
            raise UnboundedPattern(f"this Python reads {code} in it, which is not supported; write plain module names")
        for inside in _inside(code, value):
            _check_parts(inside, depth + 1)


def _is_known(code: Any, value: Any) -> bool:
    """Tell if a part is of a supported kind; a newer parser may have others."""
    if code is op.IN:
        return all(kind in _MEMBERS and (kind is not op.CATEGORY or of in _CATEGORIES) for kind, of in value)
    return code in _KNOWN and (code is not op.AT or value in _ANCHORS)


def _inside(code: Any, value: Any) -> list[Any]:
    """Return the expressions within one part of an expression."""
    if code is op.BRANCH:
        return list(value[1])
    if code is op.SUBPATTERN:
        return [value[3]]
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        return [value[2]]
    return [value[1]] if code in (op.ASSERT, op.ASSERT_NOT) else []


class ModuleNames:
    """Module names in a row, ready to be matched with steps from a budget.

    Position `p` is before the p-th character. A separator after each name keeps matches from reaching into the next.
    """

    def __init__(self, names: Sequence[str], steps: Steps) -> None:
        self._steps = steps
        self._joined = "\n".join(names) + "\n"
        self._longest = max(map(len, names), default=0)
        self._cost = 1 + len(self._joined) // _BITS_PER_STEP
        self._ends = []
        position = 0
        for name in names:
            position += len(name)
            self._ends.append(position)
            position += 1
        self._end = sum_of_bits(self._ends, len(self._joined))
        self._start = (self._end << 1 | 1) & ~(1 << len(self._joined))
        self._all = (1 << len(self._joined)) - 1
        self._characters: dict[str, int] = {}  # where each one is
        self._tested: dict[tuple[str, int], int] = {}

    def matching(self, pattern: NamePattern) -> list[bool]:
        """Tell of every name if the whole of it matches. UnboundedPattern: out of steps."""
        reached = self._walk(pattern.parts, pattern.flags, self._start)
        text = bin(reached & self._end)[:1:-1]  # the bits, the lowest first
        return [text[end : end + 1] == "1" for end in self._ends]

    # Each maps the positions where a part may begin to those where it may end; `back`: the other way.

    def _walk(self, parts: Any, flags: int, at: int, back: bool = False) -> int:
        for code, value in reversed(list(parts)) if back else parts:
            if not at:
                break
            self._steps.take(self._cost)
            at = self._part(code, value, flags, at, back)
        return at

    def _part(self, code: Any, value: Any, flags: int, at: int, back: bool) -> int:
        if code is op.BRANCH:
            reached = 0
            for branch in value[1]:
                reached |= self._walk(branch, flags, at, back)
            return reached
        if code is op.SUBPATTERN:
            _, add, remove, inside = value
            return self._walk(inside, (flags | add) & ~remove, at, back)
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inside = value
            return self._repeat(least, most, inside, flags, at, back)
        if code in (op.ASSERT, op.ASSERT_NOT):
            direction, inside = value
            holds = self._walk(inside, flags, self._all, back=direction > 0)
            return at & (holds if code is op.ASSERT else ~holds)
        if code is op.AT:
            return at & self._anchor(value, flags)
        if code is op.FAILURE:
            return 0
        where = self._where(code, value, flags)
        return (at >> 1) & where if back else (at & where) << 1

    def _repeat(self, least: int, most: int, inside: Any, flags: int, at: int, back: bool) -> int:
        # A name has fewer characters than rounds here, so that one round was empty: more of them change nothing.
        for _ in range(min(least, self._longest + 2)):
            at = self._walk(inside, flags, at, back)
        reached = front = at
        for _ in range(min(most - least, self._longest + 2)):
            if not front:
                break
            front = self._walk(inside, flags, front, back) & ~reached
            reached |= front
        return reached

    def _anchor(self, code: Any, flags: int) -> int:
        if code in _STARTS:
            return self._start
        if code in _ENDS:
            return self._end
        word = self._where(op.IN, [(op.CATEGORY, op.CATEGORY_WORD)], flags)
        boundary = word ^ (word << 1)
        return boundary if code is op.AT_BOUNDARY else self._all & ~boundary

    def _where(self, code: Any, value: Any, flags: int) -> int:
        """Return the positions before a character that this part of an expression matches."""
        flags &= _FLAGS
        source = _one_character(code, value)
        if (source, flags) not in self._tested:
            if not self._characters:
                self._characters = self._find_characters()
            self._steps.take(len(self._characters))
            takes = re.compile(source, flags).fullmatch
            self._tested[source, flags] = _union(where for c, where in self._characters.items() if takes(c))
        return self._tested[source, flags]

    def _find_characters(self) -> dict[str, int]:
        found: dict[str, list[int]] = {}
        for position, character in enumerate(self._joined):
            found.setdefault(character, []).append(position)
        self._steps.take(len(found) * self._cost)
        size = len(self._joined)
        return {character: sum_of_bits(where, size) & ~self._end for character, where in found.items()}


def _one_character(code: Any, value: Any) -> str:
    """Write a part of an expression that matches one character as an expression again."""
    if code is op.ANY:
        return "."
    if code is op.LITERAL:
        return re.escape(chr(value))
    if code is op.NOT_LITERAL:
        return f"[^{re.escape(chr(value))}]"
    inverted = bool(value) and value[0][0] is op.NEGATE
    members = []
    for kind, member in value[inverted:]:
        if kind is op.LITERAL:
            members.append(re.escape(chr(member)))
        elif kind is op.RANGE:
            members.append(f"{re.escape(chr(member[0]))}-{re.escape(chr(member[1]))}")
        else:
            members.append(_CATEGORIES[member])
    return f"[{'^' * inverted}{''.join(members)}]"


def sum_of_bits(positions: Iterable[int], size: int) -> int:
    """Build the integer of `size` bits with these bits set."""
    text = bytearray(b"0") * (size + 1)
    for position in positions:
        text[size - position] = 49  # "1"; the highest bit is written first
    return int(bytes(text), 2)


def _union(sets: Iterable[int]) -> int:
    union = 0
    for positions in sets:
        union |= positions
    return union


def not_excluded(targets: list[str], excluded: list[str] | str) -> list[str]:
    """Return the targets that `exclude_modules` do not explain: all of them, if the steps of matching are too many.

    A name explains those that end in it, and those in which it ends; an expression those that it matches.
    """
    steps = Steps()
    try:
        if isinstance(excluded, str):
            pattern = NamePattern(excluded, suffix=False)
            as_module = ModuleNames(targets, steps).matching(pattern)
            inside = ModuleNames([f".{target}" for target in targets], steps).matching(pattern)  # of another module
            explained = [either or other for either, other in zip(as_module, inside, strict=True)]
        else:
            steps.take(len(targets) * len(excluded))
            ends = tuple(f".{name}" for name in excluded)
            explained = [
                f".{target}".endswith(ends) or any(name.endswith(f".{target}") for name in excluded)
                for target in targets
            ]
    except ValueError:
        return targets
    return [target for target, is_explained in zip(targets, explained, strict=True) if not is_explained]
