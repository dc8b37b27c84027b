"""Which layers get wrapped, in place and once each."""

import pytest
import torch
from adapter_world import LAYERS, VOCAB, PackedModel, tree
from torch import nn

from punica.adapters import LoRAModelManager, is_in_target_modules
from punica.config import LoRAConfig
from punica.layers import MergedColumnParallelLinearWithLoRA, MergedQKVParallelLinearWithLoRA, RowParallelLinearWithLoRA
from punica.parallel import QKVParallelLinear, ReplicatedLinear

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
QKV, Q, OUT = "m.layers.0.attn.qkv_proj", "m.layers.0.attn.q_proj", "m.layers.0.attn.o_proj"


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        (OUT, None, True),
        (OUT, ["o_proj"], True),
        (OUT, [OUT], True),
        (OUT, ["m.layers.1.attn.o_proj"], False),
        (OUT, [], False),
        (QKV, ["qkv_proj"], True),
        (QKV, ["k_proj"], True),
        (QKV, [Q], True),
        (Q, ["qkv_proj"], True),
        (Q, [QKV], True),
        (Q, ["k_proj"], False),
    ],
)
def test_is_in_target_modules(name, targets, expected):
    assert is_in_target_modules(name, targets, PACKED) is expected


def test_every_layer_is_wrapped_in_place_and_shares_one_wrapper(make_manager):
    manager = make_manager()
    classes = {name.rpartition(".")[2]: type(layer) for name, layer in manager.modules.items()}
    assert classes == {
        "qkv_proj": MergedQKVParallelLinearWithLoRA,
        "o_proj": RowParallelLinearWithLoRA,
        "gate_up_proj": MergedColumnParallelLinearWithLoRA,
        "down_proj": RowParallelLinearWithLoRA,
    }
    assert len(manager.modules) == 4 * LAYERS
    for name, layer in manager.modules.items():
        assert manager.model.get_submodule(name) is layer
        assert layer.punica_wrapper is manager.punica_wrapper


@pytest.mark.parametrize(
    ("targets", "wrapped"),
    [
        (["o_proj"], {"o_proj"}),
        (["v_proj", "down_proj"], {"qkv_proj", "down_proj"}),
        (["gate_up_proj"], {"gate_up_proj"}),
        (["model.layers.1.self_attn.k_proj"], {"qkv_proj"}),
    ],
)
def test_target_filter(make_manager, targets, wrapped):
    modules = make_manager(target_modules=targets).modules
    assert {name.rpartition(".")[2] for name in modules} == wrapped
    if targets[0].startswith("model"):
        assert list(modules) == ["model.layers.1.self_attn.qkv_proj"]
    with pytest.raises(ValueError, match=r"\['nothing'\] selects none"):
        make_manager(target_modules=["nothing"])


def manage(model: nn.Module, **config: object) -> LoRAModelManager:
    return LoRAModelManager(model, 4, 16, VOCAB, LoRAConfig(**config), "cpu")


def test_layer_without_lora_class_leaves_the_model_alone():
    model = tree(proj=ReplicatedLinear(6, 8), strange=QKVParallelLinear(6, 2, 2))
    model.packed_modules_mapping = {"strange": ["q", "kv"]}
    with pytest.raises(ValueError, match="no layer that LoRA supports"):
        manage(tree(plain=nn.Linear(3, 3)))
    with pytest.raises(ValueError, match=r"'strange' of class QKVParallelLinear \(packed parts.*max_loras=1"):
        manage(model)
    assert type(model.proj) is ReplicatedLinear


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16)]
)
def test_dtype_of_the_slots(dense, dtype, expected):
    config = LoRAConfig(lora_dtype=dtype)
    manager = LoRAModelManager(PackedModel(dense), 4, 16, VOCAB, config, "cpu")
    assert {a.dtype for layer in manager.modules.values() for a in layer.lora_a_stacked} == {expected}
    assert manager.lora_config.lora_dtype == expected
    assert config.lora_dtype == dtype
