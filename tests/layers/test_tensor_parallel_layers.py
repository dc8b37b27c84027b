"""Every LoRA layer, plain and fully sharded, on ranks (threads, processes over gloo or NCCL) equals one rank."""

import pytest
import torch
from layer_cases import COMMON
from tensor_parallel_checks import check, check_graph

from punica.parallel import spawn_tensor_parallel
from tests.parallel.thread_ranks import on_threads


def gpus() -> int:
    return 4 if torch.cuda.device_count() >= 4 else 2


@pytest.mark.parametrize(("tp_size", "fp8"), [(2, None), (4, None), (2, "float8_e4m3fn")])
def test_threads_together_equal_one_rank(tp_size: int, fp8: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMON, "fp8", fp8)
    assert on_threads(tp_size, check) == [{}] * tp_size


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [2, 4])
def test_processes_together_equal_one_rank(tp_size: int) -> None:
    assert spawn_tensor_parallel(check, tp_size, backend="gloo") == [{}] * tp_size


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpus_together_equal_one_rank(dtype: str) -> None:
    assert spawn_tensor_parallel(check, gpus(), "cuda", dtype) == [{}] * gpus()


@pytest.mark.multi_gpu
def test_graphs_with_collectives_see_new_adapters() -> None:
    assert spawn_tensor_parallel(check_graph, gpus()) == [True] * gpus()
