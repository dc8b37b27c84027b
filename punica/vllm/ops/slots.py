"""Slots of vLLM's dense layers, known by their address, so that a call passes three tensors.

vLLM runs most layers of a prompt's step outside its graphs, and each call by tensors costs more time of the host than
of the GPU. The tensors of a layer's slots, and those of a wrapper's step, are made once and stay.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from punica.metadata import StepShape
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.step_ops import TritonOps
from punica.ops.weights import LoRAWeights, kept
from punica.vllm.ops.dense import TensorBatch
from punica.vllm.ops.signature import register_op

_LAYERS: WeakValueDictionary[int, "Slots"] = WeakValueDictionary()


def places(count: int, entries: int) -> int:
    """Return how many ids a step of ``count`` adapters may list: rows without adapter have one, too."""
    return min(count + 1, entries)


def step_of(*tensors: Tensor, flag: Tensor, count: int | Tensor) -> TensorBatch:
    """Build a step of `places`, whose rows the adapters share."""
    batch = TensorBatch.given(*tensors, flag=flag, count=count)
    return batch._replace(shape=StepShape.even(max(1, batch.max_segments - 1), len(tensors[0])))


class Steps:
    """Steps of a wrapper by their rows and adapters, on the tensors of its `token_mapping_meta`."""

    def __init__(self, wrapper: Any) -> None:
        self.meta, self.specialize = wrapper.token_mapping_meta, wrapper.lora_config.specialize_active_lora
        self._known: dict[tuple[int, int], TensorBatch] = {}

    def batch(self, rows: int) -> TensorBatch | None:
        """Return the running step; None without an adapter."""
        meta = self.meta
        if meta.no_lora_flag_cpu.item():
            return None
        count = meta.num_active_loras_cpu if self.specialize else meta.default_num_active_loras_cpu
        key = rows, count.item()
        found = self._known.get(key)
        if found is None:
            *tensors, flag, count = meta.meta_args(rows, self.specialize)
            found = kept(self._known, key, step_of(*tensors, flag=flag, count=count))
        return found


class Slots:
    """Slots of a layer, whose true ranks follow `set_lora` and `reset_lora` of that layer."""

    def __init__(self, layer: Any, steps: Steps) -> None:
        a, b = layer.lora_a_stacked, layer.lora_b_stacked
        # of slots that were written before: all of their width
        self.ranks = torch.full((len(a), a[0].shape[0]), a[0].shape[-2], dtype=torch.int32, device=a[0].device)
        self.weights, self.steps = LoRAWeights.of(a, b, self.ranks), steps
        set_theirs, reset_theirs = layer.set_lora, layer.reset_lora

        def set_lora(index: int, lora_a: Any, lora_b: Any) -> None:
            set_theirs(index, lora_a, lora_b)
            given = lora_a if isinstance(lora_a, Sequence) else (lora_a,)
            self.ranks[:, index] = max(0 if one is None else one.shape[-2] for one in given)

        def reset_lora(index: int) -> None:
            reset_theirs(index)
            self.ranks[:, index] = 0

        layer.set_lora, layer.reset_lora = set_lora, reset_lora
        layer.punica_slots = _LAYERS[a[0].data_ptr()] = self  # as long as the layer is


def is_known(a: Tensor) -> bool:
    """Tell if the tensor is the first of a layer's slots; for a graph tracer, whose tensors have no address, always."""
    return torch.compiler.is_compiling() or a.data_ptr() in _LAYERS


def _run(output: Tensor, inputs: Tensor, lora_a: Tensor, add_inputs: bool) -> None:
    slots = _LAYERS.get(lora_a.data_ptr())
    if slots is None:
        raise RuntimeError("a compiled graph calls a LoRA layer whose set_mapping did not run; PUNICA_VLLM=0 helps")
    batch = slots.steps.batch(inputs.shape[0])
    if batch is not None:
        # into an output of its own LoRA runs on a second stream: what precedes there is no kernel to start early from
        OPS[add_inputs].linear(output, inputs, slots.weights, batch, 1.0, add_inputs)


INVARIANT = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")  # vLLM's switch
OPS = {early: TritonOps(Options(INVARIANT, early)) for early in (True, False)}
linear: Callable[[Tensor, Tensor, Tensor, bool], None] = register_op(
    "vllm_linear", "(Tensor(a!) output, Tensor inputs, Tensor lora_a, bool add_inputs) -> ()", _run
)
"""Add a layer's LoRA product to ``output`` [T, W], or write it; ``lora_a``: the first tensor of its slots."""
