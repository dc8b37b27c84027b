"""`register`, an entry point of ``vllm.general_plugins``: vLLM's LoRA operators by the kernels of this library.

vLLM keeps its slots, its layers and its metadata, but for one more place in a grid. Its GPU wrapper calls three
operators by their names in its module, and these names are replaced: `lora_shrink`, `lora_expand` and `fused_moe_lora`,
so that embeddings, logits, fully sharded layers and experts are served. `add_lora_linear` becomes one operator, whose
shrink and expand share their launch and may start early. For a graph tracer each is an opaque node, as vLLM's own is.
A call that the kernels do not serve, by the form of its tensors, is vLLM's own.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import punica

SWITCH = "PUNICA_VLLM"
"""Environment variable; ``0`` leaves vLLM as it is."""
SUPPORTED = ("0.26", "0.33")
"""Versions of vLLM whose wrapper is known."""
_OPERATORS = ("lora_shrink", "lora_expand", "fused_moe_lora")
_MOST_RANK = 512  # vLLM's largest
_FULLY_SHARDED = 25  # place of that argument of `fused_moe_lora` behind the weights
_log = logging.getLogger("vllm.punica")


def register() -> None:
    """Replace vLLM's LoRA operators in this process, all or none; log in one line which, or why not. Raises nothing."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    try:
        version = importlib.metadata.version("vllm")
        reason = _unsuited(version)
        replaced = [] if reason else _replacements(importlib.import_module("vllm.lora.punica_wrapper.punica_gpu"))
    except Exception as error:  # whatever another version or a broken installation raises
        reason, replaced = f"{type(error).__name__}: {error}", []
    if reason:
        _log.warning("punica: %s; vLLM runs as it is", reason)
    for owner, name, function in replaced:
        setattr(owner, name, function)
    if replaced:
        _log.info("punica: %s and add_lora_linear of vLLM %s are ours; %s=0 switches them off",
                  ", ".join(_OPERATORS), version, SWITCH)  # fmt: skip


def _unsuited(version: str) -> str | None:
    """Return why no kernel of this library can run in this vLLM, if none can."""
    if not version.startswith(tuple(f"{known}." for known in SUPPORTED)):
        return f"vLLM {version} is none of {', '.join(SUPPORTED)}"
    if not importlib.import_module("vllm.platforms").current_platform.is_cuda():
        return "this is no NVIDIA GPU"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


