"""Real process groups over gloo, 1, 2 and 4 ranks, each started once: what every rank asserts of collectives."""

import pytest
import torch
from torch import Tensor

from punica.parallel import (
    TorchDistGroup,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    spawn_tensor_parallel,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_gather,
)

# shape, dim, dtype
GATHERS = [
    ((2, 3), -1, torch.bfloat16),
    ((2, 3, 4), 0, torch.int32),
    ((2, 3, 4), 1, torch.float32),
    ((2, 3, 4), -3, torch.float64),
    ((0, 3), -1, torch.float32),
    ((1, 1, 2, 1, 3, 1, 1, 1, 2), 4, torch.float32),
]
REDUCTIONS = [((2, 3), torch.bfloat16), ((7,), torch.int64), ((0, 3), torch.float32)]


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Elements that tell their rank and their place, exact in every dtype; not contiguous."""
    place = torch.arange(torch.Size(shape).numel()).view(shape)
    return (place + 50 * rank).to(dtype).repeat_interleave(2, dim=-1)[..., ::2]


def check_gather(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    """A tensor arrives on all ranks, on each chosen rank alone, and by the group's own methods."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    mine, arrived = of_rank(rank, shape, dtype), []
    gathers, all_gathers = [tensor_model_parallel_gather], [tensor_model_parallel_all_gather]
    if size > 1:
        gathers.append(TorchDistGroup().gather)
        all_gathers.append(TorchDistGroup().all_gather)
    for gather in gathers:
        for dst in range(size):
            found = gather(mine, dst, dim)
            assert (found is not None) == (rank == dst)
            arrived += [] if found is None else [found]
    for found in [*arrived, *(gather(mine, dim) for gather in all_gathers)]:
        assert found.dtype == dtype
        assert torch.equal(found, torch.cat([of_rank(p, shape, dtype) for p in range(size)], dim))
    assert torch.equal(mine, of_rank(rank, shape, dtype))


def check_disagreement() -> None:
    """Every rank has the error when one holds another shape or dtype; afterwards they are in step again."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    others = ["((2, 3), 'torch.float32')"] * (size - 1)
    for odd, text in (
        (torch.ones(2, 4), "((2, 4), 'torch.float32')"),
        (torch.ones(6), "((6,), 'torch.float32')"),
        (torch.ones(2, 3, dtype=torch.float64), "((2, 3), 'torch.float64')"),
    ):
        for collective in (tensor_model_parallel_all_gather, tensor_model_parallel_gather):
            with pytest.raises(ValueError, match="in rank order") as raised:
                collective(odd if rank == size - 1 else torch.ones(2, 3))
            assert f"[{', '.join([*others, text])}] in rank order" in str(raised.value)
    assert tensor_model_parallel_all_reduce(torch.ones(1)).item() == size


def check_group(rank: int, size: int) -> None:
    """Its place is cached; one whose ranks are out of step refuses all collectives, and so it does after ``close``."""
    group, one = TorchDistGroup(), torch.ones(1)
    assert [(group.rank, group.world_size) for _ in range(2)] == [(rank, size)] * 2
    group.break_off("first")
    group.break_off("second")
    for call in (lambda: group.all_reduce(one), lambda: group.all_gather(one, 0), lambda: group.gather(one, 0, 0)):
        with pytest.raises(RuntimeError, match=rf"rank {rank} failed inside of a step \(first\)"):
            call()
    group.close()
    with pytest.raises(RuntimeError, match="after it ended"):
        group.all_reduce(one)


def everything(rank: int) -> str:
    size = get_tensor_model_parallel_world_size()
    for gather in GATHERS:
        check_gather(*gather)
    for shape, dtype in REDUCTIONS:
        expected = torch.stack([of_rank(p, shape, dtype).long() for p in range(size)]).sum(0).to(dtype)
        assert torch.equal(tensor_model_parallel_all_reduce(of_rank(rank, shape, dtype)), expected)
    with torch.device("meta"):  # where tensors are made unless told: not where shapes are compared
        assert tensor_model_parallel_all_gather(torch.tensor([rank], device="cpu")).tolist() == [*range(size)]
    if size > 1:
        check_disagreement()
        check_group(rank, size)
    return "done"


@pytest.mark.parametrize("tp_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives(tp_size: int) -> None:
    found = [everything(0)] if tp_size == 1 else spawn_tensor_parallel(everything, tp_size, backend="gloo")
    assert found == ["done"] * tp_size
