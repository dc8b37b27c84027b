"""Adapters on disk for the runners of `runner_world`."""

import pytest

from punica.adapters import LoRARequest
from tests.cluster.runner_world import write_adapters


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LoRARequest]:
    return write_adapters(tmp_path_factory.mktemp("adapters"))
