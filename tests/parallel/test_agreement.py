"""What fails on one rank fails on all, with one message, before any of them goes on."""

import threading

import pytest
import torch
from torch import Tensor

from punica.parallel import all_ranks_agree, tensor_parallel

SIZE = 3


class Threads:
    """A group whose ranks are threads of this process."""

    world_size = SIZE

    def __init__(self, rank: int, meeting: threading.Barrier, shared: list) -> None:
        self.rank, self._meeting, self._shared = rank, meeting, shared

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self._meeting.wait(20)
        self._shared[self.rank] = tensor
        self._meeting.wait(20)
        return torch.cat(self._shared, dim)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    gather = all_reduce


def on_all_ranks(body) -> list[Exception | str]:
    """What comes of `body(rank)` on every rank."""
    meeting, shared, outcomes = threading.Barrier(SIZE), [None] * SIZE, [None] * SIZE

    def run(rank: int) -> None:
        try:
            with tensor_parallel(Threads(rank, meeting, shared)), all_ranks_agree():
                body(rank)
            outcomes[rank] = "went on"
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def test_all_go_on_when_nothing_fails() -> None:
    assert on_all_ranks(lambda rank: None) == ["went on"] * SIZE


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (FileNotFoundError("no folder"), FileNotFoundError, "no folder"),
        (TypeError("no tensor"), TypeError, "no tensor"),
        (ValueError("größer als ein Byte"), ValueError, "größer als ein Byte"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), ValueError, "can't decode"),
        (RuntimeError("pinned"), RuntimeError, "pinned"),
        (KeyError("x"), RuntimeError, "KeyError: 'x'"),
        (ValueError("\ud800" + "x" * 5000), ValueError, "xxx"),
    ],
    ids=["file", "type", "value", "kind of value", "runtime", "other", "too long to send"],
)
@pytest.mark.parametrize("failing", [{0}, {1}, {1, 2}, {0, 1, 2}], ids=str)
def test_all_fail_alike_when_one_does(error, kind, text, failing) -> None:
    def body(rank: int) -> None:
        if rank in failing:
            raise error if rank == min(failing) else MemoryError("another one")

    outcomes = on_all_ranks(body)
    assert [type(outcome) for outcome in outcomes] == [kind] * SIZE
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert str(outcomes[0]).startswith(f"rank {min(failing)} of {SIZE}: ")
    assert text in str(outcomes[0])


def test_one_rank_keeps_its_error_as_it_is() -> None:
    with pytest.raises(KeyError, match="own"), all_ranks_agree():
        raise KeyError("own")
