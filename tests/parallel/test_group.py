"""Groups: helpers, which one a thread sees, and that what fails on one rank fails on all with one message."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from punica.parallel import (
    SingleProcessGroup,
    TorchDistGroup,
    all_ranks_agree,
    check_same_on_all_ranks,
    current_group,
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    set_tensor_parallel_group,
    spawn_tensor_parallel,
    split_tensor_along_last_dim,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_gather,
    tensor_parallel,
)
from tests.parallel.thread_ranks import on_threads


@pytest.mark.parametrize(("a", "b"), [(7, 2), (8, 0), (8, -2)])
def test_divide_names_both_numbers(a, b):
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match=f"{a} .* {b}"):
        divide(a, b)


def test_split_along_last_dim_gives_views():
    tensor = torch.arange(12).view(2, 6)
    parts = split_tensor_along_last_dim(tensor, 3)
    assert [part.tolist() for part in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert {part.untyped_storage().data_ptr() for part in parts} == {tensor.untyped_storage().data_ptr()}
    with pytest.raises(ValueError, match=r"6 .* 4"):
        split_tensor_along_last_dim(tensor, 4)


def place():
    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


class Second(SingleProcessGroup):
    rank, world_size = 1, 2


def test_context_is_of_the_thread_and_set_is_of_the_process():
    def elsewhere():
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(place).result()

    with tensor_parallel(Second()):
        assert (place(), elsewhere()) == ((1, 2), (0, 1))
        with tensor_parallel(SingleProcessGroup()):
            assert place() == (0, 1)
        assert place() == (1, 2)
    set_tensor_parallel_group(Second())
    try:
        assert elsewhere() == (1, 2)
    finally:
        set_tensor_parallel_group(None)
    assert place() == (0, 1)


@pytest.mark.parametrize("use", [lambda group: group.rank, lambda group: group.all_gather(torch.ones(1), 0)])
def test_torch_dist_group_before_initialisation(use):
    with pytest.raises(RuntimeError, match="init_process_group"):
        use(TorchDistGroup())


SIZE = 3


def on_all_ranks(body) -> list[Exception | str]:
    def run(rank: int) -> str:
        with all_ranks_agree():
            body(rank)
        return "went on"

    return on_threads(SIZE, run)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (FileNotFoundError("no folder"), FileNotFoundError, "no folder"),
        (TypeError("no tensor"), TypeError, "no tensor"),
        (ValueError("größer als ein Byte"), ValueError, "größer als ein Byte"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), ValueError, "can't decode"),
        (RuntimeError("pinned"), RuntimeError, "pinned"),
        (MemoryError("full"), MemoryError, "full"),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
        (KeyError("x"), RuntimeError, "KeyError: 'x'"),
        (ValueError("\ud800" + "x" * 5000), ValueError, "xxx"),
    ],
    ids=["file", "type", "value", "kind of value", "runtime", "memory", "device memory", "other", "too long to send"],
)
@pytest.mark.parametrize("failing", [{1}, {0, 1, 2}], ids=str)
def test_all_fail_alike_when_one_does(error, kind, text, failing) -> None:
    def body(rank: int) -> None:
        if rank in failing:
            raise error if rank == min(failing) else BufferError("another one")

    outcomes = on_all_ranks(body)
    assert [type(outcome) for outcome in outcomes] == [kind] * SIZE
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert str(outcomes[0]).startswith(f"rank {min(failing)} of {SIZE}: ")
    assert text in str(outcomes[0])


@pytest.mark.parametrize("values", [[1, 1, 1], ["a", "b", "a"], [None, 1, 1]])
def test_values_that_differ_between_ranks_fail_on_all(values) -> None:
    def run(rank: int) -> str:
        with all_ranks_agree() as same:
            same.append(values[rank])
        return "went on"

    outcomes = on_threads(SIZE, run)
    if len(set(values)) == 1:
        assert outcomes == ["went on"] * SIZE
    else:
        assert [type(outcome) for outcome in outcomes] == [ValueError] * SIZE


def test_one_rank_keeps_its_error_as_it_is() -> None:
    with pytest.raises(KeyError, match="own"), all_ranks_agree():
        raise KeyError("own")


def test_numbers_that_differ_between_ranks_are_named_on_all_of_them() -> None:
    same = on_threads(SIZE, lambda rank: check_same_on_all_ranks("a shape", (0, 8)))
    assert same == [None] * SIZE
    outcomes = on_threads(SIZE, lambda rank: check_same_on_all_ranks("a shape", (0, 8 if rank else 4)))
    assert [type(outcome) for outcome in outcomes] == [RuntimeError] * SIZE
    assert all(str([[0, 4], [0, 8], [0, 8]]) in str(outcome) for outcome in outcomes)
    assert current_group().world_size == 1
    check_same_on_all_ranks("alone", (1,))


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
