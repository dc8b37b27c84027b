"""Every LoRA layer, plain and fully sharded, in real processes over gloo or NCCL equals one rank."""

import pytest
import torch
from tensor_parallel_checks import NAMES, check, check_graph

from punica.parallel import spawn_tensor_parallel


def gpus() -> int:
    return 4 if torch.cuda.device_count() >= 4 else 2


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, "cpu", "float32", None), id="tp2"),
        pytest.param((4, "cpu", "float32", None), id="tp4", marks=pytest.mark.slow),
        pytest.param((2, "cpu", "float32", "float8_e4m3fn"), id="tp2 with FP8 slots", marks=pytest.mark.slow),
        *(
            pytest.param((None, "cuda", dtype, None), id=f"GPUs, {dtype}", marks=pytest.mark.multi_gpu)
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What each rank found; one group of processes runs all checks, since starting it is what takes time."""
    ranks, *how = request.param
    return spawn_tensor_parallel(check, ranks or gpus(), *how)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_together_equal_one_rank(name: str, found: list[dict[str, str]]) -> None:
    assert [of_rank[name] for of_rank in found] == [""] * len(found)


@pytest.mark.multi_gpu
def test_graphs_with_collectives_see_new_adapters() -> None:
    assert spawn_tensor_parallel(check_graph, gpus()) == [True] * gpus()
