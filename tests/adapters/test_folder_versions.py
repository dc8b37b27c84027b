"""A manager serves an id from the version of its folder that was loaded last, whole, or says what has changed."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from adapter_world import VOCAB, adapter, adapter_tensors, decode, one_layer, unchanged

from punica.adapters import LoRAModelManager, LoRARequest
from punica.adapters.read import WeightsFile
from punica.config import LoRAConfig
from tests.parallel.thread_ranks import on_threads

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
B = "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"


def rewrite(tenants, what: str, modules: tuple[str, ...] | None = None) -> None:
    """Change adapter 1 of seed 1: its config, a number, or its shapes."""
    tensors = adapter_tensors(1, modules=modules)
    if what == "config":
        tenants.write(1, tensors, lora_alpha=1.0)
    elif what == "number":
        tensors[B][0, 0] += 1
        tenants.write(1, tensors)
    else:
        tenants.write(1, {name: tensor.double() for name, tensor in tensors.items()})


CHANGED = {"config": CONFIG, "number": WEIGHTS, "types": WEIGHTS}


@pytest.mark.parametrize("call", ["add_adapter", "set_active_adapters", "add_read_adapter", "check_adapter"])
@pytest.mark.parametrize("what", CHANGED)
def test_an_evicted_adapter_comes_back_as_it_was_or_not_at_all(make_manager, tenants, what, call) -> None:
    manager = make_manager(max_loras=1)
    calls = {
        "add_adapter": manager.add_adapter, "check_adapter": manager.check_adapter,
        "set_active_adapters": lambda request: manager.set_active_adapters([request], decode(1)),
        "add_read_adapter": lambda request: manager.add_read_adapter(request, manager.read_adapter(request)),
    }  # fmt: skip
    tenants.write(1, adapter_tensors(1))
    manager.add_adapter(tenants.request(1))
    manager.add_adapter(adapter(2))
    rewrite(tenants, what)
    if call == "check_adapter" and what == "number":
        manager.check_adapter(tenants.request(1))  # it reads none
    else:
        with unchanged(manager), pytest.raises(ValueError, match=rf"\(id 1\) has changed .*{CHANGED[what]}; load"):
            calls[call](tenants.request(1))
    calls[call](tenants.request(1, load_inplace=True))
    if call != "check_adapter":
        assert manager.is_active(1)
        manager.add_adapter(adapter(2))
        calls[call](tenants.request(1))
    manager.remove_adapter(1)
    tenants.write(1, adapter_tensors(1))
    calls[call](tenants.request(1))


def test_a_request_that_was_loaded_in_place_is_so_once_whatever_is_evicted(make_manager, tenants) -> None:
    manager = make_manager(max_loras=1)
    tenants.write(1, adapter_tensors(1))
    request = tenants.request(1, load_inplace=True)
    manager.set_active_adapters([request], decode(1))
    manager.remove_oldest_adapter()
    manager.set_active_adapters([request], decode(1))
    rewrite(tenants, "number")
    manager.set_active_adapters([request], decode(1))
    manager.remove_oldest_adapter()
    with pytest.raises(ValueError, match="has changed on disk"):
        manager.set_active_adapters([request], decode(1))
    manager.set_active_adapters([tenants.request(1, load_inplace=True)], decode(1))


def test_no_folder_stands_in_for_a_model_that_was_evicted(make_manager, tenants) -> None:
    manager = make_manager(max_loras=1)
    tenants.write(2, adapter_tensors(2))
    manager.add_adapter(adapter(1))
    tenants.write(1, adapter_tensors(3))
    manager.set_active_adapters([tenants.request(1)], decode(1))
    manager.add_adapter(tenants.request(2))
    with pytest.raises(ValueError, match=r"'tenant 1' .* was registered as a LoRAModel and has left host memory; add"):
        manager.set_active_adapters([tenants.request(1)], decode(1))
    manager.add_adapter(adapter(1))
    manager.set_active_adapters([tenants.request(1)], decode(1))


def test_requests_keep_the_version_that_they_began_with_when_another_is_expected(make_manager, tenants) -> None:
    """As another runner's load says it: the folder is served in that version alone, once it is there."""
    manager, other = make_manager(max_loras=2), make_manager()
    tenants.write(1, adapter_tensors(1))
    request = tenants.request(1)
    manager.add_adapter(request)
    held = manager.hold(1)
    rewrite(tenants, "number")
    other.add_adapter(request)
    source, version = other.folder_versions()[1]
    manager.expect_version(request, version)
    assert (source, manager.folder_versions()[1]) == (request.source, (request.source, version))
    assert (manager.get_adapter(1), held.slot, held.key) == (None, 0, held)
    manager.add_adapter(request)
    assert manager.lora_index_to_id == [None, 1]
    manager.release(held)
    assert manager.active_versions() == [manager.loaded(1)]


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_files_of_two_versions_are_not_mixed(make_manager, tenants, monkeypatch, file, when) -> None:
    """The folder is rewritten between the readings of its config and of its numbers, or while these are read."""
    manager, real = make_manager(), WeightsFile.numbers
    tenants.write(1, adapter_tensors(1))
    folder = Path(tenants.request(1).lora_path)
    config = json.loads((folder / CONFIG).read_text()) | {"lora_alpha": 99}

    def write() -> None:
        if file == CONFIG:
            (folder / CONFIG).write_text(json.dumps(config))
        else:
            status = (folder / WEIGHTS).stat()
            with (folder / WEIGHTS).open("r+b") as opened:
                opened.seek(-4, os.SEEK_END)
                opened.write(bytes(4))
            os.utime(folder / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns + 5_000_000))

    def numbers(*arguments):
        if when == "before":
            write()
        found = real(*arguments)
        if when == "after":
            write()
        return found

    monkeypatch.setattr(WeightsFile, "numbers", numbers)
    with pytest.raises(ValueError, match=f"'tenant 1' .*: {file} changed while the folder was read; load it when all"):
        manager.add_adapter(tenants.request(1))
    assert manager.list_adapters() == {}
    monkeypatch.undo()
    manager.add_adapter(tenants.request(1))
    assert torch.isfinite(manager.get_adapter(1).get_lora("model.layers.0.self_attn.o_proj").lora_a).all()


@pytest.mark.parametrize("what", [None, *CHANGED])
def test_ranks_that_read_different_files_serve_neither(tenants, what) -> None:
    """Each rank of a group reads by itself, on whichever disk."""
    tenants.write(1, adapter_tensors(1, modules=("layers.0.self_attn.o_proj",)))
    folders = [shutil.copytree(tenants.root / "adapter1", tenants.root / f"rank{rank}") for rank in range(2)]
    if what is not None:
        rewrite(tenants, what, ("layers.0.self_attn.o_proj",))
        shutil.copytree(tenants.root / "adapter1", folders[1], dirs_exist_ok=True)

    def run(rank: int) -> str:
        manager = LoRAModelManager(one_layer(2, rank), 4, 16, VOCAB, LoRAConfig(max_lora_rank=8), "cpu")
        manager.add_adapter(LoRARequest("tenant", 1, str(folders[rank])))
        return "served"

    found = on_threads(2, run)
    if what is None:
        assert found == ["served"] * 2
    else:
        assert [type(each) for each in found] == [ValueError] * 2
        assert {str(each)[:36] for each in found} == {"the ranks have read different files:"}
