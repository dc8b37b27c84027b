"""A tiny world and a server of it without sockets, shared by the tests of its API."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = ["test_*.py"] if find_spec("fastapi") is None else []  # needs the extra serve


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.serve.world import make_world

    return make_world(tmp_path_factory.mktemp("serve"), 4)


@pytest.fixture(scope="session")
def shared(world: Any) -> Iterator[Any]:
    """Engine and client of one server; adapters ``tenant-0`` to ``tenant-2``, loading below the world's folder."""
    from fastapi.testclient import TestClient

    roots = [Path(world.checkpoint.parent, "adapters").resolve()]
    engine, app = world.app(3, roots=roots)
    with TestClient(app) as client:
        yield engine, client


@pytest.fixture
def client(shared: Any) -> Any:
    return shared[1]


@pytest.fixture(scope="session")
def alone(world: Any) -> Any:
    """An engine beside the server's, for what it should answer."""
    return world.engine(4)
