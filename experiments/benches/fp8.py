"""LoRA operators and a model with adapters in FP8, checked, for `ext_fp8`.

An operator's weights are those of `benches.operators`, quantised once for all batches that rotate through them, and
stored as layers store them, rank after rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.benches.layer_call import begun
from experiments.benches.model_steps import Invocation, difference, llama_config, random_llama, spans, step_tokens
from experiments.benches.operator_conf import OperatorConf
from experiments.benches.operators import TOLERANCE, Problem
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import Config, DType
from punica.adapters import LoRAModelManager, random_adapter
from punica.adapters.synthetic import LLAMA_LORA_MODULES
from punica.config import LoRAConfig
from punica.measure.timing import Call
from punica.metadata import LoRAMapping
from punica.ops.fp8_checks import PER_CHANNEL
from punica.ops.quant import dequantize, quantize_per_channel
from punica.ops.weights import LoRAWeights
from punica.wrapper import get_punica_wrapper


class System(NamedTuple):
    """Format of a system's weights (None: that of the activations); `w8a8`: activations are quantised too."""

    fp8: torch.dtype | None
    w8a8: bool = False


SYSTEMS = {
    "SGMV": System(None),
    "FP8 e4m3": System(torch.float8_e4m3fn),
    "FP8 e5m2": System(torch.float8_e5m2),
    "FP8 w8a8": System(torch.float8_e4m3fn, True),
}
W8A8_TOLERANCE = 2 / 16
"""Largest relative error of w8a8 against the product of the rounded weights: activations are rounded twice, by up to
1/16 of a value. Over many rows and ranks 0.035 is usual; one row of rank 16 sometimes exceeds 0.05.
"""


class Quantised(NamedTuple):
    """A [L, r, h1] and B [L, h2, r] in FP8, one float32 scale per channel."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor


def bytes_read(figure: OperatorConf, rows: int, adapters: int, rank: int, wide: int, system: str) -> int:
    """Bytes that one batch reads: A and B of its adapters with their scales, x [T, h1] and the old y [T, h2]."""
    held = SYSTEMS[system].fp8
    weights = rank * (figure.h1 + figure.h2) * (wide if held is None else 1)
    scales = 0 if held is None else 4 * (rank + figure.h2)
    return adapters * (weights + scales) + wide * rows * (figure.h1 + figure.h2)


@lru_cache(maxsize=3)
def _bank(storages: tuple[Any, Any], rank: int, fp8: torch.dtype) -> Quantised:
    """Quantise all slots that rotate; `storages`: the memory of A and B, which identifies them."""
    a, b = (memory.whole() for memory in storages)
    (a8, a_scale), (b8, b_scale) = (quantize_per_channel(w, fp8, check=False) for w in (a, b))
    return Quantised(a8, a_scale, b8.mT.contiguous().mT, b_scale)


class _Memory:
    """All slots of the tensor that a batch's weights are a window of; equal for windows of one memory."""

    def __init__(self, window: Tensor) -> None:
        self.window = window

    def whole(self) -> Tensor:
        slots = self.window.untyped_storage().nbytes() // self.window[0].nbytes
        return self.window.as_strided((slots, *self.window.shape[1:]), self.window.stride(), 0)

    def _key(self) -> tuple[Any, ...]:
        return self.window.untyped_storage().data_ptr(), self.window.shape[1:], self.window.dtype

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Memory) and self._key() == other._key()


def quantised(problem: Problem, fp8: torch.dtype) -> Quantised:
    """The problem's window of the weights in FP8."""
    slots, rank, h1 = problem.a.shape
    bank = _bank((_Memory(problem.a), _Memory(problem.b)), rank, fp8)
    first = problem.a.storage_offset() // (rank * h1)
    return Quantised(*[part[first : first + slots] for part in bank])


