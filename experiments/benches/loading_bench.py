"""A model with one spare slot to load adapters into, alone or beside decode steps: where section 5.2 is measured.

`Bench` builds the model, wraps it, and registers the adapters that take turns in the spare slot; with `Decode` it also
runs decode steps whose adapters lie in the slots beside. It can tell whether the spare slot really holds an adapter.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from experiments.benches.model_steps import (
    TOLERANCE,
    Invocation,
    difference,
    llama_config,
    random_llama,
    spans,
    step_tokens,
)
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ModelConf
from punica.adapters import LoRALayerWeights, LoRAModel, LoRAModelManager, random_adapter
from punica.adapters.synthetic import LLAMA_LORA_MODULES
from punica.config import LoRAConfig
from punica.layers import SlotPart
from punica.metadata import LoRAMapping
from punica.models import LlamaForCausalLM
from punica.workload.popularity import popularity

MOST_ADAPTERS = 256


@dataclass(frozen=True)
class Decode:
    """Decode steps of `rows` requests with `seq_len` cached tokens, adapters by the popularity `workload`."""

    workload: str
    rows: int
    seq_len: int

    @property
    def adapters(self) -> int:
        """Distinct adapters in a step."""
        return popularity(self.workload).number_of_adapters(self.rows)


class Bench:
    """`model` wrapped for adapters of `rank`, its last slot free, and `rotate_bytes` of adapters or more to load there.

    Args:
        layers: how many decoder layers (None: all).
        rotate_bytes: what the adapters that take turns must exceed, so that none of them waits in a cache.
        decode: the steps to run beside the loads; their adapters are loaded here. None: nothing runs.

    Raises:
        CheckFailed: an adapter, or a slot, does not have the bytes that arithmetic says.
    """

    def __init__(
        self,
        model: ModelConf,
        rank: int,
        device: str,
        *,
        layers: int | None = None,
        rotate_bytes: int = 0,
        seed: int = 0,
        decode: Decode | None = None,
    ) -> None:
        self.rank, self.device = rank, torch.device(device)
        self.dtype = getattr(torch, model.dtype.name)
        self.bytes = model.lora_parameters(rank, layers) * model.dtype.bytes
        config = llama_config(model, layers)
        neighbours = decode.adapters if decode else 0
        count = min(max(2, -(-rotate_bytes // self.bytes)), MOST_ADAPTERS)
        ids = range(neighbours + 1, neighbours + count + 1)
        self.adapters = [random_adapter(i, config, rank, seed + i, dtype=self.dtype) for i in ids]
        # loading does not read the weights, so only steps need some
        llama = random_llama(model, device, layers) if decode else LlamaForCausalLM(config, self.dtype, device)
        rows, self.slot = decode.rows if decode else 1, neighbours
        lora = LoRAConfig(
            max_lora_rank=rank,
            max_loras=neighbours + 1,
            max_cpu_loras=neighbours + count,
            target_modules=list(LLAMA_LORA_MODULES),
        )
        self.manager = LoRAModelManager(llama, rows, rows, model.vocab_size, lora, device)
        self._check_bytes(self.adapters[0])
        for i in range(1, neighbours + 1):
            self.manager.add_adapter(self.adapters[0].clone(i))
            self.manager.activate_adapter(i)
        for adapter in self.adapters:
            self.manager.add_adapter(adapter)
        self.step = _decode_step(self.manager, llama, decode) if decode else None

    def _check_bytes(self, adapter: LoRAModel) -> None:
        pairs = [_matrices(adapter, name)[:2] for name in adapter.loras]
        tensors = sum(tensor.nbytes for pair in pairs for tensor in pair)
        if not tensors == self.manager.slot_bytes == self.bytes:
            raise CheckFailed(
                f"rank {self.rank}: {tensors} bytes in an adapter, {self.manager.slot_bytes} in a slot, "
                f"{self.bytes} by arithmetic"
            )

    def synchronise(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def poison(self) -> None:
        """NaN and rank -1 in the spare slot of every layer, so that only a complete load passes `check_slot`."""
        for layer in self.manager.modules.values():
            for part in layer.slot_parts(None, None):
                part.matrix(self.slot).fill_(torch.nan)
                part.ranks[self.slot] = -1
        self.synchronise()

    def check_slot(self, i: int) -> None:
        """The spare slot of every layer holds the i-th adapter: A, B times scaling, and the rank."""
        adapter = self.adapters[i % len(self.adapters)]
        for name, places in self._places().items():
            a, b, scaling = _matrices(adapter, name)
            for place, expected in zip(places, (a, b.float() * scaling), strict=True):
                if not torch.equal(place.matrix(self.slot), expected.to(self.dtype).to(self.device)):
                    raise CheckFailed(f"after a load, slot {self.slot} of {name} does not hold adapter {adapter.id}")
                if int(place.ranks[self.slot]) != self.rank:
                    raise CheckFailed(f"after a load, the rank of slot {self.slot} of {name} is not {self.rank}")

    def _places(self) -> dict[str, tuple[SlotPart, SlotPart]]:
        """`model.layers.0.self_attn.k_proj` -> where its A and its B lie: the second slice of `qkv_proj`."""
        places = {}
        for name, layer in self.manager.modules.items():
            parent, _, last = name.rpartition(".")
            names = LlamaForCausalLM.packed_modules_mapping.get(last, [last])
            parts = layer.slot_parts(None, None)  # A of every slice, then B of every slice
            for part, *place in zip(names, parts[: len(names)], parts[len(names) :], strict=True):
                places[f"{parent}.{part}"] = (place[0], place[1])
        return places


def _matrices(adapter: LoRAModel, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A, B and the scaling of one projection of an adapter as it came; `CheckFailed` when it has none."""
    weights = adapter.get_lora(name)
    if not isinstance(weights, LoRALayerWeights):
        raise CheckFailed(f"adapter {adapter.id} has no {name}")
    return *weights.pair(), weights.scaling


def _decode_step(manager: LoRAModelManager, llama: LlamaForCausalLM, decode: Decode) -> Callable[[], torch.Tensor]:
    """One decode step as a server runs it: who uses which slot, then the model, on a GPU as a CUDA graph. Checked to
    depend on the adapters.
    """
    invocation = Invocation(llama, step_tokens(decode.rows, decode.seq_len))
    tokens, positions = invocation.begin(spans(decode.rows, 1, decode.seq_len))
    ids = [int(slot) + 1 for slot in popularity(decode.workload).slots(decode.rows)]

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return llama(tokens, positions, invocation.attention)

    def step(mapping: LoRAMapping) -> torch.Tensor:
        manager.set_adapter_mapping(mapping)
        return run()

    own, none = LoRAMapping(ids, ids), LoRAMapping([0] * decode.rows, [0] * decode.rows)
    if difference(step(none), step(own)) <= TOLERANCE[invocation.cache.keys[0].dtype]:
        raise CheckFailed("a decode step comes out as if its rows had no adapters")
    if invocation.device.type != "cuda":
        return lambda: step(own)
    captured = CapturedRun(run)

    def replay() -> torch.Tensor:
        manager.set_adapter_mapping(own)
        return captured()

    return replay


class CapturedRun:
    """A function as a CUDA graph; `function` is kept because it holds what the graph reads by address."""

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self.function, self.graph = function, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = function()

    def __call__(self) -> torch.Tensor:
        """Run it again; the result is overwritten by the next call."""
        self.graph.replay()
        return self.output
