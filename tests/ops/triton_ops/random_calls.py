"""Random calls of all ops against plain torch: ``python random_calls.py FIRST COUNT SEED`` makes those numbers.

Number and seed decide a call; `PER_FORM` neighbours share a *form*, for which kernels are compiled. A line describes a
call before it is made; "failed" follows a wrong one. What must not be read is NaN: around operands, in free slots,
beyond true ranks, in rows without adapter, in outputs that are overwritten. What must not be written keeps its bits.
"""

import functools
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[depth]) for depth in (3, 0)]

import conftest  # noqa: E402, F401 (without a GPU it asks for Triton's interpreter, before Triton is imported)

from punica.config import LoRAConfig  # noqa: E402
from punica.metadata import LoRAKernelMeta, LoRAMapping  # noqa: E402
from punica.ops import moe_torch, triton_ops  # noqa: E402
from punica.ops.scales import Scheme  # noqa: E402
from punica.vllm.experts import DEFAULTS  # noqa: E402
from punica.wrapper import PunicaWrapperGPU  # noqa: E402
from tests.ops.helpers import E4M3, E5M2, MODES, Fp8Stack  # noqa: E402
from tests.ops.moe_cases import SCHEMES, Case, World, add_w2, add_w13, keywords  # noqa: E402

SMALL = not torch.cuda.is_available()
DEVICE, MOST_ROWS = ("cpu", 9) if SMALL else ("cuda", 640)
MARGIN, NAN = 64, float("nan")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ROUNDING = {
    torch.float16: 2**-11, torch.bfloat16: 2**-7 if SMALL else 2**-8, torch.float32: 2**-23, torch.float8_e4m3fn: 2**-4,
}  # fmt: skip
SUMMED = 1e-5
"""Largest error of a rounded value (Triton's interpreter truncates bfloat16) or of a float32 sum, in parts of these."""
PER_FORM, MOST_WEIGHTS = (4, 100_000) if SMALL else (160, 6_000_000)
NUMBERS = torch.arange(4096, device=DEVICE)
FLOATS, BOTH, RARELY = tuple(ROUNDING)[:3], (False, True), (False, False, False, False, True)
FORM: dict[str, tuple] = {
    "dtype": FLOATS, "out": (None, None, *FLOATS), "low": (torch.float32, torch.float32, *FLOATS),
    "k": (64, 100, 256, 272, 512, 777, 1024, 1100), "slices": (1, 1, 2, 3, 4), "slots": (1, 2, 4, 4, 8, 8, 16, 40, 80),
    "rank": (1, 2, 3, 7, 8, 16, 16, 20, 24, 32, 32, 32, 48, 64, 64, 96, 100, 128, 200, 256),
    "widths": (1, 8, 16, 33, 64, 100, 128, 256, 256, 500, 512, 1000, 1024, 1024, 2048),
    "true_ranks": (False, True, True), "by_ranks": BOTH, "a_swapped": RARELY, "invariant": RARELY,
    "off": ("", "", "", "x", "y", "weights", "x y weights"), "layout": ("rows", "rows", "gaps", "columns", "steps"),
    "offset": (0, 0, 3, 16), "spare": (0, 5, 16),
    "fp8": (None, None, None, None, None, E4M3, E4M3, E5M2), "mode": tuple(MODES), "w8a8": (False, False, True),
    "x_scale": ("one", "row", "column", "groups"),
    "experts": (2, 4, 8), "top_k": (1, 2, 4), "down": BOTH, "blocks": (16, 16, 32, 64), "scheme": tuple(SCHEMES),
}  # fmt: skip
"""out, low: dtypes of an expand's output (None: of the weights) and of a shrink's. by_ranks, a_swapped: storage of B
and A with the last dimensions swapped. off: operands one element behind a multiple of 16 bytes. layout: of activations.
spare: columns behind the slices. From fp8 on of weights in FP8, from experts on of these.
"""
if SMALL:
    FORM |= {"k": (16, 40), "rank": (1, 3, 8, 16, 20), "widths": (1, 8, 18, 33), "slots": (1, 3, 12), "top_k": (1, 2)}
