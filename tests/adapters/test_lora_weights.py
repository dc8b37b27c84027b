"""One adapter in memory: scaling, packing, loading with every check."""

import pytest
import torch
from adapter_world import peft_config
from safetensors.torch import save_file

from punica.adapters import LoRALayerWeights, LoRAModel, PackedLoRALayerWeights, PEFTHelper, parse_fine_tuned_lora_name
from punica.adapters.check import all_finite
from punica.adapters.weights import times

A, B = "base_model.model.m.q_proj.lora_A.weight", "base_model.model.m.q_proj.lora_B.weight"
EXPECTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def helper(rank: int = 4, **changes: object) -> PEFTHelper:
    return PEFTHelper.from_dict(peft_config(rank, **changes))


def pair(rank: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {A: torch.randn(rank, 6).to(dtype), B: torch.randn(10, rank).to(dtype)}


def weights(rank: int = 4, name: str = "m.q_proj", alpha: float = 8) -> LoRALayerWeights:
    return LoRALayerWeights(name, rank, alpha, torch.randn(rank, 6), torch.randn(10, rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_optimize_scales_b_once_into_a_new_tensor(dtype):
    b = torch.randn(10, 3).to(dtype)
    given = b.clone()
    layer = LoRALayerWeights("m", 3, 7, torch.randn(3, 6).to(dtype), b)
    assert layer.scaling == 7 / 3
    assert layer.optimize() is layer
    assert layer.scaling == 1
    assert torch.equal(layer.lora_b, (given.float() * (7 / 3)).to(dtype))
    assert torch.equal(b, given)
    once = layer.lora_b
    assert layer.optimize().lora_b is once


def test_dimensions_and_shell():
    layer = weights()
    assert (layer.input_dim, layer.output_dim, layer.is_packed) == (6, 10, False)
    shell = LoRALayerWeights.from_config("m.q_proj", helper(8, rank_pattern={"q_proj": 2}))
    assert (shell.rank, shell.lora_alpha, shell.scaling, shell.lora_a, shell.lora_b) == (2, 16, 8, None, None)
    with pytest.raises(RuntimeError, match=r"m\.q_proj.*not set"):
        shell.optimize()


def test_pack_keeps_slices_and_scales_members():
    q, v = weights(4, "m.q_proj"), weights(2, "m.v_proj")
    expected_b = [q.lora_b * q.scaling, None, v.lora_b * v.scaling]
    packed = PackedLoRALayerWeights.pack([q, None, v], "m.qkv_proj")
    assert (packed.module_name, packed.rank, packed.is_packed) == ("m.qkv_proj", 4, True)
    assert packed.lora_a[1] is packed.lora_b[1] is None
    assert packed.lora_a[2] is v.lora_a
    assert torch.equal(packed.lora_b[0], expected_b[0])
    assert torch.equal(packed.lora_b[2], expected_b[2])
    assert PackedLoRALayerWeights.pack([None, q]).module_name == "m.q_proj"
    with pytest.raises(ValueError, match="3 times None"):
        PackedLoRALayerWeights.pack([None, None, None])


def test_model_clone_shares_tensors():
    model = LoRAModel(1, 4, {"m.q_proj": weights()})
    twin = model.clone(2)
    assert (twin.id, twin.rank) == (2, 4)
    assert twin.get_lora("m.q_proj").lora_a is model.get_lora("m.q_proj").lora_a
    assert (model.check_lora_name("m.q_proj"), model.check_lora_name("m.k_proj")) == (True, False)
    with pytest.raises(ValueError, match="lora_model_id is 0"):
        model.clone(0)


def test_patterns_match_the_names_of_the_adapter_not_the_mapped_ones():
    tensors = {**pair(2), **{name.replace("q_proj", "c_fc"): t for name, t in pair(4).items()}}
    config = helper(4, rank_pattern={"q_proj": 2}, alpha_pattern={"m.q_proj": 6, "wq": 99})
    model = LoRAModel.from_lora_tensors(1, tensors, config, weights_mapper={"m.q_proj": "layer.wq", "c_fc": "up"})
    found = {name: (weights.rank, weights.lora_alpha, weights.scaling) for name, weights in model.loras.items()}
    assert found == {"layer.wq": (2, 6, 3), "m.up": (4, 8, 2)}


def test_skipped_and_base_layer_tensors_are_left_out(tmp_path):
    extra = {
        "base_model.model.lm_head.base_layer.weight": torch.ones(2, 2),
        "base_model.model.mtp.strange.lora_A.weight": torch.ones(4, 2),
    }
    save_file({**pair(), **extra}, tmp_path / "adapter_model.safetensors")
    model = LoRAModel.from_local_checkpoint(tmp_path, EXPECTED, helper(), skip_prefixes=["mtp."])
    assert set(model.loras) == {"m.q_proj"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param({B: torch.full((10, 4), 1e6)}, ValueError, "after the cast from torch.float32", id="cast"),
        pytest.param({A: torch.ones(4, 6).to(torch.float8_e4m3fn)}, TypeError, "float8_e4m3fn", id="fp8"),
        pytest.param({A: [[1.0]]}, TypeError, "must be a torch.Tensor, got list", id="no tensor"),
    ],
)
def test_bad_tensors_in_memory(changes, error, message):
    with pytest.raises(error, match=message):
        LoRAModel.from_lora_tensors(1, {**pair(), **changes}, helper(), dtype=torch.float16)


def test_a_mapper_cannot_make_names_without_end():
    doubling = {"q": "_b"} | {chr(97 + i): 2 * chr(98 + i) for i in range(1, 16)}
    with pytest.raises(ValueError, match=r"weights_mapper replaces .* at most 16384 characters"):
        parse_fine_tuned_lora_name("q_proj.lora_A.weight", doubling)


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_sixteen_bits(dtype):
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    finite = torch.isfinite(numbers)
    assert all_finite(numbers[finite])
    assert not any(all_finite(numbers[i : i + 1]) for i in (~finite).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_one_bad_number_among_others(dtype):
    largest = torch.finfo(dtype).max
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf"), largest, -largest, -0.0):
        matrix = torch.randn(5, 7).to(dtype)
        matrix[3, 2] = bad
        assert all_finite(matrix) == all_finite(matrix.T) == bool(torch.isfinite(matrix).all())
    assert all_finite(torch.empty(0, 4))


@pytest.mark.parametrize(("dtype", "scaling"), [(HALVES[0], 1 / 3), (HALVES[0], 3e5), (HALVES[1], -0.7)])
def test_the_scaling_is_multiplied_in_float32_and_rounded_once(dtype, scaling):
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    wide = (numbers.to(torch.float32) * scaling).to(dtype)
    assert torch.equal(times(numbers, scaling).nan_to_num(7.0), wide.nan_to_num(7.0))
    for piece in (numbers[:37], numbers[::3]):  # without and with vector instructions
        expected = (piece.to(torch.float32) * scaling).to(dtype)
        assert torch.equal(times(piece, scaling).nan_to_num(7.0), expected.nan_to_num(7.0))
