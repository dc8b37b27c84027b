"""LoRA over experts equals experts with the adapters in their weights, on one rank and on several."""

from dataclasses import replace
from typing import Any

import expert_cases
import pytest
import torch
from expert_cases import (
    ADAPTERS,
    E4M3,
    E5M2,
    HIDDEN,
    INNER,
    MAX_RANK,
    RANK_CASES,
    SLOTS,
    adapter,
    base_layer,
    inputs,
    merged_output,
    on_gpu,
    output_of,
    rounded,
    stacked,
    wrapped,
)

from punica.config import LoRAConfig
from punica.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA, from_layer
from punica.metadata import LoRAMapping
from punica.ops.quant import Fp8Matrix
from punica.ops.slot_image import pack_image
from punica.parallel import FusedMoE, place_experts, spawn_tensor_parallel
from punica.parallel.moe import expert_map_of
from punica.wrapper import PunicaWrapperGPU
from tests.ops.helpers import write_slot
from tests.parallel.thread_ranks import on_threads

close = torch.testing.assert_close


def tenants(experts: int, shared: bool = False) -> dict[int, Any]:
    return {slot: adapter(experts, rank, slot, shared) for slot, rank in ADAPTERS.items()}


SWIGLU = {"activation": "swigluoai"}


@pytest.mark.parametrize(
    ("experts", "top_k", "options", "three_d", "fp8"),
    [
        (5, 2, {}, False, None),
        (8, 8, {}, False, None),
        (128, 8, {"renormalize": False}, False, None),
        (4, 1, {"is_act_and_mul": False, "activation": "relu2"}, False, None),
        (3, 2, {"is_act_and_mul": False}, False, None),
        (4, 1, {"apply_router_weight_on_input": True, "renormalize": False}, False, None),
        (5, 2, {"w13_layout": "concatenated", **SWIGLU}, True, None),
        (5, 2, {"w13_layout": "interleaved", **SWIGLU}, True, None),
        (5, 2, {"w13_layout": "interleaved", **SWIGLU}, True, E4M3),
        (5, 2, {}, False, E4M3),
        (5, 2, {}, False, E5M2),
    ],
)
def test_equals_merged_weights_and_without_adapters_the_layer_alone(experts, top_k, options, three_d, fp8):
    base, adapters = base_layer(experts, top_k, **options), tenants(experts, shared=three_d)
    held = adapters if fp8 is None else {slot: rounded(one, fp8) for slot, one in adapters.items()}
    plain, wanted = base(*inputs(experts)), merged_output(base, held, *inputs(experts))
    if three_d:
        adapters = {slot: stacked(*one, options["w13_layout"]) for slot, one in adapters.items()}
    layer = wrapped(base, adapters, three_d, fp8=fp8)
    assert layer.w13_lora_a_stacked[0].dtype == (fp8 or torch.float32)
    close(layer(*inputs(experts)), wanted, rtol=1e-4, atol=1e-4)
    assert layer.adapter_enabled.tolist() == [1, 1, 1, 0, 0]
    for slot in ADAPTERS:
        layer.reset_lora(slot)
    assert layer.adapter_enabled.tolist() == [0] * 5
    assert torch.equal(layer(*inputs(experts)), plain)
    assert not any(bool(part.slots.float().any()) for part in layer.slot_parts())


def test_unused_slots_and_experts_are_not_read():
    layer = wrapped(base_layer(), tenants(5))
    x, logits = inputs(5)
    logits[:, 4] = -100.0  # the last expert has no token
    before = layer(x, logits)
    for stack in (*layer._slots[0], *layer._slots[1]):
        stack[3] = float("nan")
        stack[:, 4] = float("nan")
    assert torch.equal(layer(x, logits), before)


@pytest.mark.parametrize("parallel", [{}, {"use_ep": True, "tp_rank": 1, "tp_size": 2, "reduce_results": False}],
                         ids=["all experts", "a rank's experts"])  # fmt: skip
