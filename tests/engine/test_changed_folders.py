"""What an id serves does not depend on eviction: the version that was loaded last, or a refusal."""

import os
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from punica.adapters import LoRARequest
from punica.engine import Engine, Request, RequestState
from tests.world import finish, reading_beside

ID, WEIGHTS = 9, "adapter_model.safetensors"
PROMPT, NEW = (1, 7, 3), 6


def change_weights(folder: Path) -> None:
    """Two matrices of one shape change places, so that the file's size, time and header stay what they are."""
    file = folder / WEIGHTS
    status, tensors = file.stat(), load_file(file)
    one, other = (f"base_model.model.model.layers.{i}.mlp.up_proj.lora_B.weight" for i in (0, 1))
    save_file(tensors | {one: tensors[other], other: tensors[one]}, file, metadata={"format": "pt"})
    assert file.stat().st_size == status.st_size
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def folder(backbone, tmp_path: Path) -> Path:
    path = tmp_path / "tenant"
    shutil.copytree(backbone.adapters[2].lora_path, path)
    save_file(load_file(path / WEIGHTS), path / WEIGHTS, metadata={"format": "pt"})
    return path


def tenant(folder: Path, **fields) -> LoRARequest:
    return LoRARequest("tenant", ID, str(folder), **fields)


def ask(engine: Engine, adapter: LoRARequest, name: str = "asks") -> RequestState:
    state = engine.add_or_fail(Request(name, PROMPT, NEW, adapter))
    while not state.has_ended:
        engine.step()
    return state


def evict(backbone, engine: Engine) -> None:
    """Push the tenant out of host memory."""
    assert ask(engine, backbone.adapters[3], "other").error is None
    assert engine.manager.get_adapter(ID) is None


@pytest.mark.parametrize("beside", [False, True])
def test_after_an_eviction_the_loaded_version_or_a_refusal(backbone, folder, tmp_path, beside) -> None:
    engine = backbone.engine(max_loras=1)
    engine = reading_beside(engine) if beside else engine
    shutil.copytree(folder, tmp_path / "copy")
    old = backbone.generate_merged(PROMPT, 2, NEW)
    assert ask(engine, tenant(folder)).output_token_ids == old
    change_weights(folder)
    assert ask(engine, tenant(folder)).output_token_ids == old, "it is in memory"
    for _ in range(2):  # a refusal changes nothing
        evict(backbone, engine)
        refused = ask(engine, tenant(folder))
        assert refused.output_token_ids == []
        assert re.search(rf"adapter 'tenant' \(id 9\) .*: {WEIGHTS}; load it again", refused.error)
    new = ask(engine, tenant(folder, load_inplace=True)).output_token_ids
    assert new == ask(backbone.engine(), tenant(folder)).output_token_ids != old
    evict(backbone, engine)
    assert ask(engine, tenant(folder)).output_token_ids == new, "it was loaded again"
    shutil.copy(tmp_path / "copy" / WEIGHTS, folder)
    evict(backbone, engine)
    assert "has changed on disk" in ask(engine, tenant(folder)).error, "the old version is not the one loaded last"
    engine.manager.remove_adapter(ID)
    assert ask(engine, tenant(folder)).output_token_ids == old


def test_a_prefetch_of_a_changed_folder_makes_nothing_active(backbone, folder) -> None:
    engine = backbone.engine(max_loras=2)
    ask(engine, tenant(folder))
    for i in (3, 4):
        ask(engine, backbone.adapters[i], f"other {i}")
    first = engine.add_request(Request("first", [1], 6, backbone.adapters[3]))
    second = engine.add_request(Request("second", PROMPT, NEW, tenant(folder)))
    change_weights(folder)  # behind the check of its arrival
    engine.step()  # tries the load of `second`
    assert engine.manager.get_adapter(ID) is None
    finish(engine)
    assert f": {WEIGHTS}; load it again" in second.error
    assert first.error is None
