"""Adapters in FP8: quantised when they are registered, or read from FP8 files; staged, and served."""

from typing import Any

import pytest
import torch
from adapter_world import MODULES, VOCAB, PackedModel, adapter, adapter_tensors, decode, snapshot

from punica.adapters import LoRAModel, LoRAModelManager, PEFTHelper
from punica.config import LoRAConfig
from punica.ops.quant import Fp8Matrix, dequantize, quantize_per_channel, quantize_per_tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def managed(dense: Any, fp8: Any = E4M3, **options: Any) -> LoRAModelManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=3, fp8=fp8, **options)
    return LoRAModelManager(PackedModel(dense), 8, 16, VOCAB, config, "cpu")


def as_fp8(tensors: dict[str, torch.Tensor], scheme: str = "channel") -> dict[str, torch.Tensor]:
    """A checkpoint in FP8: values under the tensors' names, scales beside them."""
    stored = {}
    for name, w in tensors.items():
        q, scale = quantize_per_tensor(w) if scheme == "tensor" else quantize_per_channel(w)
        stored[name] = q
        stored[f"{name}_scale"] = scale[:, None] if scheme == "column" else scale
    return stored


def real(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What such a checkpoint stands for."""
    names = [name for name in stored if not name.endswith("_scale")]
    return {n: dequantize(stored[n], s[:, 0] if (s := stored[f"{n}_scale"]).ndim == 2 else s) for n in names}


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


@pytest.mark.parametrize("slots", [E4M3, None], ids=["FP8 slots", "32-bit slots"])
@pytest.mark.parametrize("scheme", ["channel", "tensor", "column"])
def test_fp8_files(scheme, slots, dense, tenants):
    stored = as_fp8(adapter_tensors(3, 4), scheme)
    tenants.write(3, stored, 4)
    manager = managed(dense, slots)
    manager.check_adapter(tenants.request(3))
    manager.set_active_adapters([tenants.request(3)], decode(3, 0, 3))
    x = torch.randn(3, 24)
    expected = dense.merged(real(stored), 2.0)(x)
    output = manager.model(x)
    torch.testing.assert_close(output[[0, 2]], expected[[0, 2]], rtol=1e-3, atol=1e-3)


def test_values_of_a_file_reach_the_slot_unchanged(dense, tenants):
    """The adapter's scaling goes into the scales, so FP8 values are never rounded again."""
    stored = as_fp8(adapter_tensors(3, 4))
    tenants.write(3, stored, 4)
    manager = managed(dense)
    manager.add_adapter(tenants.request(3))
    layer, name = manager.modules["model.layers.1.mlp.down_proj"], "base_model.model.model.layers.1.mlp.down_proj"
    values, scale = stored[f"{name}.lora_B.weight"], stored[f"{name}.lora_B.weight_scale"]
    assert torch.equal(layer.lora_b_stacked[0][0, 0, :, :4].float(), values.float())
    assert torch.equal(layer.lora_b_scale[0][0, 0], scale * 2)
    assert torch.equal(layer.lora_a_stacked[0][0, 0, :4].float(), stored[f"{name}.lora_A.weight"].float())


def test_registered_in_fp8_and_quantised_once(dense):
    manager = managed(dense)
    manager.add_adapter(adapter(3, rank=5))
    held = manager.get_adapter(3)
    assert held is not None
    down = held.get_lora("model.layers.0.mlp.down_proj")
    assert isinstance(down.lora_a, Fp8Matrix)
    assert isinstance(down.lora_b, Fp8Matrix)
    manager.activate_adapter(3)
    assert down.lora_a is manager.get_adapter(3).get_lora("model.layers.0.mlp.down_proj").lora_a
    values = sum(w.numel() for w in adapter_tensors(3, 5).values())
    scales = sum(5 + height for _, height in MODULES.values())
    assert manager.adapter_bytes(3) == values + 4 * scales


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("no scale", TypeError, "float8.*weight_scale"),
        ("NaN scale", ValueError, "finite"),
        ("negative scale", ValueError, ">= 0"),
        ("short scale", ValueError, r"\(3,\).*one per row"),
        ("blocks", ValueError, "block-wise"),
        ("NaN value", ValueError, "NaN"),
        ("scale of 32 bits", TypeError, "has scales"),
        ("scale of nothing", ValueError, "unsupported LoRA weight"),
    ],
)
def test_bad_files_change_nothing(change, error, message, dense, tenants):
    stored, key = as_fp8(adapter_tensors(3, 4)), "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    scale = stored[f"{key}_scale"]
    if change == "no scale":
        del stored[f"{key}_scale"]
    elif change == "NaN value":
        values = stored[key].float()
        values[1, 1] = float("nan")
        stored[key] = values.to(E4M3)
    elif change == "scale of 32 bits":
        stored[key] = stored[key].float()
    elif change == "scale of nothing":
        del stored[key]
    else:
        changes = {"NaN scale": scale * float("nan"), "negative scale": -scale, "short scale": scale[:3]}
        stored[f"{key}_scale"] = changes.get(change, torch.ones(2, 2))
    tenants.write(3, stored, 4)
    manager = managed(dense)
    manager.add_adapter(adapter(1, rank=2))
    manager.activate_adapter(1)
    before = snapshot(manager)
    with pytest.raises(error, match=message):
        manager.add_adapter(tenants.request(3))
    before["buffers"] = [buffer.float() for buffer in before["buffers"]]
    after = snapshot(manager)
    assert all(torch.equal(a.float(), b) for a, b in zip(after["buffers"], before["buffers"], strict=True))
    assert after["registered"] == before["registered"]


def test_shapes_of_fp8_files_are_checked_on_arrival(dense, tenants):
    short = {name: w[:-1] if "down_proj.lora_B" in name else w for name, w in adapter_tensors(3, 4).items()}
    tenants.write(3, as_fp8(short), 4)
    with pytest.raises(ValueError, match="lora_b must have 24 rows, got 23"):
        managed(dense).check_adapter(tenants.request(3))


def test_negative_scaling(dense):
    """A negative alpha turns the sign of the values: scales stay >= 0."""
    stored = as_fp8(adapter_tensors(3, 4))
    lora = LoRAModel.from_lora_tensors(3, stored, PEFTHelper(4, -8, ["q_proj"]))
    manager = managed(dense)
    manager.add_adapter(lora)
    manager.set_active_adapters([], decode())
    manager.activate_adapter(3)
    manager.set_adapter_mapping(decode(3))
    x = torch.randn(1, 24)
    torch.testing.assert_close(manager.model(x), dense.merged(real(stored), -2.0)(x), rtol=1e-3, atol=1e-3)
    assert all((scale >= 0).all() for layer in manager.modules.values() for scale in layer.lora_b_scale)
