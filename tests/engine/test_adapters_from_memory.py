"""Adapters that come as tensors: the tokens of the folder, and each request one version while they are replaced."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from punica.adapters import LoRARequest, PEFTHelper
from punica.engine import Engine, Request
from tests.world import finish, reading_beside, tokens_of

ID = 9


def tensors_of(backbone, version: int) -> dict[str, torch.Tensor]:
    return load_file(Path(backbone.adapters[version].lora_path) / "adapter_model.safetensors")


def config_of(backbone, version: int) -> dict[str, object]:
    helper = PEFTHelper.from_local_dir(backbone.adapters[version].lora_path)
    fields = {"r": helper.r, "lora_alpha": helper.lora_alpha, "target_modules": helper.target_modules}
    return {"peft_type": "LORA", **fields}


def in_memory(backbone, version: int, **fields: object) -> LoRARequest:
    given = {"lora_name": "policy", "lora_int_id": ID, "load_inplace": True, "tensors": tensors_of(backbone, version)}
    return LoRARequest(**{**given, "config": config_of(backbone, version), **fields})


@pytest.fixture(params=["in turn", "beside"])
def engine(backbone, request) -> Engine:
    """An engine as on a CPU, and one that packs adapters in threads as on a GPU."""
    engine = backbone.engine()
    return reading_beside(engine) if request.param == "beside" else engine


@pytest.fixture
def loads(engine, monkeypatch) -> list[tuple[str, threading.Thread]]:
    """Source and thread of each load."""
    noted, real = [], engine.manager._loader.load

    def load(request):
        noted.append((request.source, threading.current_thread()))
        return real(request)

    monkeypatch.setattr(engine.manager._loader, "load", load)
    return noted


def test_tokens_are_those_of_the_folder_whatever_becomes_of_the_tensors(backbone, engine) -> None:
    adapters = []
    for version in (2, 4, 5):
        tensors = tensors_of(backbone, version)
        adapters.append(LoRARequest(f"m{version}", tensors=tensors, config=config_of(backbone, version)))
        for tensor in tensors.values():
            tensor.fill_(float("nan"))  # the trainer goes on with its buffers
    results = engine.generate([(1, 7, version) for version in (2, 4, 5)], adapters, 6)
    assert tokens_of(results) == [backbone.generate_merged((1, 7, version), version, 6) for version in (2, 4, 5)]


def test_the_same_tensors_are_loaded_once_however_often_they_are_asked_for(backbone, engine, loads) -> None:
    adapter = in_memory(backbone, 2)
    for _ in range(3):
        engine.generate([(1, 2), (3, 4)], adapter, 3)
    assert [source for source, _ in loads] == [adapter.source]
    engine.generate([(1, 2)], in_memory(backbone, 2), 3)  # equal ones in another request count as others
    assert len(loads) == 2


def test_another_version_is_refused_while_one_is_in_use_unless_it_may_replace_it(backbone) -> None:
    engine = backbone.engine()
    engine.add_request(Request("old", [1, 7], 3, in_memory(backbone, 1)))
    with pytest.raises(ValueError, match=r"adapter id 9 stands for .*load_inplace=True"):
        engine.add_request(Request("new", [1, 7], 3, in_memory(backbone, 2, load_inplace=False)))
    finish(engine)
    results = engine.generate([(1, 7)], in_memory(backbone, 2, load_inplace=False), 3)
    assert tokens_of(results) == [backbone.generate_merged((1, 7), 2, 3)]