CALL: dict[str, tuple] = {
    "slots": ("none", "one", "distinct", "zipf", "zipf", "uniform", "uniform"), "bare": (0.0, 0.0, 0.1, 0.6),
    "ordered": BOTH, "add": BOTH, "scale": (1.0, 0.5, -2.0, 3), "wide": BOTH, "count": ("tensor", "number", "all"),
    "pad": (0, 0, 3), "parts": BOTH, "nested": BOTH,
}  # fmt: skip
"""bare: share of rows without adapter. wide: h of an expand is float32. count: of active slots. pad: rows behind the
step's. parts: a tensor per slice. nested: in three dimensions.
"""


def placed(values: Tensor, off: bool = False, layout: str = "rows") -> tuple[Tensor, Tensor]:
    """A copy of ``values`` amid NaN, and all of that memory."""
    *lead, rows, columns = values.shape
    inner = {"rows": (rows, columns), "gaps": (rows, columns + 3), "columns": (columns, MOST_ROWS)}
    shape = torch.Size((*lead, *inner.get(layout, (rows, 2 * columns))))
    whole = torch.empty(shape.numel() + 2 * MARGIN + 1, dtype=values.dtype, device=DEVICE).fill_(NAN)
    base = whole[MARGIN + off :][: shape.numel()].view(shape)
    view = base.mT[..., :rows, :] if layout == "columns" else base[..., :: 2 if layout == "steps" else 1]
    return view[..., :columns].copy_(values), whole


class Output:
    """Memory that a call writes; ``touched``: the elements of it, which are NaN before unless it adds."""

    def __init__(self, values: Tensor, touched: Tensor, add: bool, off: bool, layout: str = "rows") -> None:
        self.view, self.whole = placed(values if add else values.masked_fill(touched, NAN), off, layout)
        self.touched, self.before = touched, self.whole.clone()
        self.old = self.view.double() if add else 0

    def fault(self, want: Tensor, bound: Tensor) -> str:
        """What differs from ``want`` by more than ``bound``, or has changed elsewhere; "": nothing."""
        bits, free = BITS[self.whole.element_size()], torch.ones_like(self.whole, dtype=torch.bool)
        free.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).copy_(~self.touched)
        changed = (self.whole.view(bits) != self.before.view(bits)) & free
        if bool(changed.any()):
            places = (changed.nonzero().flatten() - self.view.storage_offset()).tolist()
            return f"{len(places)} elements changed that must not be written, {places[:9]} from the output's start"
        got, bound = self.view.double(), bound + 1.1 * ROUNDING[self.view.dtype] * want.abs() + 1e-7
        error = (got - want).abs() / bound
        at = (self.touched & ~(error <= 1)).nonzero()
        if not len(at):
            return ""
        first, each = tuple(at[0].tolist()), [sorted({*column.tolist()})[:12] for column in at.mT]
        return (
            f"{len(at)} of {int(self.touched.sum())} elements wrong; at {first} is {float(got[first])} for "
            f"{float(want[first])}, error {float(error[first]):.3g} times the bound; indices per dimension {each}"
        )


def drawn(table: dict[str, tuple], rng: Random) -> SimpleNamespace:
    return SimpleNamespace(**{name: rng.choice(values) for name, values in table.items()})


