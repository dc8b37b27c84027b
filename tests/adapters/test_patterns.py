"""Expressions of strangers: matched as `re` matches them, in a time that they cannot choose."""

import random
import re
import time
from contextlib import suppress

import pytest

from punica.adapters import PEFTHelper
from punica.adapters.patterns import ModuleNames, NamePattern, UnboundedPattern

LINEAR = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
NAMES = [f"model.layers.{i}.{name}" for i in range(80) for name in LINEAR]
BASE = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
PATIENCE = 20  # CPU seconds, which others do not take; what is meant are minutes to centuries


def matches(pattern: str, names: list[str]) -> list[bool]:
    return ModuleNames(names).matching(NamePattern(pattern))


CATASTROPHIC = [  # `re` needs exponential or high polynomial time for each of them
    "([a-z0-9_.]+)+!",
    "(.*)*!",
    ".*.*.*.*.*.*.*.*.*.*.*.*!",
    "(.{1,40}){1,40}!",
    "(?:.{0,9}){50}!",
    "(x?){60}x{60}!",
    "(?!(.+)+!)(.+)+!",
    "(?:(?:(?=(?:.+)+!)|.)*)*!",
    "(?i:([A-Z._0-9]+)+)!",
]


@pytest.mark.parametrize("pattern", CATASTROPHIC)
def test_catastrophic_expressions_are_answered_or_refused_at_once(pattern) -> None:
    start = time.process_time()
    found: list[bool] = []
    with suppress(UnboundedPattern):
        found = matches(pattern, NAMES)
    assert not any(found)  # none of the names has an exclamation mark
    assert time.process_time() - start < PATIENCE


def _is_refused(pattern: str) -> bool:
    with suppress(UnboundedPattern):
        NamePattern(pattern)
        return False
    return True


def test_a_whole_config_of_them_costs_no_more() -> None:
    """All keys of an adapter draw from one account."""
    bounded = [pattern for pattern in CATASTROPHIC if not _is_refused(pattern)]
    config = PEFTHelper.from_dict({**BASE, "alpha_pattern": {f"{p}{i}": 4 for i in range(100) for p in bounded}})
    start = time.process_time()
    with pytest.raises(UnboundedPattern, match=r"alpha_pattern key .*takes too long over all patterns"):
        config.resolve(NAMES)
    assert time.process_time() - start < PATIENCE


def test_what_adapters_really_hold_is_far_from_the_limit() -> None:
    """One key per module of an 80-layer model."""
    config = PEFTHelper.from_dict({**BASE, "rank_pattern": {name: 1 + i % 7 for i, name in enumerate(NAMES)}})
    config.resolve(NAMES)
    assert [config.rank_of(name) for name in NAMES] == [1 + i % 7 for i in range(len(NAMES))]


REFUSED = {
    "back-reference": (r"(q)_\1", "invalid escape sequence"),
    "possessive": ("a*+b", "bad repetition operator"),
    "lookahead": ("^(?!.*vision).*q_proj", r"invalid perl operator: \(\?!"),
    "very deep": ("(" * 2000 + "a" + ")" * 2000, "nested"),
    "long": ("a" * 5000, "5000 characters, at most 4096"),
    "huge repetition": ("a{99999999999999999999}", "not a regular expression"),
    "more digits than Python reads": ("a{" + "9" * 4000 + "}", "not a regular expression"),
    "bad escape": (r"\q", "not a regular expression"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_bounded_or_is_none_is_refused_when_the_config_is_read(case) -> None:
    pattern, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        PEFTHelper.from_dict({**BASE, "rank_pattern": {pattern: 4}})
    assert len(str(caught.value)) < 1000


def test_more_keys_than_any_adapter_has_are_refused() -> None:
    with pytest.raises(ValueError, match="rank_pattern has 50000 keys, at most 4096"):
        PEFTHelper.from_dict({**BASE, "rank_pattern": {f"layers.{i}.q_proj": 4 for i in range(50_000)}})


def test_linear_time_equals_backtracking() -> None:
    """Random expressions against random names: what `re` finds in a time that allows to ask."""
    draw = random.Random(12)
    atoms = [*"ab.", r"\.", "[ab]", "[^a]", r"\w", r"\d", "_", r"\b", r"\B", "^", "$", "(?:)", "[a-c0-9]", "(?i:A)"]
    atoms += [r"\W", r"[^\w.]", r"\Z", r"\A", "(?s:.)", r"[\d.]", r"\\Z"]
    repeats = ["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}?", "{2,}", "??"]

    def expression(depth: int) -> str:
        kind = draw.random() if depth else 0
        inside = [expression(depth - 1) for _ in range(2)] if kind > 0.25 else []
        if kind <= 0.25:
            return draw.choice(atoms)
        if kind < 0.5:
            return "".join(inside)
        if kind < 0.65:
            return f"({'|'.join(inside)})"
        return f"(?:{inside[0]}){draw.choice(repeats)}"

    for _ in range(1500):
        pattern = expression(draw.randint(1, 4))
        names = ["".join(draw.choice("ab.A1_") for _ in range(draw.randint(1, 7))) for _ in range(5)]
        oracle = re.compile(rf"(?:.*\.)?(?:{pattern})")
        assert matches(pattern, names) == [oracle.fullmatch(name) is not None for name in names], pattern
