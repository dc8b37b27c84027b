"""Every LoRA layer, plain and fully sharded, in real processes over gloo equals one rank."""

import pytest
from tensor_parallel_checks import NAMES, check

from punica.parallel import spawn_tensor_parallel


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, None), id="tp2"),
        pytest.param((4, None), id="tp4", marks=pytest.mark.slow),
        pytest.param((2, "float8_e4m3fn"), id="tp2 with FP8 slots", marks=pytest.mark.slow),
    ],
)
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What each rank found; one group of processes runs all checks, since starting it is what takes time."""
    ranks, fp8 = request.param
    return spawn_tensor_parallel(check, ranks, "cpu", "float32", fp8)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_together_equal_one_rank(name: str, found: list[dict[str, str]]) -> None:
    assert [of_rank[name] for of_rank in found] == [""] * len(found)
