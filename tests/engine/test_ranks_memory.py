"""Two tensor-parallel ranks, one out of memory: both report it, without any change."""

import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from punica.adapters import LoRAModelManager, LoRARequest, random_adapter, wrap
from punica.engine import Engine, EngineConfig, Request
from punica.engine import config as sizes
from punica.layers import BaseLayerWithLoRA
from punica.models import LlamaForCausalLM
from punica.parallel import memory, spawn_tensor_parallel
from tests.world import finish

POOR = 1  # the rank with too little memory
OUT = torch.OutOfMemoryError("no memory left here")
CONFIG = EngineConfig(max_batch_size=4, max_model_len=64)


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the outcome that both ranks must share."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "went on", ""


def fails(*given: Any, **named: Any) -> Any:
    raise OUT


def builds(folder: Path, model: LlamaForCausalLM, is_poor: bool) -> dict[str, tuple[str, str]]:
    """Engines and a manager that cannot be built on one rank, all for one model."""
    lora, found = CONFIG.lora_config(16, max_loras=2), {}

    def engine() -> Engine:
        return Engine(model, lora, CONFIG)

    manager = partial(LoRAModelManager, model, 4, 64, 256, lora, "cpu")
    from_folder = partial(Engine.from_pretrained, folder, max_batch_size=2)
    real, calls = wrap._wrap, itertools.count(1)

    def third_fails(*arguments: Any) -> BaseLayerWithLoRA:
        return fails() if next(calls) == 3 else real(*arguments)

    for name, call, place, replacement in (
        ("cache and slots", engine, (memory, "free_bytes"), lambda device: 100_000),
        ("slots alone", manager, (memory, "free_bytes"), lambda device: 1_000),
        ("fitted blocks", from_folder, (sizes, "free_bytes"), lambda device: 0),
        ("allocating the cache", engine, (sizes, "KVCache"), fails),
        ("allocating the slots", engine, (wrap, "_wrap"), third_fails),
    ):
        with patch.object(*place, replacement) if is_poor else nullcontext():
            found[name] = outcome(call)
        assert not any(isinstance(module, BaseLayerWithLoRA) for module in model.modules()), name
    return found


def serves(model: LlamaForCausalLM, adapters: dict[int, LoRARequest], is_poor: bool) -> dict[str, Any]:
    """The same model in an engine whose slots are not always written."""
    engine = Engine(model, CONFIG.lora_config(16, max_loras=2, max_cpu_loras=3), CONFIG)
    manager, found = engine.manager, {}
    writer = manager._writer
    good = engine.add_request(Request("good", [5, 6], 12, adapters[1]))
    engine.step()
    hit = engine.add_request(Request("hit", [1, 2], 4, adapters[2]))

    with patch.object(writer, "write", fails) if is_poor else nullcontext():
        found["writing a slot"] = outcome(engine.step)
    engine.forget_next()
    registered = sorted(manager.list_adapters())
    found["state"] = [manager.lora_index_to_id, sorted(engine.blocks._tables), registered, hit.status.name]
    with patch.object(writer, "stage", fails) if is_poor else nullcontext():
        found["registering"] = outcome(lambda: manager.add_adapter(random_adapter(9, model.config, 4, 0)))
    finish(engine)
    broken = RuntimeError("this slot is broken")
    with patch.object(writer, "write", side_effect=broken) if is_poor else nullcontext():
        failed = engine.add_request(Request("failed", [7], 3, adapters[3]))
        finish(engine)
    found["failed"] = (failed.status.name, failed.error)
    found["tokens"] = [good.output_token_ids, hit.output_token_ids, engine.generate([[7]], adapters[3], 3)[0].token_ids]
    return found


def on_rank(rank: int, folder: Path, adapters: dict[int, LoRARequest]) -> dict[str, Any]:
    model = LlamaForCausalLM(folder)
    model.load_weights(folder)
    return builds(folder, model, rank == POOR) | serves(model, adapters, rank == POOR)


@pytest.mark.slow
def test_what_one_rank_has_no_memory_for_fails_on_both(backbone) -> None:
    here, there = spawn_tensor_parallel(on_rank, 2, backbone.folder, backbone.adapters, backend="gloo")
    assert here == there
    for name, kind, text in (
        ("cache and slots", "ValueError", "KV cache of 16 blocks .* and 2 adapter slots .* 100000 are free"),
        ("slots alone", "ValueError", "2 adapter slots of rank 16 would take .* 1000 are free"),
        ("fitted blocks", "RuntimeError", "no KV block of .* 0 bytes are free"),
        ("allocating the cache", "OutOfMemoryError", "no memory left here"),
        ("allocating the slots", "OutOfMemoryError", "no memory left here"),
        ("writing a slot", "OutOfMemoryError", "no memory left here"),
        ("registering", "OutOfMemoryError", "no memory left here"),
    ):
        assert here[name][0] == kind, here[name]
        assert re.match(f"rank {POOR} of 2: .*{text}", here[name][1]), here[name]
    assert here["state"] == [[1, None], ["good"], [1, 2], "WAITING"]
    assert here["failed"][0] == "FAILED"
    assert "rank 1 of 2: this slot is broken" in here["failed"][1]
    expected = [((5, 6), 1, 12), ((1, 2), 2, 4), ((7,), 3, 3)]
    assert here["tokens"] == [backbone.generate_merged(*wish) for wish in expected]
