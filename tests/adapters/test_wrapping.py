"""Layers are wrapped in place and once each, and served to adapters that were trained under any of their names."""

import pytest
import torch
from adapter_world import Tenants, decode, tree
from torch import Tensor, nn

from punica.adapters import LoRAModelManager, is_in_target_modules
from punica.config import LoRAConfig
from punica.parallel import QKVParallelLinear, ReplicatedLinear, VocabParallelEmbedding

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
QKV, Q, OUT = "m.layers.0.attn.qkv_proj", "m.layers.0.attn.q_proj", "m.layers.0.attn.o_proj"


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        (OUT, None, True),
        (OUT, [OUT], True),
        (OUT, ["m.layers.1.attn.o_proj"], False),
        (OUT, [], False),
        (Q, ["qkv_proj"], True),
        (Q, [QKV], True),
        (Q, ["k_proj"], False),
    ],
)
def test_is_in_target_modules(name, targets, expected):
    assert is_in_target_modules(name, targets, PACKED) is expected


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


def test_layer_without_lora_class_leaves_the_model_alone():
    model = tree(proj=ReplicatedLinear(6, 8), strange=QKVParallelLinear(6, 2, 2))
    model.packed_modules_mapping = {"strange": ["q", "kv"]}
    with pytest.raises(ValueError, match="no layer that LoRA supports"):
        managed(tree(plain=nn.Linear(3, 3)))
    with pytest.raises(ValueError, match=r"'strange' of class QKVParallelLinear \(packed parts.*max_loras=2"):
        managed(model)
    assert type(model.proj) is ReplicatedLinear


WIDTH, HEIGHT, IDS, RANK = 6, 8, 21, 4
PLAIN = {"bias": False, "return_bias": False}


def managed(model: nn.Module, **config: object) -> LoRAModelManager:
    return LoRAModelManager(model, 4, 16, IDS, LoRAConfig(**{"max_lora_rank": RANK, "max_loras": 2, **config}), "cpu")


def pair(module: str, width: int = WIDTH, height: int = HEIGHT, kind: str = "lora_{}.weight") -> dict[str, Tensor]:
    """PEFT-named A and B; the same numbers whatever the module is called."""
    generator = torch.Generator().manual_seed(width * height)
    return {
        f"base_model.model.{module}.{kind.format('A')}": torch.randn(RANK, width, generator=generator),
        f"base_model.model.{module}.{kind.format('B')}": torch.randn(height, RANK, generator=generator),
    }


def served(manager: LoRAModelManager, tenants: Tenants, tensors: dict[str, Tensor], layer: str) -> list[Tensor]:
    """What lies in the slot of `layer` once an adapter of these tensors is active."""
    manager.remove_all_adapters()
    tenants.write(1, tensors, RANK)
    manager.set_active_adapters([tenants.request(1)], decode(1))
    assert set(manager.get_adapter(1).loras) == {layer}
    return [part.slots[0].clone() for part in manager.modules[layer].slot_parts()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and all(t.any() for t in one)


def shared_linear() -> nn.Module:
    shared = ReplicatedLinear(WIDTH, HEIGHT, **PLAIN)
    nn.init.normal_(shared.weight)
    return tree(first=shared, second=shared, inner=tree(third=shared), other=ReplicatedLinear(WIDTH, HEIGHT, **PLAIN))


@pytest.mark.parametrize("targets", [None, ["inner.third", "other"]], ids=str)
def test_every_name_of_a_module_leads_to_it(tenants, targets):
    """Also the names that the filter does not list: the layer is wrapped, so it can be served."""
    model = shared_linear()
    manager = managed(model, target_modules=targets)
    name = next(name for name in manager.modules if name != "other")
    slots = [served(manager, tenants, pair(alias), name) for alias in ("first", "second", "inner.third")]
    assert same(slots[0], slots[1])
    assert same(slots[0], slots[2])
    x = torch.randn(3, WIDTH)
    manager.set_active_adapters([tenants.request(1)], decode(1, 1, 0))
    a, b = pair("first").values()
    delta = 2 * x[:2] @ a.T @ b.T
    torch.testing.assert_close(model.second(x)[:2], model.first.base_layer(x)[:2] + delta)
    assert model.first(x).equal(model.inner.third(x))


def packed_model() -> nn.Module:
    block = tree(qkv_proj=QKVParallelLinear(WIDTH, 2, 2, 1, **PLAIN))
    model = tree(block=block, twin=block)
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return model


@pytest.mark.parametrize("targets", [None, ["twin.v_proj"]], ids=str)
def test_parts_of_a_packed_module_below_either_name(tenants, targets):
    manager = managed(packed_model(), target_modules=targets)
    (name,) = manager.modules
    slots = [served(manager, tenants, pair(f"{parent}.v_proj", height=2), name)[-1] for parent in ("block", "twin")]
    assert slots[0].any()
    assert torch.equal(*slots)
    tenants.write(2, {**pair("block.v_proj", height=2), **pair("twin.v_proj", height=2)}, RANK)
    with pytest.raises(ValueError, match=r"'block.v_proj' and 'twin.v_proj', which are one and the same"):
        manager.add_adapter(tenants.request(2))


class Tied(nn.Module):
    """`lm_head` is `embed_tokens`: the head is another name of the table, and its product is not wrapped."""

    embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}

    def __init__(self, *, head_first: bool) -> None:
        super().__init__()
        table = VocabParallelEmbedding(IDS, WIDTH)
        for name in ("lm_head", "embed_tokens") if head_first else ("embed_tokens", "lm_head"):
            setattr(self, name, table)


@pytest.mark.parametrize("head_first", [False, True], ids=["table first", "head first"])
def test_a_tied_embedding_under_either_name(tenants, head_first):
    model = Tied(head_first=head_first)
    manager = managed(model)
    (name,) = manager.modules
    slots = [
        served(manager, tenants, pair(alias, IDS, WIDTH, "lora_embedding_{}"), name)
        for alias in ("embed_tokens", "lm_head")
    ]
    assert same(*slots)
    assert model.lm_head is model.embed_tokens is manager.modules[name]
    manager.add_adapter(manager.create_dummy_lora(2, RANK, [name]))
    assert set(manager.get_adapter(2).loras) == {name}
