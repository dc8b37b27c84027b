"""Collectives and helpers of a group, and which group a thread sees."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from punica.parallel import (
    SingleProcessGroup,
    TorchDistGroup,
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    set_tensor_parallel_group,
    split_tensor_along_last_dim,
    tensor_parallel,
)


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
