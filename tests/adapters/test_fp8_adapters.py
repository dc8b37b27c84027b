"""Adapters in FP8 slots: quantised once, when they are registered; files in FP8 are refused."""

from typing import Any

import pytest
import torch
from adapter_world import MODULES, VOCAB, PackedModel, adapter, adapter_tensors, decode

from punica.adapters import LoRAModelManager
from punica.config import LoRAConfig
from punica.ops.quant import Fp8Matrix

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def managed(dense: Any, fp8: Any = E4M3, **options: Any) -> LoRAModelManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=3, fp8=fp8, **options)
    return LoRAModelManager(PackedModel(dense), 8, 16, VOCAB, config, "cpu")


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_served_as_the_dense_model_of_its_rounded_weights(fp8, dense, tenants):
    """Rounding aside, nothing is lost: outputs equal those of a base model merged with the FP8 weights."""
    tensors = {i: adapter_tensors(i, rank) for i, rank in ((1, 1), (2, 4), (7, 8))}
    for i, rank in ((1, 1), (2, 4), (7, 8)):
        tenants.write(i, tensors[i], rank)
    manager = managed(dense, fp8)
    ids = [7, 7, 0, 1, 2, 2, 0, 1]
    manager.set_active_adapters([tenants.request(i) for i in tensors], decode(*ids))
    x = torch.randn(len(ids), 24)
    output = manager.model(x)
    for row, i in enumerate(ids):
        rounded = {}
        if i:
            for name, w in tensors[i].items():  # the scaling, 2, is in B before it is rounded; halving is exact
                rounded[name] = Fp8Matrix.of(w * 2, fp8).real() / 2 if "lora_B" in name else Fp8Matrix.of(w, fp8).real()
        expected = dense.merged(rounded, 2.0)(x[row : row + 1])
        torch.testing.assert_close(output[row : row + 1], expected, rtol=1e-3, atol=1e-3)


def test_registered_in_fp8_and_quantised_once(dense):
    manager = managed(dense)
    manager.add_adapter(adapter(3, rank=5))
    down = manager.get_adapter(3).get_lora("model.layers.0.mlp.down_proj")
    assert isinstance(down.lora_a, Fp8Matrix)
    assert isinstance(down.lora_b, Fp8Matrix)
    manager.activate_adapter(3)
    assert down.lora_a is manager.get_adapter(3).get_lora("model.layers.0.mlp.down_proj").lora_a
    values = sum(w.numel() for w in adapter_tensors(3, 5).values())
    scales = sum(5 + height for _, height in MODULES.values())
    assert manager.adapter_bytes(3) == values + 4 * scales
