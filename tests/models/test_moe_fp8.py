"""Adapters on experts in FP8 slots: quantised when they are registered; served as models with the rounded weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from punica.adapters import LayerSlotWriter, LoRAModelManager
from punica.adapters.write import stage
from punica.ops.quant import Fp8Matrix
from punica.ops.slot_image import write_slot
from tests.models import moe_world
from tests.models.moe_world import factors, loaded, logits_of, merged, saved, wanted, write_per_expert, write_stacked

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAME = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Any, Path]:
    return saved("mixtral", tmp_path_factory.mktemp("model"))


def managed(world: Any, folder: Path, fp8: Any = E4M3, **config: Any) -> LoRAModelManager:
    return moe_world.managed(loaded(world[1]), folder, fp8=fp8, **config)


def each(layers: Any, change: Any) -> Any:
    """All A and B of an adapter, changed."""
    return {i: {which: (change(a), change(b)) for which, (a, b) in of_layer.items()} for i, of_layer in layers.items()}


def written(layers: Any, config: Any, folder: Path, spelling: str) -> Path:
    if spelling == "per expert":
        return write_per_expert(folder, config, layers, 4, alpha=8)
    return write_stacked(folder, layers, 4, alpha=8)


@pytest.mark.parametrize(("spelling", "fp8"), [("per expert", E4M3), ("stacked", E5M2)])
def test_quantised_when_registered(world, tmp_path, spelling, fp8):
    layers = factors(world[0].config, rank=4, seed=5)
    manager = managed(world, written(layers, world[0].config, tmp_path, spelling), fp8)
    rounded = each(layers, lambda w: Fp8Matrix.of(w, fp8).real())  # the scaling, 2, changes no rounding
    torch.testing.assert_close(logits_of(manager.model), wanted(merged(world[0], rounded, 2.0)), rtol=1e-3, atol=1e-3)
    held = manager.get_adapter(7)
    assert held is not None
    weights = held.get_lora(NAME)
    assert all(isinstance(factor, Fp8Matrix) for factor in (*weights.lora_a, *weights.lora_b))


@pytest.mark.parametrize(("fp8", "absent"), [(E4M3, set()), (None, {(e, "w3") for e in range(6)})])
def test_an_image_fills_a_slot_as_set_lora_does(world, tmp_path, fp8, absent):
    """Also ranks below the slot's width, and a projection that the adapter has not."""
    config = world[0].config
    write_per_expert(tmp_path, config, factors(config, rank=4, seed=5), 4, 8, absent)
    manager = managed(world, tmp_path, fp8, target_modules=["experts"])
    lora = manager.get_adapter(7)
    assert lora is not None
    layers = manager.modules.values()
    parts = [part.stored() for layer in layers for part in layer.slot_parts()]
    LayerSlotWriter(manager.modules).write(1, lora)
    expected = [(part.slots[1].clone(), part.ranks[1].item()) for part in parts]
    assert {rank for _, rank in expected} == ({0, 1, 4} if absent else {1, 4})
    for part in parts:
        part.slots[1].fill_(3)
        part.ranks[1] = 9
    dtype = torch.uint8 if fp8 else torch.float32
    image = stage(manager.modules, lora, dtype, pin_memory=False).image
    write_slot(image, [part.slots for part in parts], [part.ranks for part in parts], 1)
    for part, (slot, rank) in zip(parts, expected, strict=True):
        assert torch.equal(part.slots[1], slot)
        assert part.ranks[1] == rank
    filled = [part.part for layer in layers for part in layer.slot_parts(lora.slices_of(NAME)) if part.part is not None]
    assert image.numel() == pytest.approx(sum(one.nbytes for one in filled), rel=0.2)  # of its own rank, not the slot's
