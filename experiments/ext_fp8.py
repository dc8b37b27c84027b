"""Extension: adapters in FP8, their savings and costs.

Not in the paper, whose adapters have 16 bits. A decode step of many adapters reads little else than their weights, so
half the bytes should be about half the time; one float32 scale per channel adds 4 / (2 r) of B. Claim: weight-only FP8
is faster than 16 bits where weights dominate (Distinct, large batches, more at rank 64 than at 16), and no slower where
one adapter serves all. The H200's rows miss the second part. The error is that of one rounding to 4 bits (e4m3) or 3
(e5m2) of each weight, averaged over a sum. w8a8 rounds x and the rank vector too, for no fewer bytes of weights. On a
CPU, which dequantises FP8 before it multiplies, FP8 saves memory and no time.

Timed: y += x A^T B^T at h1 = 4096, h2 = 11008 through the wrapper that layers call, with true ranks; systems

    SGMV       weights as wide as the activations
    FP8 e4m3   weights in float8_e4m3fn with scales per channel; activations as they are (weight-only)
    FP8 e5m2   the same in float8_e5m2
    FP8 w8a8   e4m3; x and the rank vector quantised per token, which is part of the time

interleaved, every one after a check against the reference on the rounded weights. `error` is relative to the reference
on the weights before they were rounded. Panel `quality`: a model with random weights and an adapter per request
computes prompts; logits of all their tokens with the adapters in FP8 against the same as wide as the model: `logit
error` (relative), and how many greedy tokens (largest logit) change. Random logits are closer together than a trained
model's, so that this is the pessimistic end.

Cost at scale=laptop: about 45 seconds on two cores, 3 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, cast

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment, operator_conf
from experiments.harness import PROTOCOL, Config, Point, Reading, main, sampled
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, DType
from experiments.workload.popularity import popularity

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from experiments.benches.operators import Problem
    from experiments.measure.timing import Call

QUALITY = "quality"
WITH_QUALITY = ("FP8 e4m3", "FP8 e5m2")
FORMATS = {"SGMV": None, "FP8 e4m3": "float8_e4m3fn", "FP8 e5m2": "float8_e5m2", "FP8 w8a8": "float8_e4m3fn"}
"""System -> format of its weights in torch; None: that of the activations."""
W8A8, W8A8_TOLERANCE = "FP8 w8a8", 2 / 16
"""The system that quantises activations too, and its largest relative error against the product of the rounded weights:
activations are rounded twice, by up to 1/16 of a value. Over many rows and ranks 0.035 is usual; one row of rank 16
sometimes exceeds 0.05.
"""


class Fp8Conf(OperatorConf):
    """`requests` prompts of `prompt` tokens, each with an adapter of its own, for panel `quality`."""

    requests: Count
    prompt: Count


class Fp8(OperatorExperiment):
    """Latency, error and bytes of each system per popularity, rank and batch; error and changed tokens of a model."""

    name, figure, order, conf = "ext_fp8", "ext fp8", 250, Fp8Conf
    reads = ("model", "workload", "adapters.ranks", "adapters.slots", "adapters.seed", *PROTOCOL)
    drawn_by, host_clock_too = "extensions.draw_fp8", False  # errors and bytes, most of its cost, have no clock
    defaults = {"adapters": "fp8_ranks"}

    def panel(self, workload: str, rank: int) -> str:
        return f"{workload}, rank {rank}"

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(Fp8Conf, cfg.figure)
        settings = {"model": model_settings(cfg.model), "seed": cfg.adapters.seed}
        return super().points(cfg) + [
            Point(QUALITY, system, "", cfg.model.name, figure.requests, figure.prompt, rank, settings)
            for rank in cfg.adapters.ranks
            for system in cfg.system.names
            if system in WITH_QUALITY
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches import operators

        first = points[0]
        rows, rank = cast(int, first.batch_size), cast(int, first.rank)
        if first.panel == QUALITY:
            return model_errors(cfg, [point.system for point in points], rows, cast(int, first.seq_len), rank)
        batches = operators.problems(cfg, first.workload, rows, rank)
        checked = {point.system: checked_calls(batches, point.system) for point in points}
        samples = operators.microseconds(cfg, {system: calls for system, (calls, _) in checked.items()})
        adapters = popularity(first.workload).number_of_adapters(rows)
        return [
            [
                *sampled("latency", samples[point.system], "us"),
                Reading("error", checked[point.system][1], "ratio"),
                Reading("bytes_read", bytes_read(operator_conf(cfg), rows, adapters, rank, point.system), "byte"),
            ]
            for point in points
        ]


def bytes_read(figure: OperatorConf, rows: int, adapters: int, rank: int, system: str) -> int:
    """Bytes that one batch reads: A and B of its adapters with their scales, x [T, h1] and the old y [T, h2]."""
    wide, is_wide = figure.dtype.bytes, FORMATS[system] is None
    weights = rank * (figure.h1 + figure.h2) * (wide if is_wide else 1)
    scales = 0 if is_wide else 4 * (rank + figure.h2)
    return adapters * (weights + scales) + wide * rows * (figure.h1 + figure.h2)


class Quantised(NamedTuple):
    """A [L, r, h1] and B [L, h2, r] in FP8, B as layers store it, rank after rank; one float32 scale per channel."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor


