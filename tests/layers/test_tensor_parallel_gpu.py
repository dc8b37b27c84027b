"""Every LoRA layer over NCCL, one process per GPU: the checks of test_tensor_parallel_layers."""

import pytest
import torch
from tensor_parallel_checks import NAMES, check, check_graph

from punica.parallel import spawn_tensor_parallel

pytestmark = pytest.mark.multi_gpu


def ranks() -> int:
    return 4 if torch.cuda.device_count() >= 4 else 2


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return spawn_tensor_parallel(check, ranks(), "cuda", request.param)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_together_equal_one_rank(name: str, found: list[dict[str, str]]) -> None:
    assert [of_rank[name] for of_rank in found] == [""] * len(found)


def test_graphs_with_collectives_see_new_adapters() -> None:
    assert spawn_tensor_parallel(check_graph, ranks()) == [True] * ranks()
