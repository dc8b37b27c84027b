"""Popularity over time: a crowd comes and goes, and drift keeps the shares but not their owners."""

import numpy as np
import pytest

from experiments.workload import adapter_shares, drifting, flash_crowd

ARRIVALS = np.linspace(0.0, 90.0, 30_000, endpoint=False)
SHARES = adapter_shares("Zipf", 50)


def measured(adapters, begin: float, end: float):
    """Return the share of each adapter among the requests of some seconds."""
    chosen = adapters[(begin <= ARRIVALS) & (end > ARRIVALS)]
    return np.bincount(chosen, minlength=len(SHARES)) / len(chosen)


def test_a_crowd_takes_its_share_while_it_lasts_and_the_others_divide_the_rest_as_before() -> None:
    adapters = flash_crowd(ARRIVALS, SHARES, (30.0, 60.0, 0.6), seed=3)
    before, during, after = (measured(adapters, begin, begin + 30.0) for begin in (0.0, 30.0, 60.0))
    assert during[-1] == pytest.approx(0.6 + 0.4 * SHARES[-1], abs=0.02)
    assert max(before[-1], after[-1]) < 0.01
    assert during[:-1] == pytest.approx(0.4 * SHARES[:-1], abs=0.015)
    for calm in (before, after):
        assert calm == pytest.approx(SHARES, abs=0.02)


def test_requests_outside_the_crowd_are_the_same_without_it() -> None:
    crowded, calm = (flash_crowd(ARRIVALS, SHARES, (30.0, 60.0, share), seed=3) for share in (0.6, 0.0))
    outside = (ARRIVALS < 30.0) | (ARRIVALS >= 60.0)
    assert (crowded == calm)[outside].all()
    assert not (crowded == calm).all()


def test_drift_hands_each_share_to_the_next_adapter_and_starts_again_after_the_last() -> None:
    adapters = drifting(ARRIVALS, SHARES, 30.0, seed=4, step=49)
    for turn in range(3):
        expected = np.roll(SHARES, 49 * turn)
        assert measured(adapters, 30.0 * turn, 30.0 * (turn + 1)) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("draw", [
    lambda seed: flash_crowd(ARRIVALS, SHARES, (30.0, 60.0, 0.5), seed),
    lambda seed: drifting(ARRIVALS, SHARES, 30.0, seed),
])  # fmt: skip
def test_a_seed_decides(draw) -> None:
    assert draw(1).tolist() == draw(1).tolist()
    assert draw(1).tolist() != draw(2).tolist()
    assert draw(1).dtype == np.int64


@pytest.mark.parametrize(("call", "words"), [
    (lambda: flash_crowd(ARRIVALS, SHARES, (30.0, 60.0, 1.5), 0), r"crowd is \(30.0, 60.0, 1.5\).*lower the share"),
    (lambda: flash_crowd(ARRIVALS, SHARES, (60.0, 30.0, 0.5), 0), "not before its start"),
    (lambda: drifting(ARRIVALS, SHARES, 0.0, 0), "period is 0.0 s, must be positive; math.inf never moves"),
    (lambda: drifting(ARRIVALS, SHARES, 1.0, 0, step=0), "step is 0"),
])  # fmt: skip
def test_bad_input(call, words) -> None:
    with pytest.raises(ValueError, match=words):
        call()
