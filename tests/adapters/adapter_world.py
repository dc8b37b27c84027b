"""A tiny two-layer model twice: plain modules as adapters know them, packed layers as the library runs them."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from punica.adapters import LoRAModel, LoRAModelManager, LoRARequest, PEFTHelper
from punica.layers import BaseLayerWithLoRA
from punica.metadata import LoRAMapping
from punica.parallel import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

HIDDEN, HEADS, KV_HEADS, HEAD, INTER, LAYERS, VOCAB = 24, 4, 2, 6, 40, 2, 50
QKV = "model.layers.0.self_attn.qkv_proj"
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
SHAPES = {
    "self_attn.q_proj": (HIDDEN, Q), "self_attn.k_proj": (HIDDEN, KV), "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (Q, HIDDEN), "mlp.gate_proj": (HIDDEN, INTER), "mlp.up_proj": (HIDDEN, INTER),
    "mlp.down_proj": (INTER, HIDDEN),
}  # fmt: skip
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
MODULES = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}


def mix(qkv: torch.Tensor) -> torch.Tensor:
    """Stands for attention: a per-token function of q, k and v that notices any change of each."""
    q, k, v = qkv.split([Q, KV, KV], dim=-1)
    return torch.tanh(q * k.repeat(1, 2)) + v.repeat(1, 2)


def tree(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


class DenseModel(nn.Module):
    """What PEFT trains on: one nn.Linear per module."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for _ in range(LAYERS):
            parts: dict[str, dict[str, nn.Module]] = {"self_attn": {}, "mlp": {}}
            for name, shape in SHAPES.items():
                parent, _, last = name.partition(".")
                parts[parent][last] = nn.Linear(*shape, bias=False)
            layers.append(tree(**{parent: tree(**linear) for parent, linear in parts.items()}))
        self.model = tree(layers=nn.ModuleList(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            x = x + attn.o_proj(mix(torch.cat([attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)], dim=-1)))
            x = x + mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        return x

    def merged(self, tensors: dict[str, torch.Tensor], scaling: float) -> "DenseModel":
        """A copy with `W += scaling * B A`, computed in float64."""
        model = copy.deepcopy(self)
        for name in MODULES:
            a = tensors.get(f"base_model.model.{name}.lora_A.weight")
            b = tensors.get(f"base_model.model.{name}.lora_B.weight")
            if a is not None:
                weight = model.get_submodule(name).weight.data
                weight.copy_(weight.double() + scaling * (b.double() @ a.double()))
        return model


def parallel_layer(**options: object) -> nn.Module:
    options["bias"] = False
    attn = tree(
        qkv_proj=QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, **options),
        o_proj=RowParallelLinear(Q, HIDDEN, **options),
    )
    gate_up = MergedColumnParallelLinear(HIDDEN, [INTER, INTER], **options)
    return tree(self_attn=attn, mlp=tree(gate_up_proj=gate_up, down_proj=RowParallelLinear(INTER, HIDDEN, **options)))