@pytest.mark.parametrize("backend", ["none", "cpu", "gpu"])
def test_no_token(backend, parallel, monkeypatch):
    device = "cuda" if backend == "gpu" and torch.cuda.is_available() else "cpu"
    if backend == "gpu":  # interpreted where there is none
        monkeypatch.setattr(expert_cases, "get_punica_wrapper", PunicaWrapperGPU)
    base = base_layer(device=device, **parallel)
    assert (base.expert_map is not None) == bool(parallel)
    layer = base if backend == "none" else wrapped(base, tenants(5))
    x, logits = inputs(5, device)
    assert layer(x[:0], logits[:0]).shape == (0, HIDDEN)
    if backend != "none":  # nor has the step any
        layer.punica_wrapper.update_metadata(LoRAMapping((), ()), list(range(1, SLOTS + 1)), SLOTS + 1, 100)
        assert layer(x[:0], logits[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("config", [{}, {"fp8": E4M3}], ids=["32 bits", "FP8"])
def test_nothing_beyond_a_rank_is_read(config):
    """Ranks differ by projection, and an adapter may have none of one."""
    (a1, a2, a3), (b1, b2, b3) = adapter(5, 6, 4)
    ragged = [a1[:, :2], a2, None], [b1[..., :2], b2, None]
    layer = wrapped(base_layer(), {0: ragged, 1: adapter(5, 3, 5)}, **config)
    assert layer.lora_ranks[:, :3].tolist() == [[2, 3, 0], [0, 3, 0], [6, 3, 0]]  # w1, w3, w2
    before = layer(*inputs(5))
    zeros = [a1[:, :2], a2, torch.zeros_like(a3)], [b1[..., :2], b2, torch.zeros_like(b3)]
    torch.testing.assert_close(before, wrapped(base_layer(), {0: zeros, 1: adapter(5, 3, 5)}, **config)(*inputs(5)))
    for a, b, of_slice in zip(*layer._slots, layer.lora_ranks.tolist(), strict=True):
        for slot, rank in enumerate(of_slice):
            a[slot, :, rank:] = float("nan")
            b[slot, :, :, rank:] = float("nan")
    for scale, ranks in zip(layer.lora_a_scale, layer.lora_ranks, strict=False):
        for slot, rank in enumerate(ranks.tolist()):
            scale[slot, :, rank:] = float("nan")
    assert torch.equal(layer(*inputs(5)), before)


def test_values_with_scales_go_into_a_slot_as_they_are():
    given = tuple([Fp8Matrix.of(factor, E4M3) for factor in side] for side in adapter(5, 4, 3))
    layer = wrapped(base_layer(), {1: given}, fp8=E4M3)
    assert torch.equal(layer.w13_lora_b_stacked[1][1, :, :, :4].float(), given[1][2].values.float())
    assert torch.equal(layer.lora_a_scale[-1][1, :, :4], given[0][1].scale)
    close(wrapped(base_layer(), {1: given})(*inputs(5)), layer(*inputs(5)))  # into slots of 32 bits: real


@pytest.mark.parametrize("fp8", [E4M3, None], ids=str)
def test_an_image_fills_a_slot_as_set_lora_does(fp8):
    """Also a rank below the slot's width, and a projection that the adapter has not."""
    a, b = adapter(5, 4, 3)
    if fp8 is None:
        a[2] = b[2] = None
    layer = wrapped(base_layer(), {1: (a, b)}, fp8=fp8)
    parts = [part.stored() for part in layer.slot_parts(layer.check_lora(a, b))]
    expected = [(part.slots[1].clone(), part.ranks[1].clone()) for part in parts]
    for part in parts:
        part.slots[1].fill_(3)
        part.ranks[1] = 9
    image = pack_image([(part.part, part.rank) for part in parts], torch.uint8 if fp8 else torch.float32)
    write_slot(image, [part.slots for part in parts], [part.ranks for part in parts], 1)
    assert all(torch.equal(part.slots[1], slot) for part, (slot, _) in zip(parts, expected, strict=True))
    assert [part.ranks[1] for part in parts] == [rank for _, rank in expected]
    assert image.numel() < sum(slot.nbytes for slot, _ in expected), "of its own rank, not the slot's"


def test_views_by_slot_expert_and_projection():
    layer = wrapped(base_layer(), tenants(5))
    assert len(layer.lora_a_stacked) == SLOTS * 5 * 3
    a, b = adapter(5, ADAPTERS[1], 1)
    for which in range(3):
        assert torch.equal(layer.lora_a_stacked[(5 + 2) * 3 + which][: ADAPTERS[1]], a[which][2])
        assert torch.equal(layer.lora_b_stacked[(5 + 2) * 3 + which][:, : ADAPTERS[1]], b[which][2])


def half_of_a_layer(three_d=False, rank=0, layout="concatenated", model="Any", **config) -> Any:
    base = FusedMoE(2, 1, 4, 4, torch.float32, w13_layout=layout, tp_rank=rank, tp_size=2)
    layer = (FusedMoE3DWithLoRA if three_d else FusedMoEWithLoRA)(base)
    model_config = type("Config", (), {"architectures": [model]})()
    layer.create_lora_weights(1, LoRAConfig(4, 1, lora_dtype=torch.float32, **config), model_config)
    return layer


@pytest.mark.parametrize(("rank", "sharded"), [(0, True), (1, False), (1, True)])
def test_slices_of_all_four_families(rank, sharded):
    layer = half_of_a_layer(rank=rank, fully_sharded_loras=sharded)
    shapes = [[tuple(stack.shape[2:]) for stack in side] for side in layer._slots]
    cut = 2 if sharded else 4
    assert shapes == [[(cut, 4), (cut, 4), (4, 2)], [(2, 4), (2, 4), (cut, 4)]]
    numbers = torch.arange(4.0)
    own = numbers[2 * rank : 2 * rank + 2].tolist()
    rows, columns = numbers.view(1, 4, 1).expand(2, 4, 4), numbers.view(1, 1, 4).expand(2, 4, 4)
    a, b = layer.slice_lora_a([rows, None, columns]), layer.slice_lora_b([rows, None, rows])
    assert a[0][0, :, 0].tolist() == b[2][0, :, 0].tolist() == (own if sharded else numbers.tolist())
    assert b[0][0, :, 0].tolist() == a[2][0, 0].tolist() == own
    assert a[1] is None


INTERLEAVED = "g0 u0 g1 u1 g2 u2 g3 u3", ("g0 u0 g1 u1", "g2 u2 g3 u3")


@pytest.mark.parametrize(
    ("layout", "model", "full", "wanted"),
    [
        ("interleaved", "Any", *INTERLEAVED),
        ("concatenated", "GptOssForCausalLM", *INTERLEAVED),
        ("concatenated", "Any", "g0 g1 g2 g3 u0 u1 u2 u3", ("g0 g1 u0 u1", "g2 g3 u2 u3")),
    ],
)
def test_slices_of_gate_and_up_as_one(layout, model, full, wanted):
    labels = full.split()
    b = torch.arange(8.0).view(1, 8, 1).expand(2, 8, 1)
    for rank in (0, 1):
        layer = half_of_a_layer(True, rank, layout, model)
        assert [labels[int(row)] for row in layer.slice_lora_b(b)[0, :, 0]] == wanted[rank].split()


@pytest.mark.parametrize("name", RANK_CASES)
def test_two_ranks_equal_one(name):
    for found in on_threads(2, lambda rank: output_of(name)):
        close(found, output_of(name), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RANK_CASES)
def test_a_gpu_equals_the_cpu(name):
    close(output_of(name, "cuda").cpu(), output_of(name), rtol=1e-4, atol=1e-4)


@pytest.mark.multi_gpu
def test_two_gpus_in_16_bits_equal_one():
    """Against float32: an adapter left out, or a sum over one rank only, is ten times as wrong and more."""
    for of_rank in spawn_tensor_parallel(on_gpu, 2, list(RANK_CASES)):
        for name, output in of_rank.items():
            assert output.dtype == torch.bfloat16
            wanted = output_of(name)
            assert float((output - wanted).norm() / wanted.norm()) < 1e-2, name


@pytest.mark.parametrize(
    ("placement", "wanted"), [("linear", [[0, 1, 2], [3, 4], [5, 6]]), ("round_robin", [[0, 3, 6], [1, 4], [2, 5]])]
)
def test_placement_of_seven_experts(placement, wanted):
    assert [place_experts(7, 3, rank, placement) for rank in (0, 1, 2)] == wanted
    assert expert_map_of(wanted[1], 7).tolist() == [wanted[1].index(e) if e in wanted[1] else -1 for e in range(7)]


@pytest.mark.parametrize(
    "options",
    [{"top_k": 9}, {"activation": "tanh"}, {"w13_layout": "other"}, {"use_ep": True, "placement": "random"},
     {"top_k": 2, "apply_router_weight_on_input": True}],
    ids=str,
)  # fmt: skip
def test_mixtures_that_are_refused(options):
    with pytest.raises(ValueError, match=r"must be|one expert"):
        FusedMoE(**({"num_experts": 4, "top_k": 1, "hidden_size": 4, "intermediate_size": 4} | options))


def config_of(**fields: Any) -> LoRAConfig:
    return LoRAConfig(MAX_RANK, SLOTS, lora_dtype=torch.float32, **fields)


@pytest.mark.parametrize("what", ["monolithic", "support LoRA", "all2all_backend", "is_sequence_parallel"])
def test_base_layers_that_are_refused(what, monkeypatch):
    base = base_layer(use_ep=True)
    if what == "monolithic":
        base.quant_method.is_monolithic = True
    elif what == "support LoRA":
        monkeypatch.setattr(type(base.routed_experts), "supports_lora", lambda self: False)
    else:
        own = replace(base.moe_config.moe_parallel_config, **{what: "pplx"})
        base.moe_config = replace(base.moe_config, moe_parallel_config=own)
    with pytest.raises(ValueError, match="pplx" if what == "all2all_backend" else what):
        FusedMoEWithLoRA(base)


def test_configs_that_are_refused():
    for layer_class, base, config, error, message in (
        (FusedMoEWithLoRA, {"use_ep": True}, {"fully_sharded_loras": True}, ValueError, "disable one"),
        (FusedMoEWithLoRA, {"w13_layout": "interleaved"}, {}, ValueError, "interleaved"),
        (FusedMoE3DWithLoRA, {}, {}, TypeError, "model_config"),
    ):
        with pytest.raises(error, match=message):
            layer_class(base_layer(**base)).create_lora_weights(SLOTS, config_of(**config))
    with pytest.raises(ValueError, match="max_loras is 3"):
        FusedMoEWithLoRA(base_layer()).create_lora_weights(3, config_of())
    with pytest.raises(ValueError, match="architectures"):
        FusedMoE3DWithLoRA(base_layer()).create_lora_weights(SLOTS, config_of(), object())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a, b: (a[0], b), TypeError, "lora_a"),
        (lambda a, b: (a[:2], b), ValueError, "2 and 3"),
        (lambda a, b: ([one[:3] for one in a], b), ValueError, "local experts"),
        (lambda a, b: ([a[0].int(), *a[1:]], b), TypeError, "int32"),
        (lambda a, b: ([a[0][:, :2], *a[1:]], b), ValueError, "rank 2"),
        (lambda a, b: ([a[0][..., :5], *a[1:]], b), ValueError, "12 .* 5"),
        (lambda a, b: (a, [b[0][:, :5], *b[1:]]), ValueError, "8 .* 5"),
        (lambda a, b: ([None, *a[1:]], b), ValueError, "partner"),
        (lambda a, b: ([x.repeat(1, 3, 1) for x in a], [x.repeat(1, 1, 3) for x in b]), ValueError, "exceeds"),
    ],
)
def test_refused_adapters_leave_the_slot_as_it_was(change, error, message):
    layer = wrapped(base_layer(), tenants(5))
    before = layer(*inputs(5))
    with pytest.raises(error, match=message):
        layer.set_lora(0, *change(*adapter(5, 3, 4)))
    with pytest.raises(ValueError, match="index"):
        layer.set_lora(SLOTS, *adapter(5, 3, 4))
    assert torch.equal(layer(*inputs(5)), before)


