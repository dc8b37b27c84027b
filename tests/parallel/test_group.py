"""The group's helpers on one rank, with stand-in groups, and which group a thread sees."""

import threading

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
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_gather,
    tensor_parallel,
)


class EchoGroup:
    """Rank 1 of 2, where the other rank holds the same tensor."""

    rank = 1
    world_size = 2

    def all_reduce(self, tensor):
        return tensor + tensor

    def all_gather(self, tensor, dim):
        return torch.cat([tensor, tensor], dim=dim)

    def gather(self, tensor, dst, dim):
        return torch.cat([tensor, tensor], dim=dim) if dst == self.rank else None


@pytest.mark.parametrize(("a", "b"), [(7, 2), (8, 0), (8, -2)])
def test_divide_names_both_numbers(a, b):
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match=f"{a} is not divisible by {b}"):
        divide(a, b)


def test_split_along_last_dim_gives_views():
    tensor = torch.arange(12).view(2, 6)
    parts = split_tensor_along_last_dim(tensor, 3)
    assert [part.tolist() for part in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        split_tensor_along_last_dim(tensor, 4)


def test_one_rank_returns_its_input():
    tensor = torch.randn(2, 3)
    assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (0, 1)
    assert tensor_model_parallel_all_reduce(tensor) is tensor
    assert tensor_model_parallel_all_gather(tensor) is tensor
    assert tensor_model_parallel_gather(tensor, dst=0, dim=0) is tensor


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_context_manager_installs_and_restores(dim):
    tensor = torch.randn(2, 3)
    with tensor_parallel(EchoGroup()):
        assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (1, 2)
        assert torch.equal(tensor_model_parallel_all_reduce(tensor), 2 * tensor)
        assert torch.equal(tensor_model_parallel_all_gather(tensor, dim), torch.cat([tensor, tensor], dim))
        assert tensor_model_parallel_gather(tensor, dst=0) is None
        with tensor_parallel(SingleProcessGroup()):
            assert get_tensor_model_parallel_world_size() == 1
        assert get_tensor_model_parallel_world_size() == 2
    assert get_tensor_model_parallel_world_size() == 1


def test_context_is_of_the_thread_and_set_is_of_the_process():
    def seen_by_another_thread():
        sizes = []
        thread = threading.Thread(target=lambda: sizes.append(get_tensor_model_parallel_world_size()))
        thread.start()
        thread.join()
        return sizes[0]

    with tensor_parallel(EchoGroup()):
        assert seen_by_another_thread() == 1
    set_tensor_parallel_group(EchoGroup())
    try:
        assert seen_by_another_thread() == 2
    finally:
        set_tensor_parallel_group(None)
    assert get_tensor_model_parallel_world_size() == 1


@pytest.mark.parametrize("use", [lambda group: group.rank, lambda group: group.all_gather(torch.ones(1), 0)])
def test_torch_dist_group_before_initialisation(use):
    with pytest.raises(RuntimeError, match="init_process_group"):
        use(TorchDistGroup())