def _replacements(wrapper: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return owner, name and new function of all that is to replace; an error where one of them is missing."""
    from punica.ops import fused_moe_lora, lora_expand, lora_linear, lora_shrink
    from punica.vllm.ops.slots import INVARIANT

    own = {name: getattr(wrapper, name) for name in _OPERATORS}
    cls, config = wrapper.PunicaWrapperGPU, importlib.import_module("vllm.config.lora").LoRAConfig
    layer = importlib.import_module("vllm.lora.layers.base").BaseLayerWithLoRA
    if getattr(cls.add_lora_linear, "by_punica", False):
        return []
    ours = (partial(one, batch_invariant=INVARIANT) for one in (lora_shrink, lora_expand, lora_linear))
    shrink, expand, linear = ours
    expected = ["self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs"]
    if list(inspect.signature(cls.add_lora_linear).parameters) != expected:
        raise TypeError("add_lora_linear has another signature")
    meta = wrapper.LoRAKernelMeta
    return [
        (meta, "prepare_tensors", _counted_of(meta.prepare_tensors)),
        (wrapper, "lora_shrink", _product_of("lora_shrink", shrink, own["lora_shrink"])),
        (wrapper, "lora_expand", _product_of("lora_expand", expand, own["lora_expand"])),
        (wrapper, "fused_moe_lora", _experts_of(fused_moe_lora, own["fused_moe_lora"])),
        (cls, "add_lora_linear", _linear_of(linear, cls.add_lora_linear)),
        (config, "compute_hash", _hash_of(config.compute_hash)),
        (layer, "set_mapping", _mapping_of(layer.set_mapping)),
    ]


def _hash_of(theirs: Callable[..., str]) -> Callable[..., str]:
    """Tell graphs that vLLM compiled with these operators from those with its own, which it keeps on disk."""
    return lambda config: f"{theirs(config)}-punica-{punica.__version__}"


def _counted_of(theirs: Callable[..., None]) -> Callable[..., None]:
    """Leave a program in grids for rows without adapter.

    vLLM counts adapters alone, but lists those rows first: the last adapter would have none.
    """
    from punica.vllm.ops import slots

    def prepare_tensors(self: Any, token_lora_mapping: Tensor) -> None:
        theirs(self, token_lora_mapping)
        if number := int(self.num_active_loras_cpu):
            self.num_active_loras_cpu.fill_(slots.places(number, self.active_lora_ids.numel()))

    return prepare_tensors


def _mapping_of(theirs: Callable[..., None]) -> Callable[..., None]:
    """Take up the slots of a dense layer, and start to compile for it, where its wrapper is set: no graph is yet."""
    from punica.vllm.ahead import compile_ahead
    from punica.vllm.ops import slots

    def set_mapping(self: Any, punica_wrapper: Any) -> None:
        theirs(self, punica_wrapper)
        a, b = (getattr(self, f"lora_{matrix}_stacked", None) for matrix in "ab")
        if not isinstance(a, tuple) or not isinstance(b, tuple) or not _are_one_rank(a, b) or _refused(a[0], (*a, *b)):
            return  # no dense layer, or one of vLLM's own kernels, or of shards of ranks
        if not hasattr(punica_wrapper, "punica_steps"):
            punica_wrapper.punica_steps = slots.Steps(punica_wrapper)
        slots.Slots(self, punica_wrapper.punica_steps)
        try:
            compile_ahead(a, b, punica_wrapper.token_mapping_meta)
        except Exception as error:  # the engine compiles as it needs
            _say_once(f"no kernels are compiled ahead: {type(error).__name__}: {error}")

    return set_mapping


def _product_of(name: str, ours: Callable[..., None], theirs: Callable[..., None]) -> Callable[..., None]:
    """Replace shrink, whose metadata end with its scaling, or expand."""

    def product(
        inputs: Tensor, weights: Sequence[Tensor], output: Tensor, *metadata_and_scaling: Any, **options: Any
    ) -> None:
        if not _serves(name, inputs if name == "lora_shrink" else output, weights):
            theirs(inputs, weights, output, *metadata_and_scaling, **options)
            return
        *tensors, count = metadata_and_scaling[:7]  # the rest is of shrink alone
        scaling = metadata_and_scaling[7:]
        ours(inputs, list(weights), output, *tensors, *scaling, num_active_loras=count, **options)

    return product


def _experts_of(ours: Callable[..., None], theirs: Callable[..., None]) -> Callable[..., None]:
    def fused_moe_lora(output: Tensor, hidden: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor],
                       *rest: Any) -> None:  # fmt: skip
        # fully sharded experts join their ranks in between, by vLLM's own groups of processes
        if not rest[_FULLY_SHARDED] and _serves("fused_moe_lora", hidden, [*lora_a, *lora_b]):
            ours(output, hidden, list(lora_a), list(lora_b), *rest)
        else:
            theirs(output, hidden, lora_a, lora_b, *rest)

    return fused_moe_lora


def _linear_of(ours: Callable[..., None], theirs: Callable[..., None]) -> Callable[..., None]:
    from punica.vllm.ops import slots

    def add_lora_linear(
        self: Any, y: Tensor, x: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor],
        scale: float, output_slices: Sequence[int], *, buffer: Tensor | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        a, b, add_inputs = lora_a_stacked, lora_b_stacked, kwargs.get("add_inputs", True)
        rows, inputs = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        fits = x.dtype == y.dtype == a[0].dtype and y.stride(-1) == 1
        if hasattr(self, "punica_steps") and scale == 1.0 and fits and slots.is_known(a[0]):
            slots.linear(rows, inputs, a[0], add_inputs)
        elif buffer is None and _are_one_rank(a, b) and _serves("add_lora_linear", x, (*a, *b), y):
            *tensors, count = self.token_mapping_meta.meta_args(len(inputs), self.lora_config.specialize_active_lora)
            ours(rows, inputs, list(a), list(b), *tensors, scale, num_active_loras=count, add_inputs=add_inputs,
                 pdl=add_inputs)  # fmt: skip
        else:
            theirs(self, y, x, a, b, scale, output_slices, buffer=buffer, **kwargs)

    add_lora_linear.by_punica = True  # type: ignore[attr-defined]
    return add_lora_linear


def _are_one_rank(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len({one.shape[-2] for one in a} | {one.shape[-1] for one in b}) == 1


def _serves(name: str, rows: Tensor, weights: Sequence[Tensor], output: Tensor | None = None) -> bool:
    """Tell if the kernels serve a call of this form; else say why, once. A graph tracer says nothing."""
    reason = _refused(rows, weights, output)
    if reason is not None and not torch.compiler.is_compiling():
        _say_once(f"{name} by vLLM's own, as {reason}")
    return reason is None


def _refused(rows: Tensor, weights: Sequence[Tensor], output: Tensor | None = None) -> str | None:
    if not rows.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors are on {rows.device}"
    if rows.dtype not in (torch.float16, torch.bfloat16) or not all(weight.dtype == rows.dtype for weight in weights):
        return f"dtypes are {rows.dtype} and {weights[0].dtype}"
    if any(min(weight.shape[-2], weight.shape[-1]) > _MOST_RANK for weight in weights):
        return f"a rank is above {_MOST_RANK}"
    if not all(weight.is_contiguous() for weight in weights):
        return "weights are not contiguous"
    if output is not None and (output.dtype != rows.dtype or output.stride(-1) != 1):
        return "the output has another dtype, or columns with gaps"
    return None


@cache
def _say_once(text: str) -> None:
    _log.info("punica: %s", text)