def test_which_class_wraps_which():
    model_config = type("Config", (), {"architectures": ["Any"]})()
    for packed, kind in ((["w1", "w3"], FusedMoEWithLoRA), (["w13"], FusedMoE3DWithLoRA)):
        assert type(from_layer(base_layer(), SLOTS, config_of(), packed, model_config)) is kind


def test_loader_refuses_what_does_not_fit():
    base = base_layer()
    before = base.routed_experts.w13_weight.clone()
    for weight, shard in ((torch.zeros(3, 3), (0, "w1")), (torch.zeros(INNER, HIDDEN), (9, "w1")),
                          (torch.zeros(INNER, HIDDEN), (0, "w4")), (torch.zeros(INNER, HIDDEN), None)):  # fmt: skip
        with pytest.raises(ValueError, match=r"shape|shard_id"):
            base.weight_loader(base.routed_experts.w13_weight, weight, shard)
    assert torch.equal(base.routed_experts.w13_weight, before)


def test_experts_of_ones_own_make_the_products():
    layer, calls = base_layer(), []
    layer.routed_experts.register_forward_hook(lambda *_: calls.append("hook"))
    x, logits = torch.randn(3, HIDDEN), torch.randn(3, 5)
    twice = layer(x, logits) * 2
    inner = type(layer.routed_experts).forward

    class Doubled(type(layer.routed_experts)):
        def forward(self, *given):
            return inner(self, *given) * 2

    layer.routed_experts.__class__ = Doubled
    torch.testing.assert_close(layer(x, logits), twice)
    assert calls == ["hook"] * 2
