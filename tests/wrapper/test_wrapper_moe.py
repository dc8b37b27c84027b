"""The wrapper's mixture-of-experts methods, on both backends (interpreted where there is no GPU)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from punica.config import LoRAConfig
from punica.metadata import LoRAMapping
from punica.ops.triton_ops import configs, moe_rules
from punica.vllm.experts import DEFAULTS, normalize_lora_config_keys, positional_config, try_get_optimal_moe_lora_config
from punica.wrapper import PunicaWrapperCPU, PunicaWrapperGPU
from tests.ops.moe_cases import E5M2, Case, World, add_w2, add_w13, keywords, narrow

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(params=["cpu", "gpu"])
def make(request) -> Callable[..., Any]:
    def build(mapping: list[int], slots: int) -> Any:
        backend = PunicaWrapperCPU if request.param == "cpu" else PunicaWrapperGPU
        device = "cuda" if request.param == "gpu" and HAS_GPU else "cpu"
        wrapper = backend(64, 64, device, max_loras=slots)
        ids = tuple(slot + 1 for slot in mapping)
        wrapper.update_metadata(LoRAMapping(ids, ids), list(range(1, slots + 1)), slots + 1, 100)
        return wrapper

    return build


def ints(*values: int, device: Any = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(("tokens", "experts"), [(5, 4), (1, 16), (7, 3), (0, 4)])
def test_lengths_of_an_alignment(make, tokens, experts, pad):
    mapping = [0, 1, -1, 0, 1, 1, 0][:tokens]
    wrapper = make(mapping, 2)
    device = wrapper.device
    topk_ids = torch.randint(0, experts, (tokens, 2), device=device)
    enabled = ints(1, 0, 0, device=device)
    own, ids, blocks, counts = wrapper.moe_lora_align_block_size(
        topk_ids, tokens, 16, experts, 2, enabled, pad_sorted_ids=pad
    )
    pairs = 2 * tokens
    padded = pairs + 15 * experts
    padded = -(-padded // 16) * 16 if pad else padded
    padded = pairs * 16 if pairs < experts else padded
    assert own.tolist() == mapping
    assert ids.shape == (2 * padded,)
    assert blocks.shape == (2 * -(-padded // 16),)
    assert counts.shape == (2,)
    assert ids.view(2, -1)[1].tolist() == [pairs] * padded  # slot 1 is not enabled
    assert set(blocks.view(2, -1)[1].tolist()) <= {-1}
    mine = [2 * t + j for t in range(tokens) if mapping[t] == 0 for j in range(2)]
    assert sorted(i for i in ids.view(2, -1)[0].tolist() if i < pairs) == mine


def test_naive_assignment(make):
    wrapper = make([0, 1], 2)
    topk_ids = torch.tensor([[3, 1], [0, 2]], device=wrapper.device)
    enabled = ints(1, 1, 0, device=wrapper.device)
    mapping, ids, experts, counts = wrapper.moe_lora_align_block_size(
        topk_ids, 2, 16, 4, 2, enabled, naive_block_assignment=True
    )
    assert (mapping.tolist(), ids, experts.tolist(), counts) == ([0, 1], None, [3, 1, 0, 2], None)
    with pytest.raises(ValueError, match="expert_map"):
        wrapper.moe_lora_align_block_size(
            topk_ids, 2, 16, 4, 2, enabled, ints(0, 1, 2, 3, device=wrapper.device), naive_block_assignment=True
        )


LAYERS = {
    "sorted": Case(tokens=9, top_k=2, experts=4, slots=2, slices=2, width=24, hidden=32),
    "naive": Case(tokens=2, top_k=2, experts=16, slots=3, slices=2, width=24, hidden=32, naive=True),
    "not gated": Case(tokens=6, top_k=1, experts=4, slots=2, slices=1, width=24, hidden=32),
    "true ranks": Case(tokens=9, experts=4, slots=3, slices=2, width=24, hidden=32, rank=16, ranks=(3, 16, 0)),
    "FP8": Case(tokens=9, experts=4, slots=2, slices=2, width=24, hidden=32, fp8="channel", ranks=(3, 8)),
    "FP8, naive": Case(
        tokens=2, experts=16, slots=3, slices=2, width=24, hidden=32, naive=True, fp8="tensor", fp8_dtype=E5M2
    ),
    "FP8 blocks": Case(tokens=6, experts=4, slots=2, slices=1, width=24, hidden=32, fp8="odd blocks"),
    "w8a8": Case(tokens=6, experts=4, slots=2, slices=1, width=24, hidden=32, fp8="channel", w8a8=True),
}


def both(wrapper: Any, up: World, down: World, mapping: Any = None, tuned: bool = False, **given: Any) -> tuple:
    """w13, then w2 with what it returned: the alignment, and both outputs."""
    y13, y2 = narrow(up), narrow(down)
    aligned = add_w13(wrapper, up, y13, mapping, tuned=tuned, **given)
    add_w2(wrapper, down, y2, aligned, tuned=tuned)
    return aligned, y13, y2


def worlds(name: str, device: Any) -> tuple[World, World]:
    case = LAYERS[name]
    up = World(case, device)
    down = World(case.but(slices=1, down=True, hidden=case.width, width=case.hidden), device)
    assert torch.equal(up.topk_ids, down.topk_ids)
    return up, down


def test_naive_experts_may_be_a_column(make):
    """Of a wider routing: one expert per token, with something else between two of them."""
    case = Case(tokens=3, top_k=1, experts=16, slots=2, mapping=(0, 1, 0), naive=True, hidden=16, width=16)
    wrapper = make([0, 1, 0], 2)
    world = World(case, wrapper.device)
    world.topk_ids = torch.cat((world.topk_ids, (world.topk_ids + 1) % 16), dim=1)[:, :1]
    y = narrow(world)
    _, experts, _, _ = add_w13(wrapper, world, y)
    torch.testing.assert_close(y.double(), world.expected[..., :16], rtol=1e-4, atol=1e-4)
    assert experts.is_contiguous()


@pytest.mark.parametrize(("name", "override"), [(name, i % 2 == 0) for i, name in enumerate(LAYERS)])
def test_both_products_of_a_layer(make, name, override, monkeypatch):
    monkeypatch.setattr(moe_rules, "most_naive", lambda *call: 10**6 if LAYERS[name].naive else 0)
    own = [-1] * LAYERS[name].tokens if override else World(LAYERS[name]).mapping.tolist()
    wrapper = make(own, LAYERS[name].slots)
    up, down = worlds(name, wrapper.device)
    aligned, y13, y2 = both(wrapper, up, down, up.mapping if override else None)
    assert (aligned[0] is None) == LAYERS[name].naive
    for world, y in ((up, y13), (down, y2)):
        wanted = world.expected[..., : y.shape[-1]]
        torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-4)


def test_a_rank_of_fully_sharded_experts_adds_its_own_columns(make):
    case = LAYERS["sorted"]
    wrapper = make(World(case).mapping.tolist(), case.slots)
    up, down = worlds("sorted", wrapper.device)
    aligned, _, whole = both(wrapper, up, down)
    before = narrow(down)
    wide = torch.cat((torch.zeros_like(before), before), dim=-1)
    add_w2(wrapper, down, wide, aligned, sharded=True, offset=1)
    assert not wide[..., : before.shape[-1]].any()
    torch.testing.assert_close(wide[..., before.shape[-1] :], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp8", ["channel", "blocks"])
def test_w8a8_quantises_real_activations(make, fp8):
    case = Case(tokens=6, experts=4, slots=2, hidden=64, width=24, fp8=fp8, mapping=(0, 1, 0, -1, 1, 0))
    world = World(case)
    wrapper = make(world.mapping.tolist(), case.slots)
    world = World(case, wrapper.device)
    y, quant_args = narrow(world), keywords(world)["quant_args"] | {"use_fp8_w8a8": True}
    add_w13(wrapper, world, y, quant_args=quant_args)
    wanted = world.expected[..., : case.width]
    size = float(wanted.abs().max())
    torch.testing.assert_close(y.double() / size, wanted / size, rtol=5e-2, atol=5e-2)
    before = y.clone()
    for wrong, error, message in (
        ({"a_scale": torch.ones(1)}, ValueError, "leave a_scale out"),
        ({"lora_a_scale": None}, ValueError, "lora_a_scale is missing"),
        ({"scaling": 2.0}, TypeError, "scaling"),
        ({"lora_ranks": torch.ones(1, 3, dtype=torch.int32)}, ValueError, "lora_ranks"),
        ({"quant_args": {"shrink": {"use_fp8_w8a8": True}}}, ValueError, "differs between shrink and expand"),
    ):
        with pytest.raises(error, match=message):
            add_w13(wrapper, world, y, **{"quant_args": quant_args} | wrong)
    assert torch.equal(y, before)


def test_steps_with_nothing_to_do_write_nothing(make):
    case = LAYERS["sorted"]
    wrapper = make([-1] * case.tokens, case.slots)
    up, down = worlds("sorted", wrapper.device)
    _, y13, y2 = both(wrapper, up, down)
    assert torch.equal(y13, up.y[..., : y13.shape[-1]])
    assert torch.equal(y2, down.y[..., : y2.shape[-1]])
    case = case.but(tokens=0, mapping=())
    up, down = World(case, wrapper.device), World(case.but(slices=1, down=True), wrapper.device)
    aligned, _, _ = both(make([0], 2), up, down)
    assert (aligned[0], aligned[1].numel(), aligned[2]) == (None, 0, None)


def test_remote_experts_are_left_alone(make):
    """With an expert map ids are global; experts 0 and 2 are here, as 0 and 1."""
    case = LAYERS["not gated"].but(experts=2, top_k=1)
    wrapper = make([0] * case.tokens, case.slots)
    up = World(case.but(mapping=(0,) * case.tokens), wrapper.device)
    local = up.topk_ids.clone()
    up.topk_ids = local * 2 + 1 - (up.topk_ids == 0).long()  # 0 -> 0, 1 -> 3
    expert_map = ints(0, -1, 1, -1, device=wrapper.device)
    down = World(case.but(slices=1, down=True, hidden=case.width, width=case.hidden, mapping=(0,) * case.tokens))
    aligned, y13, _ = both(wrapper, up, down, expert_map=expert_map)
    is_here = (local == 0)[:, :, None]
    wanted = torch.where(is_here, up.expected[..., : y13.shape[-1]], up.y[..., : y13.shape[-1]].double())
    torch.testing.assert_close(y13.double(), wanted, rtol=1e-4, atol=1e-4)
    assert aligned[0] is not None


@pytest.mark.parametrize("case", [Case(tokens=6, slots=2), Case(tokens=6, slots=2, ranks=(2, 8), fp8="channel")])
def test_fused_method_takes_configs_in_both_spellings(make, case):
    world = World(case)
    wrapper = make(world.mapping.tolist(), case.slots)
    world = World(case, wrapper.device)
    _, ids, experts, counts = wrapper.moe_lora_align_block_size(
        world.topk_ids, case.tokens, 16, case.experts, case.slots, world.enabled
    )

    def add(y: torch.Tensor, config: dict[str, int]) -> None:
        operands = (y, world.x, tuple(world.a), tuple(world.b), world.weights, ids, experts, counts)
        wrapper.add_lora_fused_moe(*operands, case.rank, case.top_k, config, config, world.enabled, **keywords(world))

    for config in ({"block_m": 16, "block_n": 32, "block_k": 16}, {"BLOCK_SIZE_M": 16, "NUM_STAGES": 2}):
        add(y := world.y.clone(), config)
        world.check(y)
    with pytest.raises(ValueError, match="BLOCK_SIZE_Q"):
        add(world.y, {"block_size_q": 1})


def test_the_rows_of_a_call_must_agree(make):
    case = LAYERS["sorted"]
    wrapper = make([0] * case.tokens, case.slots)
    up, down = worlds("sorted", wrapper.device)
    before = up.y.clone()
    for changes in ({"num_tokens": case.tokens - 1}, {"num_slices": 1}):
        with pytest.raises(ValueError, match=r"num_tokens|num_slices"):
            add_w13(wrapper, up, up.y, **changes)
    ids = torch.zeros(4, dtype=torch.int32, device=wrapper.device)
    with pytest.raises(ValueError, match="expert_ids_lora is None"):
        add_w2(wrapper, down, down.y, (ids, None, ids, None))
    assert torch.equal(up.y, before)


class TestConfigs:
    def test_blocks_of_a_site_fit_the_rank(self):
        shapes = ((8, 64, 32), (8, 32, 32))
        shrink = try_get_optimal_moe_lora_config("fused_moe_lora_w13_shrink", *shapes, 8, 2, torch.float16, 100)
        expand = try_get_optimal_moe_lora_config("fused_moe_lora_w2_expand", *shapes, 64, 2, torch.float16, 100)
        assert (shrink["BLOCK_SIZE_M"], shrink["BLOCK_SIZE_N"], expand["BLOCK_SIZE_K"]) == (64, 16, 32)
        with pytest.raises(ValueError, match="fused_moe_lora_w3"):
            try_get_optimal_moe_lora_config("fused_moe_lora_w3", *shapes, 8, 2, torch.float16, 1)

    def test_keys(self):
        given = {"block_m": 1, "block_n": 2, "block_k": 3, "num_warps": 8, "SPLIT_K": 2}
        wanted = {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 2, "BLOCK_SIZE_K": 3, "NUM_WARPS": 8, "SPLIT_K": 2}
        assert normalize_lora_config_keys(given) == wanted
        assert positional_config("shrink_config", given) == (1, 2, 3, DEFAULTS["GROUP_SIZE_M"], 8, 3, 2)

    def test_the_blocks_of_the_first_product_serve_both(self, tmp_path):
        """Whatever the second product's tuned files say; and the files are looked at."""
        leaf = {"block_n": 16, "block_k": 32, "split_k": 2, "num_warps": 4, "num_stages": 2}
        case = LAYERS["sorted"]
        for site, part, rows in (("w13", "shrink", 32), ("w13", "expand", 16), ("w2", "shrink", 64),
                                 ("w2", "expand", 128)):  # fmt: skip
            sizes = ("2", str(case.slices if site == "w13" else 1), str(case.tokens), str(case.rank), "32", "24")
            table: Any = leaf | {"block_m": rows}
            for key in reversed(sizes):
                table = {key: table}
            name = configs.tuned_file_name(f"fused_moe_lora_{site}_{part}", None, configs._gpu_name())
            (tmp_path / name).write_text(json.dumps(table))
        device = "cuda" if HAS_GPU else "cpu"
        up, down = worlds("sorted", device)
        wrapper = PunicaWrapperGPU(64, 64, device, lora_config=LoRAConfig(max_loras=2, tuned_dir=tmp_path))
        ids = tuple(slot + 1 for slot in up.mapping.tolist())
        wrapper.update_metadata(LoRAMapping(ids, ids), [1, 2], 3, 100)
        aligned, y13, y2 = both(wrapper, up, down, tuned=True)
        assert aligned[0].numel() == aligned[1].numel() * 32
        for world, y in ((up, y13), (down, y2)):
            torch.testing.assert_close(y.double(), world.expected[..., : y.shape[-1]], rtol=1e-4, atol=1e-4)