@lru_cache(maxsize=3)
def _bank(a: Tensor, b: Tensor, fp8: torch.dtype) -> Quantised:
    """Quantise all slots that rotate, once for all batches, whose weights are windows of the same two tensors."""
    from punica.ops.quant import quantize_per_channel

    (a8, a_scale), (b8, b_scale) = (quantize_per_channel(one, fp8, check=False) for one in (a, b))
    return Quantised(a8, a_scale, b8.mT.contiguous().mT, b_scale)


def quantised(problem: Problem, fp8: torch.dtype) -> Quantised:
    """The problem's window of the weights in FP8."""
    slots, rank, h1 = problem.a.shape
    first = problem.a.storage_offset() // (rank * h1)
    bank = _bank(cast("Tensor", problem.a._base), cast("Tensor", problem.b._base), fp8)
    return Quantised(*[part[first : first + slots] for part in bank])


def checked_calls(batches: Sequence[Problem], system: str) -> tuple[list[Call], float]:
    """The calls of `system` on `batches`, the first of them checked, and its error relative to unrounded weights.

    Raises `CheckFailed` when the first differs from the reference on the weights that the system holds.
    """
    from experiments.benches.model_steps import difference
    from experiments.benches.operators import TOLERANCE, check
    from punica.ops.quant import dequantize

    calls = [_call(batch, system) for batch in batches]
    first = batches[0]
    first.y.zero_()
    calls[0]()
    wide = replace(first, x=first.x.float(), a=first.a.float(), b=first.b.float())
    rounded = wide
    if (fp8 := _dtype(system)) is not None:
        own = quantised(first, fp8)
        rounded = replace(wide, a=dequantize(own.a, own.a_scale), b=dequantize(own.b, own.b_scale))
    allowed = W8A8_TOLERANCE if system == W8A8 else TOLERANCE[DType(str(first.y.dtype).removeprefix("torch."))]
    check(system, first.y, rounded.expected(), allowed)
    return calls, difference(first.y, wide.expected())


def _dtype(system: str) -> torch.dtype | None:
    import torch

    name = FORMATS[system]
    return None if name is None else cast("torch.dtype", getattr(torch, name))


def _call(problem: Problem, system: str) -> Call:
    """Prepare a layer's call on the wrapper of the problem's device."""
    from experiments.benches.operators import step_of, weights_of
    from punica.ops.fp8_checks import PER_CHANNEL
    from punica.ops.weights import LoRAWeights

    weights, fp8 = weights_of(problem), _dtype(system)
    if fp8 is not None:
        a, a_scale, b, b_scale = quantised(problem, fp8)
        scheme = PER_CHANNEL._replace(use_fp8_w8a8=system == W8A8)
        weights = LoRAWeights.of((a,), (b,), weights.a.ranks, ((a_scale,), (b_scale,)), (scheme, scheme))
    return partial(step_of(problem).add_linear, problem.y, problem.x, weights)


def model_errors(cfg: Config, systems: Sequence[str], requests: int, prompt: int, rank: int) -> list[list[Reading]]:
    """Read, per system: relative error of the logits of `requests` prompts, share of tokens whose greedy choice
    changes, both against adapters in the model's dtype, and bytes of a slot.
    """
    from experiments.benches.model_steps import difference

    wide, _ = _logits(cfg, None, requests, prompt, rank)
    found = []
    for system in systems:
        logits, size = _logits(cfg, _dtype(system), requests, prompt, rank)
        changed = float((logits.argmax(-1) != wide.argmax(-1)).float().mean())
        found.append([
            Reading("logit_error", difference(logits, wide), "ratio"),
            Reading("changed_greedy_tokens", changed, "ratio"),
            Reading("bytes", size, "byte"),
        ])  # fmt: skip
    return found


def _logits(cfg: Config, fp8: torch.dtype | None, requests: int, prompt: int, rank: int) -> tuple[Tensor, int]:
    """Logits [T, vocab] of prompts that have an adapter each, and the bytes of a slot."""
    import torch

    from experiments.benches.model_steps import Invocation, llama_config, random_llama, spans, step_tokens
    from punica.adapters import LoRAModelManager, random_adapter
    from punica.adapters.synthetic import LLAMA_LORA_MODULES
    from punica.config import LoRAConfig
    from punica.metadata import LoRAMapping

    llama = random_llama(cfg.model, cfg.hardware.device)
    lora = LoRAConfig(max_lora_rank=rank, max_loras=requests, target_modules=list(LLAMA_LORA_MODULES), fp8=fp8)
    vocab_size, config = cfg.model.vocab_size, llama_config(cfg.model)
    manager = LoRAModelManager(llama, requests, requests * prompt, vocab_size, lora, cfg.hardware.device)
    dtype = getattr(torch, cfg.model.dtype.name)
    for i in range(1, requests + 1):
        manager.add_adapter(random_adapter(i, config, rank, cfg.adapters.seed + i, dtype=dtype))
        manager.activate_adapter(i)
    ids = [i for i in range(1, requests + 1) for _ in range(prompt)]
    manager.set_adapter_mapping(LoRAMapping(ids, ids, is_prefill=True))
    torch.manual_seed(cfg.adapters.seed)  # the cache holds noise
    invocation = Invocation(llama, step_tokens(requests, prompt))
    token_ids, positions = invocation.begin(spans(requests, prompt, prompt))
    with torch.inference_mode():
        hidden = llama(token_ids, positions, invocation.attention)
        return llama.compute_logits(hidden), manager.slot_bytes


EXPERIMENT = Fp8()

if __name__ == "__main__":
    main(EXPERIMENT)
