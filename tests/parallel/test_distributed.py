"""Real process groups over gloo, 1, 2 and 4 ranks, each started once: what they found in ``dist_checks``."""

import functools
from typing import Any

import pytest
from dist_checks import GATHERS, REDUCTIONS, everything

from punica.parallel import spawn_tensor_parallel


@functools.cache
def world_of(size: int) -> list[dict[str, Any]]:
    return [everything(0)] if size == 1 else spawn_tensor_parallel(everything, size, backend="gloo")


FOUR = pytest.param(4, marks=pytest.mark.slow)
any_size = pytest.mark.parametrize("tp_size", [1, 2, FOUR], ids=lambda size: f"tp{size}")
many_ranks = pytest.mark.parametrize("tp_size", [2, FOUR], ids=lambda size: f"tp{size}")


@any_size
@pytest.mark.parametrize("index", range(len(GATHERS)), ids=[f"{s}-dim{d}-{t}" for s, d, t in GATHERS])
def test_gathered_in_rank_order(tp_size: int, index: int) -> None:
    for rank in world_of(tp_size):
        assert [label for label, right in rank["gathers"][index].items() if not right] == []


@any_size
@pytest.mark.parametrize("index", range(len(REDUCTIONS)), ids=[f"{s}-{t}" for s, t in REDUCTIONS])
def test_sum_over_ranks(tp_size: int, index: int) -> None:
    assert [rank["reductions"][index] for rank in world_of(tp_size)] == [True] * tp_size


@many_ranks
def test_disagreeing_ranks_all_get_an_error(tp_size: int) -> None:
    wrong = ["((2, 4), 'torch.float32')", "((6,), 'torch.float32')", "((2, 3), 'torch.float64')"]
    others = ", ".join(["((2, 3), 'torch.float32')"] * (tp_size - 1))
    for rank in world_of(tp_size):
        for found, last in zip(rank["disagreement"], [one for one in wrong for _ in range(2)], strict=True):
            assert f"[{others}, {last}] in rank order" in found


@many_ranks
def test_group_knows_its_place_until_closed(tp_size: int) -> None:
    for rank, answers in enumerate(world_of(tp_size)):
        assert answers["group"]["place"] == [(rank, tp_size)] * 2
        for name, text in answers["group"]["broken"].items():
            assert f"rank {rank} failed inside of a step (first)" in text, name
        assert "after it ended" in answers["group"]["closed"]


@any_size
def test_a_default_device_is_not_where_shapes_are_compared(tp_size: int) -> None:
    assert [answers["default device"] for answers in world_of(tp_size)] == [[*range(tp_size)]] * tp_size