class PackedModel(nn.Module):
    """The same function on parallel layers, q/k/v and gate/up computed at once."""

    packed_modules_mapping = PACKED

    def __init__(self, dense: DenseModel) -> None:
        super().__init__()
        layers = [parallel_layer(return_bias=False) for _ in range(LAYERS)]
        for layer, source in zip(layers, dense.model.layers, strict=True):
            attn, mlp = layer.self_attn, layer.mlp
            for part in "qkv":
                weight = source.self_attn.get_submodule(f"{part}_proj").weight
                attn.qkv_proj.weight_loader(attn.qkv_proj.weight, weight, part)
            for i, part in enumerate(("gate_proj", "up_proj")):
                mlp.gate_up_proj.weight_loader(mlp.gate_up_proj.weight, source.mlp.get_submodule(part).weight, i)
            attn.o_proj.weight_loader(attn.o_proj.weight, source.self_attn.o_proj.weight)
            mlp.down_proj.weight_loader(mlp.down_proj.weight, source.mlp.down_proj.weight)
        self.model = tree(layers=nn.ModuleList(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            x = x + attn.o_proj(mix(attn.qkv_proj(x)))
            gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
            x = x + mlp.down_proj(torch.nn.functional.silu(gate) * up)
        return x


def one_layer(tp_size: int, tp_rank: int) -> nn.Module:
    """The first layer of the tiny model as one rank of `tp_size` holds it, to look at slots; not to compute."""
    layer = parallel_layer(tp_size=tp_size, tp_rank=tp_rank)
    model = tree(model=tree(layers=nn.ModuleList([layer])))
    model.packed_modules_mapping = PACKED
    return model


def adapter_tensors(seed: int, rank: int = 4, modules: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    """PEFT-named random A and B for all modules, or for those whose names end in one of `modules`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (width, height) in MODULES.items():
        if modules is None or name.endswith(modules):
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, width, generator=generator) / width**0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(height, rank, generator=generator) / rank**0.5
    return tensors


def peft_config(rank: int = 4, **changes: object) -> dict[str, object]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"], **changes}


class Tenants:
    """Writes PEFT folders below one directory: `tenants.write(7)` is adapter 7, `tenants.request(7)` asks for it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(
        self, adapter_id: int, tensors: dict[str, torch.Tensor] | None = None, rank: int = 4, **config: object
    ) -> Path:
        folder = self.root / f"adapter{adapter_id}"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(peft_config(rank, **config)))
        weights = adapter_tensors(adapter_id, rank) if tensors is None else tensors
        save_file({name: t.contiguous() for name, t in weights.items()}, folder / "adapter_model.safetensors")
        return folder

    def request(self, adapter_id: int, **changes: object) -> LoRARequest:
        fields = {"lora_name": f"tenant {adapter_id}", "lora_path": str(self.root / f"adapter{adapter_id}"), **changes}
        return LoRARequest(lora_int_id=adapter_id, **fields)


def buffers(layer: BaseLayerWithLoRA) -> list[torch.Tensor]:
    """Everything that a layer's slots consist of: `[L, ...]` each."""
    return [buffer for part in layer.slot_parts() for buffer in (part.slots, part.ranks)]


def all_buffers(manager: LoRAModelManager) -> list[torch.Tensor]:
    return [buffer for layer in manager.modules.values() for buffer in buffers(layer)]


def active_in_order(manager: LoRAModelManager) -> list[int]:
    return [loaded.lora.id for loaded, _ in manager._active.items()]


def snapshot(manager: LoRAModelManager) -> dict[str, object]:
    """Everything a failed call must leave alone: caches in order, the slot table, and the bits of every buffer."""
    wrapper = manager.punica_wrapper
    return {
        "registered": list(manager.list_adapters().items()),
        "active": active_in_order(manager),
        "slots": list(manager.lora_index_to_id),
        "pinned": manager.pinned_adapters,
        "requests": {i: manager.request_of(i) for i in manager.list_adapters()},
        "mapping": manager._last_step,
        "buffers": [tensor.clone() for tensor in all_buffers(manager)],
        "lengths": list(wrapper.indices_len),
        "indices": [wrapper._token_lora_indices.clone(), wrapper._sampler_indices.clone()],
    }


@contextmanager
def unchanged(manager: LoRAModelManager) -> Iterator[None]:
    """A block, refused calls as a rule, that must leave everything of a manager as it was."""
    before = snapshot(manager)
    yield
    after = snapshot(manager)
    for key in ("buffers", "indices"):
        assert all(torch.equal(a, b) for a, b in zip(after.pop(key), before.pop(key), strict=True))
    assert after == before


def check_invariants(manager: LoRAModelManager) -> None:
    """Active is a subset of registered, each active id has exactly one slot, no slot holds anything else, sizes fit;
    what is pinned is pinned in both sets.
    """
    registered, in_slots = manager.list_adapters(), [i for i in manager.lora_index_to_id if i is not None]
    assert len(in_slots) == len(set(in_slots))
    assert set(in_slots) <= set(registered)
    assert {i: manager.loaded(i).slot for i in active_in_order(manager)} == {
        i: manager.lora_index_to_id.index(i) for i in in_slots
    }
    registered_active = [i for i in registered if manager.is_active(i)]
    assert active_in_order(manager) == registered_active, "one order of use"
    assert len(manager) == len(registered) <= manager.capacity
    assert len(manager.lora_index_to_id) == manager.lora_slots
    assert manager.pinned_adapters == {loaded.lora.id for loaded in manager._active.pinned} <= set(in_slots)


def decode(*adapter_ids: int) -> LoRAMapping:
    return LoRAMapping(adapter_ids, adapter_ids)


def adapter(adapter_id: int, rank: int = 4, modules: tuple[str, ...] | None = None) -> LoRAModel:
    helper = PEFTHelper.from_dict(peft_config(rank))
    return LoRAModel.from_lora_tensors(adapter_id, adapter_tensors(adapter_id, rank, modules), helper)


def full_manager(make_manager, tenants, max_cpu_loras: int = 2) -> LoRAModelManager:
    """Slots (and by default both sets) full, a mapping set: any failing call now has something to destroy."""
    manager = make_manager(max_loras=2, max_cpu_loras=max_cpu_loras)
    for i in (1, 2):
        tenants.write(i)
    manager.set_active_adapters([tenants.request(1), tenants.request(2)], decode(1, 0, 2))
    return manager
