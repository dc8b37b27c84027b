"""The tests' world for the engine, requests of any kind, and a call that serves them."""

from collections.abc import Callable

import pytest
import torch

from punica.engine.runner import ModelRunner
from tests.world import Backbone, Wish, write_backbone


@pytest.fixture(scope="session")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return write_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's steps, and a GPU's, where a step begins before the host has read the one before."""
    monkeypatch.setattr(ModelRunner, "works_ahead", request.param)


@pytest.fixture(scope="session")
def mixed_wishes() -> list[Wish]:
    """16 requests: six adapters of ranks 1 to 16 and no adapter, prompts of 1 to 33 tokens, 1 to 17 new ones."""
    generator = torch.Generator().manual_seed(11)
    lengths, news = [1, 2, 15, 16, 17, 31, 32, 33], [1, 2, 7, 12, 17, 16]
    return [
        Wish(tuple(torch.randint(256, (lengths[i % 8],), generator=generator).tolist()), i * 5 % 7, news[i % 6])
        for i in range(16)
    ]


@pytest.fixture(scope="session")
def mixed_tokens(backbone: Backbone, mixed_wishes: list[Wish]) -> list[list[int]]:
    return [backbone.generate_merged(*wish) for wish in mixed_wishes]


@pytest.fixture
def serve(backbone: Backbone) -> Callable[..., list[list[int]]]:
    return backbone.serve