def checked_calls(batches: Sequence[Problem], system: str) -> tuple[list[Call], float]:
    """The calls of `system` on `batches`, the first of them checked, and its error relative to unrounded weights.

    Raises `CheckFailed` when the first differs from the reference on the weights that the system holds.
    """
    held = SYSTEMS[system]
    calls = [_call(batch, held) for batch in batches]
    first = batches[0]
    first.y.zero_()
    calls[0]()
    result = first.y.clone()
    wide = replace(first, x=first.x.float(), a=first.a.float(), b=first.b.float())
    rounded = wide
    if held.fp8 is not None:
        own = quantised(first, held.fp8)
        rounded = replace(wide, a=dequantize(own.a, own.a_scale), b=dequantize(own.b, own.b_scale))
    error = difference(result, rounded.expected())
    allowed = W8A8_TOLERANCE if held.w8a8 else TOLERANCE[DType(str(result.dtype).removeprefix("torch."))]
    if not error <= allowed:
        raise CheckFailed(f"{system} differs from the reference by {error:.2e} (relative), above {allowed:.0e}")
    return calls, difference(result, wide.expected())


def _call(problem: Problem, held: System) -> Call:
    """Prepare a layer's call on the wrapper of the problem's device."""
    slots, rank, _ = problem.a.shape
    wrapper = begun(get_punica_wrapper, tuple(problem.slots.tolist()), slots, rank, problem.x.device)
    ranks = torch.full((1, slots), rank, dtype=torch.int32, device=problem.x.device)
    if held.fp8 is None:
        weights = LoRAWeights.of((problem.a,), (problem.stored_b,), ranks)
    else:
        a, a_scale, b, b_scale = quantised(problem, held.fp8)
        scheme = PER_CHANNEL._replace(use_fp8_w8a8=held.w8a8)
        weights = LoRAWeights.of((a,), (b,), ranks, ((a_scale,), (b_scale,)), (scheme, scheme))
    return partial(wrapper.add_linear, problem.y, problem.x, weights)


def model_errors(
    cfg: Config, systems: Sequence[str], requests: int, prompt: int, rank: int
) -> list[tuple[float, float, int]]:
    """Return, per system: relative error of the logits of `requests` prompts, share of tokens whose greedy choice
    changes, both against adapters in the model's dtype, and bytes of a slot.
    """
    wide, _ = _logits(cfg, None, requests, prompt, rank)
    found = []
    for system in systems:
        logits, size = _logits(cfg, SYSTEMS[system].fp8, requests, prompt, rank)
        changed = float((logits.argmax(-1) != wide.argmax(-1)).float().mean())
        found.append((difference(logits, wide), changed, size))
    return found


@torch.inference_mode()
def _logits(cfg: Config, fp8: torch.dtype | None, requests: int, prompt: int, rank: int) -> tuple[Tensor, int]:
    """Logits [T, vocab] of prompts that have an adapter each, and the bytes of a slot."""
    llama = random_llama(cfg.model, cfg.hardware.device)
    lora = LoRAConfig(max_lora_rank=rank, max_loras=requests, target_modules=list(LLAMA_LORA_MODULES), fp8=fp8)
    tokens = requests * prompt
    manager = LoRAModelManager(llama, requests, tokens, cfg.model.vocab_size, lora, cfg.hardware.device)
    config, dtype = llama_config(cfg.model), getattr(torch, cfg.model.dtype.name)
    for i in range(1, requests + 1):
        manager.add_adapter(random_adapter(i, config, rank, cfg.adapters.seed + i, dtype=dtype))
        manager.activate_adapter(i)
    ids = [i for i in range(1, requests + 1) for _ in range(prompt)]
    manager.set_adapter_mapping(LoRAMapping(ids, ids, is_prefill=True))
    torch.manual_seed(cfg.adapters.seed)  # the cache holds noise
    invocation = Invocation(llama, step_tokens(requests, prompt))
    token_ids, positions = invocation.begin(spans(requests, prompt, prompt))
    hidden = llama(token_ids, positions, invocation.attention)
    return llama.compute_logits(hidden), manager.slot_bytes
