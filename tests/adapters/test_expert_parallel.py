"""Which tensors of an adapter a rank reads when it holds some of the experts only."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from punica.adapters import LoRAModel, wrap
from punica.adapters.config import PEFTHelper
from punica.adapters.names import W1
from punica.adapters.pack import expert_slices
from punica.adapters.weights import ModuleWeights
from punica.adapters.wrap import MoEEPSpec, NamedLayer, moe_ep_spec_of


def layer_of(experts: int, ranks: int, rank: int, mine: list[int]) -> NamedLayer:
    place = SimpleNamespace(use_ep=True, ep_rank=rank, ep_size=ranks)
    config = SimpleNamespace(moe_parallel_config=place, num_experts=experts)
    return NamedLayer(SimpleNamespace(moe_config=config, local_experts=mine), ["experts"], [])


@pytest.mark.parametrize(
    ("ranks", "rank", "mine", "expected"),
    [
        (2, 1, [4, 5, 6, 7], MoEEPSpec(1, 4, 8)),
        (3, 2, [6, 7], None),  # 3, 3, 2
        (6, 2, [4], None),  # 2, 2, 1, 1, 1, 1
        (6, 0, [0, 1], None),  # what other ranks do not leave out is left out by none
        (2, 1, [1, 3, 5, 7], None),  # in turn
    ],
)
def test_only_equal_blocks_are_told_from_names(ranks, rank, mine, expected, monkeypatch):
    monkeypatch.setattr(wrap, "FusedMoE", SimpleNamespace)
    assert moe_ep_spec_of([layer_of(8, ranks, rank, mine)]) == expected


def test_remote_experts_are_those_of_other_blocks():
    spec = MoEEPSpec(1, 4, 8)
    names = [f"model.layers.0.mlp.experts.{expert}.down_proj" for expert in range(8)]
    assert [spec.is_remote(name) for name in names] == [True] * 4 + [False] * 4
    assert not spec.is_remote("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(("rank", "count"), [(0, 0), (1, 1)])
def test_a_rank_without_any_of_an_adapters_experts_has_an_empty_adapter(tmp_path, rank, count):
    name = "base_model.model.model.layers.0.mlp.experts.6.down_proj"
    save_file(
        {f"{name}.lora_A.weight": torch.ones(2, 4), f"{name}.lora_B.weight": torch.ones(3, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    helper = PEFTHelper(r=2, lora_alpha=2, target_modules=["down_proj"])
    expected = {"experts.6.down_proj", "down_proj"}
    lora = LoRAModel.from_local_checkpoint(
        tmp_path, expected, helper, lora_model_id=1, moe_ep_spec=MoEEPSpec(rank, 4, 8)
    )
    assert len(lora.loras) == count


@pytest.mark.parametrize(
    ("a", "b", "refused"), [(1, 8, False), (8, 8, False), (1, 1, False), (1, 4, True), (4, 4, True)]
)
def test_projections_have_all_experts_or_one_for_all(a, b, refused):
    """The number on a rank is no number of experts for a folder: both ranks would take the same ones."""
    layer = SimpleNamespace(global_num_experts=8, local_num_experts=4, local_experts=[4, 5, 6, 7], names=["w1", "w2"])
    pair = torch.arange(a * 12.0).view(a, 2, 6), torch.arange(b * 10.0).view(b, 5, 2)
    given = {W1: ModuleWeights("mlp.experts.w1", 2, [pair])}
    if refused:
        with pytest.raises(ValueError, match=r"'mlp.experts.w1' has 4 experts of rank 2.* the model has 8"):
            expert_slices(given, layer, 24, is_loaded=True)
        given = {W1: ModuleWeights("mlp.experts.w1", 2, [tuple(factor[-1:].expand(4, -1, -1) for factor in pair)])}
    (own, _) = expert_slices(given, layer, 24)
    for factor, whole in zip(own, pair, strict=True):
        assert factor.shape[0] == 4
        assert torch.equal(factor[-1], whole[-1])
