"""Slots in FP8: what they hold, and how large they are (what layers compute with them: `test_linear_forward`)."""

import pytest
import torch
from layer_cases import ALONE, IN, LINEAR, config_for, linear_layer, random_pair

from punica.config import LoRAConfig
from punica.layers import from_layer
from punica.ops.quant import Fp8Matrix, quantize_per_channel
from punica.parallel import ReplicatedLinear
from tests.ops.fp8_batches import E4M3, E5M2


def test_slots_are_about_half_as_large():
    """0.57 of 16 bits with one float32 scale per channel, for a square layer and rank 16 (0.5 + 4 / (2 * 2 * 16))."""
    sizes = []
    for fp8 in (None, E4M3):
        config = LoRAConfig(16, 1, lora_dtype=torch.float16, fp8=fp8)
        layer = from_layer(ReplicatedLinear(1024, 1024, params_dtype=torch.float16), 1, config, [])
        sizes.append(layer.slot_bytes)
    assert sizes[0] == 2 * 16 * 1024 * 2
    assert sizes[1] / sizes[0] == pytest.approx(0.5625, abs=1e-3)


@pytest.mark.parametrize("kind", ["tensor", "fp8", "other fp8"])
def test_set_lora_takes_tensors_and_fp8(kind):
    config = config_for(torch.float32, fp8=E4M3)
    layer, _ = linear_layer(LINEAR["replicated"], config, place=ALONE)
    a, b = random_pair(3, IN, 12)
    form = E5M2 if kind == "other fp8" else E4M3
    given = (a, b) if kind == "tensor" else (Fp8Matrix.of(a, form), Fp8Matrix.of(b, form))
    layer.set_lora(1, *given)
    sources = (a, b) if kind == "tensor" else tuple(matrix.real() for matrix in given)
    (a_values, a_scale), (b_values, b_scale) = (quantize_per_channel(w) for w in sources)
    assert torch.equal(layer.lora_a_stacked[0][1, 0, :3].float(), a_values.float())
    assert torch.equal(layer.lora_b_stacked[0][1, 0, :, :3].float(), b_values.float())
    assert torch.equal(layer.lora_a_scale[0][1, 0, :3], a_scale)
    assert torch.equal(layer.lora_b_scale[0][1, 0], b_scale)
    assert (layer.lora_a_scale[0][1, 0, 3:] == 0).all()
    assert layer.lora_ranks[0, 1] == 3
    layer.reset_lora(1)
    for part in layer.slot_parts():
        assert (part.matrix(1).float() == 0).all()


def test_fp8_in_slots_of_16_bits_and_groups_of_packed_fp8():
    """Slots of 16 bits hold what FP8 stands for. One B over several slices: its scales are split as it is."""
    a, b = random_pair(4, IN, 24)
    whole = Fp8Matrix.of(b, E4M3)
    layer, plain = (
        linear_layer(LINEAR["variable"], config_for(torch.bfloat16, fp8=fp8), place=ALONE)[0] for fp8 in (E4M3, None)
    )
    for one in (layer, plain):
        one.set_lora(0, Fp8Matrix.of(a, E4M3), whole)
    assert torch.equal(torch.cat([scale[0, 0] for scale in layer.lora_b_scale]), whole.scale)
    held, real = (torch.cat([stacked[0, 0, :, :4].float() for stacked in one.lora_b_stacked]) for one in (layer, plain))
    assert torch.equal(held, whole.values.float())
    assert torch.equal(real, whole.real().bfloat16().float())
    assert torch.equal(plain.lora_a_stacked[0][0, 0, :4], Fp8Matrix.of(a, E4M3).real().bfloat16())
