"""Which module names does a tenant's regular expression match? Answered in bounded time, whatever the expression.

Python's `re` backtracks: `([a-z0-9_.]+)+!` against one module name of forty letters takes longer than anybody waits,
and holds the interpreter lock meanwhile, so that neither a thread nor an alarm ends it. Here the expression is parsed
by `re`'s own parser and then walked with *sets of positions*: each part of an expression maps the positions where it
may begin to those where it may end. Nothing is tried twice, so there is nothing to explode. A set is the bits of one
integer, and the names of all modules stand side by side in it:

    q_proj|k_proj|...     `[a-z]` maps the set S to  (S & where letters are) << 1
                          a lookahead keeps of S the positions from which its inside can be walked backwards to anywhere

What `re` can and this cannot are back-references, conditions on groups, atomic groups and possessive repetitions: they
ask which way a match took, and are refused. Every walk is counted in steps of about a microsecond, and an expression
that needs more than what is left of its adapter's steps is refused too: the limit does not depend on the clock, so all
tensor-parallel ranks draw it at the same place.
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
    """An expression that is one, but that takes too long or cannot be matched in bounded time."""


class Steps:
    """How many steps are left; :meth:`take` raises UnboundedPattern when there are none."""

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
    """A regular expression that was checked, to be matched by :meth:`ModuleNames.matching`.

    Args:
        pattern: the expression; as PEFT reads the keys of its patterns, `(?:.*\\.)?(?:KEY)`, if it is a `suffix`.

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
    """ValueError for what cannot be walked with sets of positions."""
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
    """Tell whether a part is of a kind that can be walked; a newer parser may have others."""
    if code is op.IN:
        return all(kind in _MEMBERS and (kind is not op.CATEGORY or of in _CATEGORIES) for kind, of in value)
    return code in _KNOWN and (code is not op.AT or value in _ANCHORS)


def _inside(code: Any, value: Any) -> list[Any]:
    """The expressions within one part of an expression."""
    if code is op.BRANCH:
        return list(value[1])
    if code is op.SUBPATTERN:
        return [value[3]]
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        return [value[2]]
    return [value[1]] if code in (op.ASSERT, op.ASSERT_NOT) else []


class ModuleNames:
    """Names side by side, ready to be matched.

    Position `p` is before the p-th character of all names in a row, each followed by one character that belongs to
    none; so no match reaches from one name into the next. `matching` takes its steps from `steps`.
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
        """Of every name, whether the whole of it matches. UnboundedPattern: out of steps."""
        reached = self._walk(pattern.parts, pattern.flags, self._start)
        text = bin(reached & self._end)[:1:-1]  # the bits, the lowest first
        return [text[end : end + 1] == "1" for end in self._ends]

    # Each takes the positions where a part may begin and gives those where it may end; the other way `back`.

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
        # After one round more than a name has characters, a round was empty and could be left out or repeated.
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
        """The positions before a character that this part of an expression takes."""
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
    """A part of an expression that takes one character, written as an expression again."""
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
    """The integer with these bits set, of `size` bits."""
    text = bytearray(b"0") * (size + 1)
    for position in positions:
        text[size - position] = 49  # "1"; the highest bit is written first
    return int(bytes(text), 2)


def _union(sets: Iterable[int]) -> int:
    union = 0
    for positions in sets:
        union |= positions
    return union
