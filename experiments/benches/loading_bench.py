"""A model with one spare slot to load adapters into, alone or beside decode steps, for section 5.2.

`Bench` builds and wraps the model, and registers the adapters that take turns in the spare slot; with `Decode` it also
runs decode steps on the other slots. It checks the content of the spare slot.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch

from experiments.benches.model_steps import (
    TOLERANCE,
    CapturedRun,
    Invocation,
    difference,
    llama_config,
    random_llama,
    spans,
    step_tokens,
)
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ModelConf
from experiments.workload.popularity import popularity
from punica.adapters import LoRAModel, LoRAModelManager, random_adapter
from punica.adapters.synthetic import LLAMA_LORA_MODULES, llama_module_shapes
from punica.config import LoRAConfig
from punica.layers import SlotPart
from punica.models import LlamaForCausalLM
from punica.ops.quant import Fp8Matrix

MOST_ADAPTERS = 256
DIFFERENT = 4
"""Adapters with weights of their own; others are copies in other memory, since drawing hundreds takes too long."""


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


def _adapters(ids: Sequence[int], drawn: Callable[[int], LoRAModel]) -> list[LoRAModel]:
    """One adapter per id, no two in the same memory."""
    different = [drawn(i) for i in ids[:DIFFERENT]]
    copies = [copy.deepcopy(different[place % DIFFERENT]).clone(i) for place, i in enumerate(ids[DIFFERENT:])]
    return different + copies


class Bench:
    """`model` wrapped for adapters of `rank`, its last slot free, and `rotate_bytes` of adapters or more to load there.

    Args:
        layers: how many decoder layers (None: all).
        rotate_bytes: what the adapters that take turns must exceed, so that none of them waits in a cache.
        decode: the steps to run beside the loads; their adapters are loaded here. None: nothing runs.
        fp8: the format of slots in FP8 (None: they are as wide as the model).

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
        fp8: torch.dtype | None = None,
    ) -> None:
        self.rank, self.device, self.fp8 = rank, torch.device(device), fp8
        self.dtype = getattr(torch, model.dtype.name)
        elements, config = model.lora_parameters(rank, layers), llama_config(model, layers)
        self.bytes = elements * model.dtype.bytes
        if fp8 is not None:  # and a float32 scale for every row of A and of B
            shapes = llama_module_shapes(config, LLAMA_LORA_MODULES).values()
            self.bytes = elements + 4 * sum(rank + out for _, out in shapes)
        neighbours = decode.adapters if decode else 0
        count = min(max(2, -(-rotate_bytes // self.bytes)), MOST_ADAPTERS)
        ids = range(neighbours + 1, neighbours + count + 1)
        self.adapters = _adapters(ids, lambda i: random_adapter(i, config, rank, seed + i, dtype=self.dtype))
        # loading does not read the weights, so only steps need some
        llama = random_llama(model, device, layers) if decode else LlamaForCausalLM(config, self.dtype, device)
        rows, self.slot = decode.rows if decode else 1, neighbours
        lora = LoRAConfig(
            max_lora_rank=rank,
            max_loras=neighbours + 1,
            max_cpu_loras=neighbours + count,
            target_modules=list(LLAMA_LORA_MODULES),
            fp8=fp8,
        )
        self.manager = LoRAModelManager(llama, rows, rows, model.vocab_size, lora, device)
        self._check_bytes(self.adapters[0], elements * model.dtype.bytes)
        for i in range(1, neighbours + 1):
            self.manager.add_adapter(self.adapters[0].clone(i))
            self.manager.activate_adapter(i)
        for adapter in self.adapters:
            self.manager.add_adapter(adapter)
        self.step = _decode_step(self.manager, llama, decode) if decode else None

    def _check_bytes(self, adapter: LoRAModel, wide: int) -> None:
        pairs = [_matrices(adapter, name)[:2] for name in adapter.loras]
        tensors = sum(tensor.nbytes for pair in pairs for tensor in pair)
        if tensors != wide or self.manager.slot_bytes != self.bytes:
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
            for part in layer.slot_parts():
                part.matrix(self.slot).fill_(torch.nan)
                part.ranks[self.slot] = -1
        self.synchronise()

    def check_slot(self, i: int) -> None:
        """The spare slot of every layer holds the i-th adapter: A, B times scaling, and the rank."""
        adapter = self.adapters[i % len(self.adapters)]
        for name, places in self._places().items():
            a, b, scaling = _matrices(adapter, name)
            held = [w.to(self.dtype) for w in (a, b.float() * scaling)]
            if self.fp8 is not None:
                matrices = [Fp8Matrix.of(w, self.fp8) for w in held]
                held = [*[matrix.values for matrix in matrices], *[matrix.scale[:, None] for matrix in matrices]]
            for place, expected in zip(places, held, strict=True):
                if not torch.equal(place.matrix(self.slot).cpu().float(), expected.float()):
                    raise CheckFailed(f"after a load, slot {self.slot} of {name} does not hold adapter {adapter.id}")
                if int(place.ranks[self.slot]) != self.rank:
                    raise CheckFailed(f"after a load, the rank of slot {self.slot} of {name} is not {self.rank}")

    def _places(self) -> dict[str, list[SlotPart]]:
        """Map module names to places of A and B, and of their scales in FP8 slots: `model.layers.0.self_attn.k_proj` is
        the second slice of `qkv_proj`.
        """
        places = {}
        for name, layer in self.manager.modules.items():
            parent, _, last = name.rpartition(".")
            names = LlamaForCausalLM.packed_modules_mapping.get(last, [last])
            parts = layer.slot_parts()  # A of every slice, then B of every slice, then the scales of both
            for i, part in enumerate(names):
                places[f"{parent}.{part}"] = parts[i :: len(names)]
        return places


def _matrices(adapter: LoRAModel, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A, B and the scaling of one projection of an adapter as it came; `CheckFailed` when it has none."""
    weights = adapter.get_lora(name)
    if weights is None:
        raise CheckFailed(f"adapter {adapter.id} has no {name}")
    a, b = (w.real() if isinstance(w, Fp8Matrix) else w for w in weights.pair())
    return cast(torch.Tensor, a), cast(torch.Tensor, b), weights.scaling


def _decode_step(manager: LoRAModelManager, llama: LlamaForCausalLM, decode: Decode) -> Callable[[], torch.Tensor]:
    """One decode step as the engine runs it: the step's segments, then the model, on a GPU as a CUDA graph. Checked to
    depend on the adapters.
    """
    invocation = Invocation(llama, step_tokens(decode.rows, decode.seq_len))
    tokens, positions = invocation.begin(spans(decode.rows, 1, decode.seq_len))
    own = [int(slot) for slot in popularity(decode.workload).slots(decode.rows)]  # adapter i lies in slot i - 1

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return llama(tokens, positions, invocation.attention)

    def begin(slots: Sequence[int]) -> None:
        manager.begin_step([(slot, len(list(rows))) for slot, rows in groupby(slots)], slots)

    def step(slots: Sequence[int]) -> torch.Tensor:
        begin(slots)
        return run()

    if difference(step([-1] * decode.rows), step(own)) <= TOLERANCE[invocation.cache.keys[0].dtype]:
        raise CheckFailed("a decode step comes out as if its rows had no adapters")
    if invocation.device.type != "cuda":
        return lambda: step(own)
    captured = CapturedRun(run)

    def replay() -> torch.Tensor:
        begin(own)
        return captured()

    return replay
