"""Checks that the ranks of one spawned world make, many in a process start; the tests read their verdicts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from punica.parallel import (
    TorchDistGroup,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
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


def everything(rank: int) -> dict[str, Any]:
    """One world's verdicts on collectives (of layers: `tests/layers/tensor_parallel_checks`)."""
    size = get_tensor_model_parallel_world_size()
    answers = {
        "gathers": [gathers(*gather) for gather in GATHERS],
        "reductions": [reduces(*reduction) for reduction in REDUCTIONS],
        "default device": under_a_default_device(),
    }
    return answers | ({"disagreement": disagreement(), "group": use_of_a_group()} if size > 1 else {})


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Elements that tell their rank and their place, exact in every dtype; not contiguous."""
    place = torch.arange(torch.Size(shape).numel()).view(shape)
    return (place + 50 * rank).to(dtype).repeat_interleave(2, dim=-1)[..., ::2]


def gathers(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> dict[str, bool]:
    """Whether a tensor arrives on all ranks, on each chosen rank alone, and by the group's own methods."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    expected = torch.cat([of_rank(p, shape, dtype) for p in range(size)], dim)
    mine, before = of_rank(rank, shape, dtype), of_rank(rank, shape, dtype)

    def right(found: Tensor | None, receives: bool) -> bool:
        if not receives:
            return found is None
        return found is not None and found.dtype == dtype and torch.equal(found, expected)

    verdicts = {"all": right(tensor_model_parallel_all_gather(mine, dim), True)}
    for dst in range(size):
        verdicts[f"to {dst}"] = right(tensor_model_parallel_gather(mine, dst, dim), rank == dst)
    if size > 1:
        group = TorchDistGroup()
        verdicts["group, all"] = right(group.all_gather(mine, dim), True)
        verdicts["group, last"] = right(group.gather(mine, size - 1, dim), rank == size - 1)
    verdicts["input unchanged"] = torch.equal(mine, before)
    return verdicts


def reduces(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    expected = torch.stack([of_rank(p, shape, dtype).long() for p in range(size)]).sum(0).to(dtype)
    return torch.equal(tensor_model_parallel_all_reduce(of_rank(rank, shape, dtype)), expected)


def under_a_default_device() -> list[int]:
    """A gather of CPU tensors where tensors are made elsewhere unless told."""
    mine = torch.tensor([get_tensor_model_parallel_rank()])
    with torch.device("meta"):
        return tensor_model_parallel_all_gather(mine).tolist()


def disagreement() -> list[str]:
    """What every rank says when one holds another shape or dtype; the ranks must be in step again afterwards."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    odd = rank == size - 1
    wrong = [
        torch.ones(2, 4 if odd else 3),
        torch.ones(6 if odd else (2, 3)),
        torch.ones(2, 3, dtype=torch.float64 if odd else torch.float32),
    ]
    said = []
    for tensor in wrong:
        for collective in (tensor_model_parallel_all_gather, tensor_model_parallel_gather):
            try:
                collective(tensor)
            except ValueError as error:
                said.append(str(error))
    assert tensor_model_parallel_all_reduce(torch.ones(1)).item() == size
    return said


def use_of_a_group() -> dict[str, Any]:
    """Its place is cached; one whose ranks are out of step refuses all collectives, and so it does after ``close``."""
    group = TorchDistGroup()
    place = [(group.rank, group.world_size) for _ in range(2)]
    group.break_off("first")
    group.break_off("second")
    calls = {
        "all_reduce": lambda: group.all_reduce(torch.ones(1)), "all_gather": lambda: group.all_gather(torch.ones(1), 0),
        "gather": lambda: group.gather(torch.ones(1), 0, 0),
    }  # fmt: skip
    broken = {name: refusal(call) for name, call in calls.items()}
    group.close()
    return {"place": place, "broken": broken, "closed": refusal(calls["all_reduce"])}


def refusal(call: Callable[[], Any]) -> str:
    """What a RuntimeError says, nothing without one."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""
