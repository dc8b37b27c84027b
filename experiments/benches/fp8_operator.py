"""Adapters in FP8, for `ext_fp8`: the operator on a batch, and a model's logits, with their errors."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from experiments.benches.model_steps import Invocation, random_llama, spans, step_tokens, with_adapters
from experiments.benches.operators import TOLERANCE, Problem, step_of, weights_of
from experiments.harness import Config, Reading
from experiments.harness.experiment import check, difference
from experiments.harness.schema import DType
from experiments.measure.timing import Call
from punica.adapters.synthetic import LLAMA_LORA_MODULES
from punica.metadata import LoRAMapping
from punica.ops.quant import dequantize, quantize_per_channel
from punica.ops.scales import PER_CHANNEL
from punica.ops.weights import LoRAWeights

FORMATS = {
    "SGMV": None,
    "FP8 e4m3": torch.float8_e4m3fn,
    "FP8 e5m2": torch.float8_e5m2,
    "FP8 w8a8": torch.float8_e4m3fn,
}
"""System -> format of its weights; None: that of the activations."""
W8A8, W8A8_TOLERANCE = "FP8 w8a8", 2 / 16
"""The system that quantises activations too, and its largest relative error against the product of the rounded weights:
activations are rounded twice, by up to 1/16 of a value. Over many rows and ranks 0.035 is usual; one row of rank 16
sometimes exceeds 0.05.
"""


class Quantised(NamedTuple):
    """A [L, r, h1] and B [L, h2, r] in FP8, B as layers store it, rank after rank; one float32 scale per channel."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor


@lru_cache(maxsize=3)
def _bank(a: Tensor, b: Tensor, fp8: torch.dtype) -> Quantised:
    """Quantise all slots that rotate, once for all batches, whose weights are windows of the same two tensors."""
    (a8, a_scale), (b8, b_scale) = (quantize_per_channel(one, fp8, check=False) for one in (a, b))
    return Quantised(a8, a_scale, b8.mT.contiguous().mT, b_scale)


def quantised(problem: Problem, fp8: torch.dtype) -> Quantised:
    slots, rank, h1 = problem.a.shape
    first = problem.a.storage_offset() // (rank * h1)
    bank = _bank(cast(Tensor, problem.a._base), cast(Tensor, problem.b._base), fp8)
    return Quantised(*[part[first : first + slots] for part in bank])


def checked_calls(batches: Sequence[Problem], system: str) -> tuple[list[Call], float]:
    """The calls of `system`, the first checked against the reference, and its error relative to unrounded weights."""
    calls, first, fp8 = [_call(batch, system) for batch in batches], batches[0], FORMATS[system]
    first.y.zero_()
    calls[0]()
    wide = replace(first, x=first.x.float(), a=first.a.float(), b=first.b.float())
    rounded = wide
    if fp8 is not None:
        own = quantised(first, fp8)
        rounded = replace(wide, a=dequantize(own.a, own.a_scale), b=dequantize(own.b, own.b_scale))
    allowed = W8A8_TOLERANCE if system == W8A8 else TOLERANCE[DType(str(first.y.dtype).removeprefix("torch."))]
    check(system, first.y, rounded.expected(), allowed)
    return calls, difference(first.y, wide.expected())


def _call(problem: Problem, system: str) -> Call:
    weights, fp8 = weights_of(problem), FORMATS[system]
    if fp8 is not None:
        a, a_scale, b, b_scale = quantised(problem, fp8)
        scheme = PER_CHANNEL._replace(use_fp8_w8a8=system == W8A8)
        weights = LoRAWeights.of((a,), (b,), weights.a.ranks, ((a_scale,), (b_scale,)), (scheme, scheme))
    return partial(step_of(problem).add_linear, problem.y, problem.x, weights)


def model_errors(cfg: Config, systems: Sequence[str], requests: int, prompt: int, rank: int) -> list[list[Reading]]:
    """Per system: relative error of logits, share of changed greedy tokens, and bytes of a slot."""
    wide, _ = _logits(cfg, None, requests, prompt, rank)
    found = []
    for system in systems:
        logits, size = _logits(cfg, FORMATS[system], requests, prompt, rank)
        changed = float((logits.argmax(-1) != wide.argmax(-1)).float().mean())
        error = Reading("logit_error", difference(logits, wide), "ratio")
        found.append([error, Reading("changed_greedy_tokens", changed, "ratio"), Reading("bytes", size, "byte")])
    return found


def _logits(cfg: Config, fp8: torch.dtype | None, requests: int, prompt: int, rank: int) -> tuple[Tensor, int]:
    """Logits [T, vocab] of prompts that have an adapter each, and the bytes of a slot."""
    llama = random_llama(cfg.model, cfg.hardware.device)
    lora: Any = {"target_modules": list(LLAMA_LORA_MODULES), "fp8": fp8}
    manager = with_adapters(llama, rank, requests, requests * prompt, cfg.adapters.seed, **lora)
    ids = [i for i in range(1, requests + 1) for _ in range(prompt)]
    manager.set_adapter_mapping(LoRAMapping(ids, ids, is_prefill=True))
    torch.manual_seed(cfg.adapters.seed)  # the cache holds noise
    invocation = Invocation(llama, step_tokens(requests, prompt))
    token_ids, positions = invocation.begin(spans(requests, prompt, prompt))
    with torch.inference_mode():
        return llama.compute_logits(llama(token_ids, positions, invocation.attention)), manager.slot_bytes