def draw_form(number: int, seed: int) -> SimpleNamespace:
    rng = Random(f"form {number} {seed}")
    form = drawn(FORM, rng)
    form.wrapper, form.of_experts = number % 2 == 1, number % 5 == 4
    form.widths = tuple(rng.choice(FORM["widths"]) for _ in range(form.slices))
    if form.of_experts:
        form.slices, form.k, form.widths = min(2, form.slices), min(form.k, 512), (min(512, form.widths[0]),)
    per_slot = form.rank * (form.slices * form.k + sum(form.widths))
    per_slot = 6 * form.experts * per_slot if form.of_experts else max(per_slot, 200 * max(form.widths))
    form.slots = max(1, min(form.slots, MOST_WEIGHTS // per_slot))
    form.live = max(1, form.slots - rng.choice((0, 0 if form.of_experts else 1)))  # other slots are free
    form.rows = [1 + int((MOST_ROWS - 4) ** rng.random()) // (6 if form.of_experts else 1) for _ in range(4)]
    form.numbers = [form.blocks, *rng.choices((16, 32, 64), k=2), 1, 4, rng.choice((1, 2, 3)), rng.choice((1, 1, 2))]
    ranks = (0, form.rank, min(8, form.rank), rng.randint(1, form.rank))
    form.ranks = [rng.choices(ranks, k=form.slots) for _ in range(form.slices)]
    return form


def draw_slots(form: SimpleNamespace, call: SimpleNamespace, rng: Random) -> list[int]:
    one = rng.randrange(form.live)
    draw = {
        "none": lambda row: -1, "one": lambda row: one, "distinct": lambda row: (one + row) % form.live,
        "zipf": lambda row: min(int(rng.paretovariate(1)) - 1, form.live - 1),
        "uniform": lambda row: rng.randrange(form.live),
    }[call.slots]  # fmt: skip
    slots = [-1 if rng.random() < call.bare else draw(row) for row in range(call.rows)]
    return sorted(slots) if call.ordered else slots


class Layer:
    """Dense weights: per slice as stored ``[L, (1,) out, in]``, scales, and values in float64 with 0 for NaN."""

    def __init__(self, form: SimpleNamespace) -> None:
        self.form, self.generator = form, torch.Generator(DEVICE)
        torch.manual_seed(form.k)
        self.mode = MODES[form.mode] if form.fp8 else {}
        self.ranks = torch.tensor(form.ranks, dtype=torch.int32, device=DEVICE) if form.true_ranks else None
        self.a = [self._slice(i, form.rank, form.k, 0) for i in range(form.slices)]
        self.b = [self._slice(i, width, form.rank, 1) for i, width in enumerate(form.widths)]
        self.meta = LoRAKernelMeta.make(form.slots, MOST_ROWS, DEVICE)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE)

    def _slice(self, i: int, rows: int, columns: int, rank_dim: int) -> tuple[Tensor, Tensor | None, Tensor]:
        form, scale = self.form, None
        if form.fp8:
            stack = Fp8Stack.random(form.slots, rows, columns, self.mode, form.fp8, DEVICE)
            values, scale, real = stack.stored[:, 0], stack.scale, stack.real().to(DEVICE)
        else:
            values = (self.normal(form.slots, rows, columns) * columns**-0.5).to(form.dtype)
            real = values.double()
        for slot in range(form.slots):
            live = (form.ranks[i][slot] if form.true_ranks else form.rank) if slot < form.live else 0
            for tensor, nothing in ((values, NAN), (real, 0.0)):
                tensor[slot].narrow(rank_dim, live, form.rank - live).fill_(nothing)
            if scale is not None and slot >= form.live:
                scale[slot] = NAN
        swapped, off = (form.by_ranks if rank_dim else form.a_swapped), "weights" in form.off
        stored = placed(values.mT, off)[0].mT if swapped else placed(values, off)[0]
        return stored[:, None] if form.spare else stored, scale, real

    def activations(self, values: Tensor, dtype: torch.dtype, dead: Tensor, in_fp8: bool) -> tuple[Tensor, Any, Tensor]:
        """Activations as stored, their scales, and values in float64; where ``dead`` NaN, and 0."""
        values, scale = values.to(E4M3 if in_fp8 else dtype), None
        real, kind, (rows, k) = values.float().double(), self.form.x_scale, values.shape[-2:]
        if in_fp8:
            group = self.mode.get("group_k", k) if kind == "groups" else k
            shape = (1 if kind == "one" else rows, -(-k // group))
            scale = torch.rand(shape, generator=self.generator, device=DEVICE) + 0.1
            real *= scale.double()[:, NUMBERS[:k] // group]
            scale = scale.flatten() if kind in ("one", "row") else scale
        stored = placed(values, "x" in self.form.off, self.form.layout)[0]
        stored.view(BITS[stored.element_size()]).masked_fill_(dead, 127 if in_fp8 else -1)  # NaN
        return stored, scale, real.masked_fill(dead, 0.0)


def products(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """``x[t] @ W[slots[t]]^T``, 0 without adapter."""
    of_all = (x @ weights.flatten(0, 1).mT).unflatten(1, weights.shape[:2])
    return of_all[NUMBERS[: len(slots)], slots.clamp(min=0)] * (slots >= 0)[:, None]


def call_dense(layer: Layer, call: SimpleNamespace, rng: Random) -> str:
    form, op = layer.form, call.op
    mappings = draw_slots(form, call, rng), draw_slots(form, call, rng)  # of tokens and of sampled rows
    listed = mappings[op == "logits"]
    slots = torch.tensor(listed + [-1] * call.pad * form.wrapper, device=DEVICE)
    a, b = (side[:1] if op in ("logits", "embedding") else side for side in (layer.a, layer.b))
    add = call.add or op == "logits" or (op == "shrink" and form.wrapper)
    low, two = op in ("expand", "embedding"), op in ("linear", "logits")
    bare, in_fp8 = (slots < 0)[:, None], bool(form.fp8) and form.w8a8 and op != "embedding"
    values = layer.normal(*((len(b), len(slots), form.rank) if low else (len(slots), form.k)))
    dead = bare.expand(values.shape)
    if low and layer.ranks is not None:
        dead = dead | (NUMBERS[: form.rank] >= layer.ranks[: len(b), slots.clamp(min=0), None])
    inside = two and form.wrapper and call.wide  # the op quantises x
    dtype = torch.float32 if low and call.wide else form.dtype
    x, x_scale, real = layer.activations(values, dtype, dead, in_fp8 and not inside)
    want, bound = real, SUMMED * real.abs()
    if not low:
        bound = (1.1 * ROUNDING[E4M3] if in_fp8 and inside else SUMMED) * abs(call.scale) * real.abs()
        want = torch.stack([call.scale * products(real, one[2], slots) for one in a])
        bound = torch.stack([products(bound, one[2].abs(), slots) for one in a])
    start = form.offset if op == "expand" else 0
    if op == "shrink":
        touched = (~bare if add or max(listed) < 0 else torch.ones_like(bare)).expand(want.shape)
        y = Output(layer.normal(*want.shape).to(form.low), touched, add, "y" in form.off)
    else:
        out = form.out or form.dtype
        product = E4M3 if in_fp8 and two else max(form.dtype, out if form.fp8 else form.dtype, key=ROUNDING.get)
        bound += 1.1 * ROUNDING[product] * want.abs()  # h is rounded
        want, bound, touched = (
            torch.nn.functional.pad(torch.cat(parts, 1), (start, form.spare))
            for parts in (
                [products(h, one[2], slots) for h, one in zip(want, b, strict=True)],
                [products(h, one[2].abs(), slots) for h, one in zip(bound, b, strict=True)],
                [~bare.expand(-1, one[2].shape[1]) for one in b],
            )
        )
        layout = "gaps" if form.spare == 5 else "rows"
        y = Output(layer.normal(*want.shape).to(out), touched, add, "y" in form.off, layout)
    given = {} if layer.ranks is None else {"lora_ranks": layer.ranks[: len(b)]}
    how = (start, add, given, layer.mode | {"use_fp8_w8a8": in_fp8})
    (of_wrapper if form.wrapper else of_tensors)(layer, call, mappings, (x, x_scale, y.view), (a, b), how)
    return y.fault(want + y.old, bound)


@functools.cache
def wrapper_of(slots: int, invariant: bool) -> Any:
    config = LoRAConfig(max_loras=slots, batch_invariant=invariant)
    return PunicaWrapperGPU(MOST_ROWS, MOST_ROWS, DEVICE, lora_config=config)


def in_step(form: SimpleNamespace, *mappings: Sequence[int]) -> Any:
    """A wrapper in the step of these slots, of tokens and of sampled rows."""
    wrapper, ids = wrapper_of(form.slots, form.invariant), [[slot + 1 for slot in slots] for slots in mappings]
    wrapper.update_metadata(LoRAMapping(*ids), list(range(1, form.slots + 1)), form.slots + 1, 100)
    return wrapper


def of_wrapper(layer: Layer, call: Any, mappings: tuple, operands: tuple, sides: tuple, how: tuple) -> None:
    form, op, scale, wrapper = layer.form, call.op, call.scale, in_step(layer.form, *mappings)
    (x, x_scale, y), (start, add, given, scheme) = operands, how
    (a, a_scale), (b, b_scale) = ([tuple(one[i] for one in side) for i in (0, 1)] for side in sides)
    if form.fp8:
        given |= {"lora_b_scale": b_scale, "quant_args": scheme}
        given |= {} if op == "embedding" else {"lora_a_scale": a_scale, "a_scale": x_scale}
    if call.nested:
        x, y = x if x.ndim > 2 else x[None], y if y.ndim > 2 else y[None]
    widths, parts = [one[2].shape[1] for one in sides[1]], tuple if call.parts else torch.Tensor
    {
        "shrink": lambda: wrapper.add_shrink(parts(y), x, a, scale, **given),
        "expand": lambda: wrapper.add_expand(y, parts(x), b, widths, start, add, **given),
        "linear": lambda: wrapper.add_lora_linear(y, x, a, b, scale, widths, add_inputs=add, **given),
        "embedding": lambda: wrapper.add_lora_embedding(y, x[0], b[0], add, **given),
        "logits": lambda: wrapper.add_lora_logits(y, x, a[0], b[0], scale, **given),
    }[op]()


def of_tensors(layer: Layer, call: Any, mappings: tuple, operands: tuple, sides: tuple, how: tuple) -> None:
    (x, x_scale, y), (start, add, given, scheme) = operands, how
    (a, a_scale), (b, b_scale) = ([[one[i] for one in side] for i in (0, 1)] for side in sides)
    layer.meta.prepare_tensors(torch.tensor(mappings[0]))
    *step, count = layer.meta.meta_args(call.rows, True)
    given["num_active_loras"] = {"tensor": count, "number": int(count), "all": None}[call.count]
    given["batch_invariant"], fp8 = layer.form.invariant, "_fp8" if layer.form.fp8 else ""
    if fp8 and call.op == "linear":
        given |= {"lora_a_scale": a_scale, "lora_b_scale": b_scale, "a_scale": x_scale}
        given["schemes"] = [int(field) for field in Scheme.of(scheme)] * 2
    elif fp8:
        given |= {"b_scale": a_scale if call.op == "shrink" else b_scale, "a_scale": x_scale, **scheme}
    shrink, expand = (getattr(triton_ops, f"lora_{op}{fp8}") for op in ("shrink", "expand"))
    {
        "shrink": lambda: shrink(x, a, y, *step, scaling=call.scale, accumulate=add, **given),
        "expand": lambda: expand(x, b, y, *step, offset_start=start, add_inputs=add, **given),
        "linear": lambda: triton_ops.lora_linear(y, x, a, b, *step, call.scale, add_inputs=add, **given),
    }[call.op]()


def call_experts(form: SimpleNamespace, call: SimpleNamespace, rng: Random) -> str:
    slots, by_numbers = draw_slots(form, call, rng), call.op == "experts by numbers" or not form.wrapper
    case = Case(
        len(slots), min(form.top_k, form.experts), form.experts, form.slots, form.rank, form.k, form.widths[0],
        form.slices, form.dtype, form.down, call.add, form.offset if by_numbers else 0, call.parts and by_numbers,
        form.blocks, (rng.randrange(form.slots),) if call.nested else (), tuple(slots), call.number,
        tuple(form.ranks[0]) if form.true_ranks else None, form.scheme if form.fp8 else None, form.fp8 or E4M3,
        form.fp8 is not None and form.w8a8,
    )  # fmt: skip
    world = World(case, DEVICE)
    world.x = placed(world.x, "x" in form.off, form.layout)[0]
    for side in (world.a, world.b):
        side[:] = [placed(one.flatten(0, 1), "weights" in form.off)[0].view(one.shape) for one in side]
    touched = torch.zeros_like(world.y, dtype=torch.bool)
    for t, j, _, _ in world.used():
        touched[t, j, case.offset :][: case.slices * case.width] = True
    y = Output(world.y, touched, call.add, "y" in form.off)
    (experts_of_wrapper if form.wrapper else experts_of_tensors)(form, call, world, y.view)
    size = world.expected[touched & (world.expected != 0)].square().mean().sqrt().nan_to_num()
    # of FP8, what x, A and B stand for is rounded to the output's dtype: two or three roundings more
    limit = 1e-4 + (12 if form.fp8 else 8) * ROUNDING[form.dtype]
    return y.fault(world.expected, limit * (size + world.expected.abs()))


def experts_of_tensors(form: SimpleNamespace, call: SimpleNamespace, world: World, y: Tensor) -> None:
    case, fp8, rest = world.case, world.scheme, {"lora_ranks": world.ranks if world.case.ranks else None}
    given = world.given(triton_ops.moe_lora_align_block_size)._replace(output=y)
    count = {"tensor": torch.tensor([case.slots]), "number": case.slots, "all": None}[call.count]
    sizes = (case.rank, case.top_k, given.lora_ids, count, given.enabled, *form.numbers, *form.numbers)
    if fp8 is None:
        triton_ops.fused_moe_lora(*given[:9], *sizes, *world.switches, **rest)
        return
    scales = (world.a_scale, world.b_scale, world.x_scale, None, case.down, False, case.offset)
    scheme = (case.w8a8, fp8.per_channel_quant, [fp8.group_n, fp8.group_k] if fp8.group_k else None)
    triton_ops.fused_moe_lora_fp8(*given[:9], *sizes, *scales, *scheme, case.add_inputs, **rest)


def experts_of_wrapper(form: SimpleNamespace, call: SimpleNamespace, world: World, y: Tensor) -> None:
    case, more = world.case, {"add_inputs": world.case.add_inputs}
    wrapper = in_step(form, *[case.mapping or ()] * 2)
    pairs = (case.tokens, case.block, case.experts, case.slots, world.enabled, None, True, case.naive)
    mapping, *aligned = wrapper.moe_lora_align_block_size(world.topk_ids, *pairs)
    if call.op == "experts by numbers":
        blocks = dict(zip(DEFAULTS, form.numbers, strict=True))
        switches = {"mul_routed_weight": case.down, "offset": case.offset, "token_lora_mapping": mapping}
        ranks = (case.rank, case.top_k, blocks, blocks, world.enabled)
        operands = (y, world.x, tuple(world.a), tuple(world.b), world.weights)
        wrapper.add_lora_fused_moe(*operands, *aligned, *ranks, **switches, **keywords(world) | more)
    elif case.down:
        add_w2(wrapper, world, y, (*aligned, mapping), **more)
    else:
        add_w13(wrapper, world, y, **more)


def call_alignment(form: SimpleNamespace, call: SimpleNamespace, rng: Random) -> str:
    """Against the operator of torch, with ids of experts that are elsewhere or nowhere."""
    slots, experts, block = draw_slots(form, call, rng), 8 * form.experts, form.blocks
    ids = torch.tensor([[rng.randint(-1, experts) for _ in range(form.top_k)] for _ in slots])
    local = rng.sample([*range(form.experts), *[-1] * (experts - form.experts)], experts)
    lists = ([rng.choice((1, 1, 0)) for _ in range(form.slots)] + [0], sorted({*slots}), local)
    blocks = -(-(ids.numel() + experts * (block - 1)) // block)
    sizes, results = (experts, block, form.slots, blocks * block, blocks), []
    for op, device in ((moe_torch, "cpu"), (triton_ops, DEVICE)):
        mapping, *there = (torch.tensor(one, dtype=torch.int32, device=device) for one in (slots, *lists))
        outputs = [torch.full((form.slots * n,), -9).int().to(device) for n in (blocks * block, blocks, 1)]
        op.moe_lora_align_block_size(ids.to(device), mapping, *sizes, *outputs, *there[: 2 + call.add])
        results.append([one.tolist() for one in outputs])
    same = [one == other for one, other in zip(*results, strict=True)]
    return "" if all(same) else f"sorted ids, experts and counts equal those of torch: {same}"


def main(first: int, count: int, seed: int) -> None:
    made, form, layer = -1, SimpleNamespace(), None
    for number in range(first, first + count):
        if number // PER_FORM != made:
            made, layer = number // PER_FORM, None
            form = draw_form(made, seed)
        rng = Random(f"call {number} {seed}")
        call = drawn(CALL, rng)
        ops = ["shrink", "expand", "linear"] + ["embedding", "logits"] * form.wrapper
        call.op = rng.choice(["experts", "experts by numbers", "alignment"] if form.of_experts else ops)
        call.rows, call.number = rng.choice(form.rows), number
        print(f"call {number}: {vars(call)} of {vars(form)}", flush=True)
        if os.environ.get("RANDOM_CALLS_END") == str(number):
            os._exit(9)  # for a test of the test
        try:
            if form.of_experts:
                fault = (call_alignment if call.op == "alignment" else call_experts)(form, call, rng)
            else:
                layer = layer or Layer(form)
                layer.generator.manual_seed(number)
                fault = call_dense(layer, call, rng)
        except Exception:
            fault = traceback.format_exc()[-1500:]
        if fault:
            print(f"failed call {number}: {json.dumps(fault)}", flush=True)
        if not SMALL:
            torch.cuda.synchronize()  # raises where the context is dead


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
