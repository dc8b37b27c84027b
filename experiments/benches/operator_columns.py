"""Columns of the operator tables: calls on the sets of one operator, checked before they are timed.

==========================  ==============================================================================
punica                      the flat operator, both kernels early, B row after row as in adapter files
wrapper                     what a layer calls (`layer_call`): defaults, 64 slots, the table of true ranks, B by ranks.
layer                       the wrapper behind a base product as a layer calls it, in decode steps the shrink beside.
wrapper, normal launch      as ``wrapper`` with ``LoRAConfig(pdl=False)``.
normal shrink               as a layer has it run, expand early only.
no overlap                  the flat operator with plain launches.
rank table                  the flat operator, the ranks read from a table.
batch invariant             the flat operator with ``batch_invariant=True``.
wrapper, batch invariant    the wrapper with ``LoRAConfig(batch_invariant=True)``.
fp8                         the wrapper, A and B in FP8, one scale per channel, activations as they are.
fp8 w8a8                    the same, x quantised beforehand, the intermediate in the call.
fp8 w8a8, x too             the same, x quantised in the call.
==========================  ==============================================================================
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from experiments.benches.atomics import prepare_lora_atomics
from experiments.benches.layer_call import begun, beside
from experiments.benches.operator_pairs import estimated, pair_plan
from experiments.benches.operator_sets import OperatorSets
from experiments.benches.operator_shapes import Operator
from experiments.harness.experiment import CheckFailed
from punica.layers.dual_stream import DualStream
from punica.ops.fp8_checks import PER_CHANNEL, Scheme
from punica.ops.quant import quantize_per_token
from punica.ops.triton_ops import lora_linear
from punica.ops.triton_ops.launch import supports_pdl
from punica.ops.weights import LoRAWeights
from punica.wrapper import PunicaWrapperBase, PunicaWrapperGPU

Call = Callable[[int], object]
Columns = dict[str, Call]
TOLERANCE = 1e-3
"""Largest relative error of one call in half precision; four times that after the many additions of a graph."""
TORCH_TOLERANCE = 4 * TOLERANCE
"""The same for what torch computes, half precision between two products."""
TOLERANCES = {"torch": TORCH_TOLERANCE, "fp8 w8a8": 5e-2}
"""Other tolerances, by the beginning of a column's name: w8a8 rounds activations and the low-rank tensor."""


@dataclass(frozen=True)
class Beside:
    """A LoRA call that a layer begins before its base product, in a graph on a second stream."""

    streams: DualStream
    call: Callable[..., object]

    def behind(self, product: Callable[[], object], x: torch.Tensor, i: int) -> None:
        """Run ``product()`` and the call on set i; ``x``: their input."""
        beside(self.streams, x, product, partial(self.call, i))

    def __call__(self, i: int) -> None:
        self.call(i)


def sets_of(operator: Operator, table: str, **options: Any) -> OperatorSets:
    """The inputs on which the columns of `table` are timed: where FP8 is beside 16 bits, weights that both hold."""
    return OperatorSets(operator, rounded=as_fp8_holds if table == "fp8" else None, **options)


def columns(sets: OperatorSets, table: str) -> Columns:
    """Column -> the call on set i."""
    return COLUMNS.get(table, _of_the_operator)(sets)


def _flat(sets: OperatorSets, **options: Any) -> Call:
    *tensors, count = sets.meta_args
    chosen = {"num_active_loras": count, "lora_ranks": sets.lora_ranks, **options}
    return lambda i: lora_linear(sets.y[i], sets.x[i], sets.a[i], sets.b[i], *tensors, 1.0, **chosen)


def _begun(sets: OperatorSets, **switches: bool) -> PunicaWrapperBase:
    slots = sets.stacked_ranks.shape[1]
    return begun(PunicaWrapperGPU, sets.slots.tolist(), slots, sets.operator.rank, sets.x.device, **switches)


def _of_a_layer(sets: OperatorSets, **switches: bool) -> Call:
    ranks, wrapper = sets.stacked_ranks, _begun(sets, **switches)
    weights = [LoRAWeights.of(a, b, ranks) for a, b in zip(sets.stacked_a, sets.stacked_b, strict=True)]

    def call(i: int, **keywords: Any) -> None:
        wrapper.add_linear(sets.y[i], sets.x[i], weights[i], **keywords)

    return call


def _power_of_two_scale(w: torch.Tensor) -> torch.Tensor:
    """One scale per channel ``w [..., N, K]`` whose products with FP8 values are exact in half precision."""
    largest = w.float().abs().amax(-1).clamp(min=2.0**-20)
    return torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(torch.float8_e4m3fn).max)))


