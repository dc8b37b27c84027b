"""Registered and active adapters: packing, slots, order of eviction."""


import pytest
import torch
from adapter_world import (
    MODULES,
    QKV,
    adapter,
)

from punica.adapters import LoRALayerWeights, LoRAModel, PackedLoRALayerWeights
from punica.adapters.pack import expert_slices
from punica.adapters.weights import ModuleWeights


def test_packed_parts_fill_their_slices_and_absent_ones_stay_zero(make_manager):
    manager = make_manager()
    model = adapter(5, modules=("q_proj", "v_proj"))
    assert manager.add_adapter(model) is True
    manager.activate_adapter(5)
    layer = manager.modules[QKV]
    for i, part in ((0, "q_proj"), (2, "v_proj")):
        weights = model.get_lora(f"model.layers.0.self_attn.{part}")
        assert torch.equal(layer.lora_a_stacked[i][0, 0, :4], weights.lora_a)
        assert torch.equal(layer.lora_b_stacked[i][0, 0, :, :4], weights.lora_b * 2)
    assert not layer.lora_a_stacked[1].any()
    assert not layer.lora_b_stacked[1].any()
    assert layer.lora_ranks.tolist() == [[4], [0], [4]]
    assert not any(a.any() for a in manager.modules["model.layers.0.mlp.down_proj"].lora_a_stacked)


def test_adding_changes_nothing_of_the_given_adapter(make_manager):
    model = adapter(5)
    before = {name: (w.lora_a, w.lora_b, w.scaling) for name, w in model.loras.items()}
    make_manager().add_adapter(model)
    assert set(model.loras) == set(MODULES)
    for name, (a, b, scaling) in before.items():
        weights = model.loras[name]
        assert weights.lora_a is a
        assert weights.lora_b is b
        assert weights.scaling == scaling == 2


def test_one_pair_over_a_packed_module_is_split(make_manager):
    manager = make_manager()
    a, b = torch.randn(4, 24), torch.randn(80, 4)
    name = "model.layers.1.mlp.gate_up_proj"
    manager.add_adapter(LoRAModel(1, 4, {name: LoRALayerWeights(name, 4, 4, a, b)}))
    manager.activate_adapter(1)
    layer = manager.modules[name]
    assert torch.equal(layer.lora_a_stacked[0][0, 0, :4], a)
    assert torch.equal(layer.lora_a_stacked[1][0, 0, :4], a)
    assert torch.equal(layer.lora_b_stacked[1][0, 0, :, :4], b[40:])


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("name", [DOWN, "model.layers.0.self_attn.q_proj"])
@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_slices_is_refused(make_manager, name, count):
    """A layer of one slice, and a part of a packed one."""
    manager = make_manager()
    weights = PackedLoRALayerWeights(name, 4, [torch.zeros(4, 24)] * count, [torch.zeros(24, 4)] * count)
    with pytest.raises(ValueError, match=f"{count}"):
        manager.add_adapter(LoRAModel(1, 4, {name: weights}))
    assert manager.list_adapters() == {}


def test_meta_tensors_are_refused(make_manager):
    manager, model = make_manager(), adapter(5)
    name = next(iter(model.loras))
    model.loras[name].lora_a = model.loras[name].lora_a.to("meta")
    with pytest.raises(TypeError, match="meta tensor"):
        manager.add_adapter(model)
    assert manager.list_adapters() == {}


def test_a_shell_is_filled_by_its_members():
    weights = LoRALayerWeights("m", 4, 8, None, None)
    weights.lora_a, weights.lora_b = torch.ones(4, 6), torch.ones(5, 4)
    ((a, b),) = weights.scaled()
    assert (a.shape, b.shape, b.unique().tolist()) == ((4, 6), (5, 4), [2])
    packed = PackedLoRALayerWeights("m", 4, [None, None], [None, None])
    packed.lora_a = [torch.ones(4, 6), None]
    assert packed.slices[0][0].shape == (4, 6)
    with pytest.raises(ValueError, match="zip"):
        packed.lora_b = [None]


def test_packed_experts_keep_their_scaling():
    pair = torch.ones(2, 4, 8), torch.ones(2, 8, 4)
    slices = expert_slices({None: ModuleWeights("experts", 4, [pair] * 3, scaling=2)}, None, 3)
    assert all(torch.equal(b, 2 * pair[1]) for _, b in slices)


def test_activating_an_unknown_adapter(make_manager):
    manager = make_manager()
    manager.add_adapter(adapter(1))
    with pytest.raises(ValueError, match=r"adapter 2 is not registered; registered: \[1\]"):
        manager.activate_adapter(2)