def as_fp8_holds(w: torch.Tensor) -> torch.Tensor:
    """`w` rounded to what FP8 with such scales holds."""
    scale = _power_of_two_scale(w)[..., None]
    return ((w.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(w.dtype)


def _in_fp8(sets: OperatorSets) -> Columns:
    op, ranks = sets.operator, sets.stacked_ranks
    wrapper, slots = _begun(sets), ranks.shape[1]
    scales = [[_power_of_two_scale(w) for w in bank] for bank in sets.banks]
    a8, b8 = ([(w / s[..., None]).to(torch.float8_e4m3fn) for w, s in zip(bank, scale, strict=True)]
              for bank, scale in zip(sets.banks, scales, strict=True))  # fmt: skip
    stored = [sets.windows(a8, slots), sets.windows([w.mT.contiguous().mT for w in b8], slots)]
    a_scale, b_scale = (sets.windows(scale, slots) for scale in scales)
    x8, x_scale = quantize_per_token(sets.x.view(-1, op.k))
    rows8, rows_scale = x8.view(sets.x.shape), x_scale.view(*sets.x.shape[:2], -1)

    def weights_of(scheme: Scheme) -> list[LoRAWeights]:
        held = zip(*stored, a_scale, b_scale, strict=True)
        return [LoRAWeights.of(a, b, ranks, (of_a, of_b), (scheme, scheme)) for a, b, of_a, of_b in held]

    weights = {w8a8: weights_of(PER_CHANNEL._replace(use_fp8_w8a8=w8a8)) for w8a8 in (False, True)}

    def call(i: int, w8a8: bool, here: bool) -> None:
        x, scale = (sets.x[i], None) if here else (rows8[i], rows_scale[i])
        wrapper.ops.linear(sets.y[i], x, weights[w8a8][i], wrapper.batch, x_scale=scale)

    return {
        "wrapper": _of_a_layer(sets),
        "fp8": partial(call, w8a8=False, here=True),
        "fp8 w8a8": partial(call, w8a8=True, here=False),
        "fp8 w8a8, x too": partial(call, w8a8=True, here=True),
    }


def _normal_shrink(sets: OperatorSets) -> Call:
    return pair_plan(sets, *estimated(sets.operator), pdl=supports_pdl(sets.x.device), pdl_shrink=False)


def _of_the_operator(sets: OperatorSets) -> Columns:
    return {
        "punica": _flat(sets),
        "wrapper": _of_a_layer(sets),
        "wrapper, normal launch": _of_a_layer(sets, pdl=False),
        "normal shrink": _normal_shrink(sets),
        "no overlap": _flat(sets, pdl=False),
    }


def _with_rank_table(sets: OperatorSets) -> Columns:
    ranks = sets.stacked_ranks[:, : len(sets.operator.sizes)].contiguous()
    return {**_of_the_operator(sets), "rank table": _flat(sets, lora_ranks=ranks)}


def _behind_projection(sets: OperatorSets) -> Columns:
    found: Columns = {"punica": _flat(sets), "wrapper": _of_a_layer(sets)}
    if sets.x.is_cuda:
        streams = DualStream(sets.x.device)
        found["layer"] = Beside(streams, _of_a_layer(sets))
    return found


def _invariant(sets: OperatorSets) -> Columns:
    return {
        "punica": _flat(sets),
        "wrapper": _of_a_layer(sets),
        "batch invariant": _flat(sets, batch_invariant=True),
        "wrapper, batch invariant": _of_a_layer(sets, batch_invariant=True),
    }


def _on_stacks(sets: OperatorSets, run: Callable[..., object], i: int) -> None:
    run(sets.y[i], sets.x[i], sets.stacked_a[i], sets.stacked_b[i])


def _atomics(sets: OperatorSets) -> Columns:
    # what atomics are for: K split further without partials to sum; the better of ours and a finer split counts
    shrink, expand = estimated(sets.operator)
    finer = shrink._replace(split_k=min(16, 4 * shrink.split_k), block_k=max(128, shrink.block_k // 4))
    found: Columns = {"punica": _flat(sets), "no early shrink": _normal_shrink(sets)}
    first, overlap = (sets.y[0], sets.x[0], sets.stacked_a[0], sets.stacked_b[0]), supports_pdl(sets.x.device)
    for name, config in (("atomics", shrink), ("atomics, finer split", finer)):
        run = prepare_lora_atomics(*first, sets.meta_args, config, expand, overlap=overlap)
        found[name] = partial(_on_stacks, sets, run)
    return found


COLUMNS: dict[str, Callable[[OperatorSets], Columns]] = {
    "A": _with_rank_table,
    "B": _with_rank_table,
    "gemm": _behind_projection,
    "determinism": _atomics,
    "invariant": _invariant,
    "fp8": _in_fp8,
}
"""Table -> its columns, where they are not the operator's and the wrapper's."""


def torch_calls(sets: OperatorSets) -> Columns:
    """The anchors' two torch baselines: one addmm pair per adapter; gather and two bmm."""
    sizes, slots = sets.operator.sizes, sets.slots.to(sets.x.device)

    def loop(i: int) -> None:
        start = 0
        for slot, size in enumerate(sizes):
            rows = slice(start, start + size)
            sets.y[i][rows].addmm_(sets.x[i][rows] @ sets.a[i][0][slot].T, sets.b[i][0][slot].T)
            start += size

    def gather_bmm(i: int) -> None:
        a, b = sets.a[i][0][slots], sets.b[i][0][slots]
        sets.y[i].add_(torch.bmm(torch.bmm(sets.x[i][:, None], a.transpose(1, 2)), b.transpose(1, 2))[:, 0])

    return {"torch_loop": loop, "torch_gbmm": gather_bmm}


def checked_us(sets: OperatorSets, name: str, call: Call, calls: int, replays: int) -> float:
    """Median microseconds of `call` in a graph, right after one call and after a whole replay; else `CheckFailed`."""
    tolerance = next((value for start, value in TOLERANCES.items() if name.startswith(start)), TOLERANCE)
    check(name, sets.relative_error(call), tolerance)
    us, error = sets.time_graph(call, calls=calls, replays=replays)
    check(f"{name}, after a graph replay", error, max(tolerance, 4 * TOLERANCE))
    return us


def check(name: str, error: float, tolerance: float) -> None:
    """Raise `CheckFailed` unless the relative `error` is at most `tolerance`."""
    if not error <= tolerance:
        raise CheckFailed(f"{name}: relative error {error:.1e} is above {tolerance:.0e}: not timed")


def call_once(job: tuple[Operator, str]) -> str:
    """Call every column of an operator's line in a table once, which compiles it; return the error, if any."""
    operator, table = job
    try:
        for call in columns(sets_of(operator, table, rotating_bytes=0), table).values():
            call(0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        return f"{operator}: {type(error).__name__}: {error}"
    return ""
