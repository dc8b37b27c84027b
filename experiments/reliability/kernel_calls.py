"""Calls of every Triton kernel on small ragged operands, for a tool that watches kernels to run.

    python -m experiments.reliability.kernel_calls cuda         prints the name of each kernel that it launched

Operands are copied from the host, so that all of them count as initialised whichever kernels a tool watches. Results
are new memory and are never read. A process that does not launch all kernels of the package fails.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from punica.metadata import LoRABatch, RowGroups
from punica.ops import triton_ops
from punica.ops.experts import Experts, Switches
from punica.ops.fp8_checks import Scheme
from punica.ops.heads import HeadNorms
from punica.ops.interface import Beside
from punica.ops.quant import E4M3, quantize_per_channel
from punica.ops.slot_image import SlotMatrix, pack_image
from punica.ops.triton_ops import Options, TritonOps, backbone, moe_lora_align_block_size
from punica.ops.triton_ops.launch import Launch
from punica.ops.triton_ops.moe_gemm import PairGroups
from punica.ops.triton_ops.moe_ops import TritonExpertOps
from punica.ops.triton_ops.slot_write import SlotTable, write_slot
from punica.ops.weights import LoRAWeights

LAUNCHED = "launched "
"""In front of a kernel's name, on a line of its own."""
FP16 = torch.float16
SLOTS, RANK, SCALE, WIDTHS = 4, 5, 0.5, (40, 33)
COLUMNS = 600
"""Of x: no multiple of a block, and enough for a base product that is cut into two parts."""
DECODE = (3, 0, -1, 1, 2, 0, 3)
PROMPTS = (0,) * 33 + (-1,) * 2 + (2,) + (1,) * 18
EXPERTS, TOP_K, BLOCK = 3, 2, 16
HEADS, KV_HEADS, HEAD_SIZE, PAGE = 3, 1, 40, 7


class Memory:
    """Tensors on a device, each as large as it says."""

    def __init__(self, device: str) -> None:
        self.device = device

    def normal(self, *shape: int) -> Tensor:
        """Draw float16 numbers."""
        return torch.randn(shape).to(FP16).to(self.device)

    def new(self, *shape: int, dtype: torch.dtype = FP16) -> Tensor:
        """Allocate without initialising."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def whole(self, numbers: Iterable, dtype: torch.dtype = torch.int32) -> Tensor:
        """Copy integers."""
        return torch.tensor(np.array([*numbers]), dtype=dtype).to(self.device)


def dense(on: Memory) -> None:
    """Call shrink and expand, alone, together and beside a base product; the second step has a segment of one row."""
    ops, (a, b) = TritonOps(), _factors()
    weights = LoRAWeights.of([one.to(on.device) for one in a], [one.to(on.device) for one in b])
    base = on.normal(sum(WIDTHS), COLUMNS), on.normal(sum(WIDTHS))
    for slots in (DECODE, PROMPTS):
        step, x = _step(on, slots), on.normal(len(slots), COLUMNS)
        low = on.new(len(WIDTHS), len(slots), RANK, dtype=torch.float32)
        ops.shrink(low, x, weights.a, step, SCALE)
        ops.expand(on.normal(len(slots), sum(WIDTHS)), low, weights.b, step)
        ops.linear(on.normal(len(slots), sum(WIDTHS)), x, weights, step, SCALE)
        ops.linear(on.new(len(slots), sum(WIDTHS)), x, weights, step, SCALE, beside=Beside(base=base))


def fp8(on: Memory) -> None:
    """Call shrink and expand with weights in FP8, of activations in float16 and in FP8."""
    quantized = [[quantize_per_channel(one.float()) for one in factor] for factor in _factors()]
    values, scales = ([[pair[i].to(on.device) for pair in factor] for factor in quantized] for i in (0, 1))
    for w8a8 in (False, True):
        scheme = Scheme(use_fp8_w8a8=w8a8, per_channel_quant=True)
        weights = LoRAWeights.of(*values, None, tuple(scales), (scheme, scheme))  # type: ignore[arg-type]
        for slots in (DECODE, PROMPTS):
            x, y = on.normal(len(slots), COLUMNS), on.normal(len(slots), sum(WIDTHS))
            TritonOps().linear(y, x, weights, _step(on, slots), SCALE)


def experts(on: Memory) -> None:
    """Call the base product of experts, and their LoRA with aligned pairs and with unaligned ones."""
    tokens, hidden, width = len(DECODE), 100, 40
    choices = on.whole([(token % EXPERTS, (token + 1) % EXPERTS) for token in range(tokens)], torch.int64)
    x, lead = on.normal(tokens, hidden), (SLOTS, EXPERTS)
    PairGroups(choices, EXPERTS, whole=True).multiply(x, on.normal(EXPERTS, width, hidden), TOP_K)
    mapping, enabled = on.whole(DECODE), on.whole([1] * SLOTS + [0])
    blocks = -(-(tokens * TOP_K + EXPERTS * (BLOCK - 1)) // BLOCK)
    aligned = [on.new(SLOTS, size, dtype=torch.int32) for size in (blocks * BLOCK, blocks)]
    aligned.append(on.new(SLOTS, dtype=torch.int32))
    sizes = (EXPERTS, BLOCK, SLOTS, blocks * BLOCK, blocks)
    moe_lora_align_block_size(choices, mapping, *sizes, *aligned, enabled, None)
    a, b, shares = [on.normal(*lead, RANK, hidden)], [on.normal(*lead, width, RANK)], on.normal(tokens, TOP_K)
    for pairs in (aligned, (None, choices.reshape(-1), None)):
        y = on.normal(tokens, TOP_K, width)
        given = Experts(y, x, a, b, shares, *pairs, mapping, enabled, None)  # type: ignore[arg-type]
        TritonExpertOps(Options()).add(given, RANK, TOP_K, Switches(), None, SLOTS, None)


def attention(on: Memory) -> None:
    """Call RoPE and attention on new caches, of which only rows of tokens are written; the last row is padding."""
    pages, lengths = ((3, 0), (), (4, 1, 2)), (9, 0, 15)
    places = [own[t // PAGE] * PAGE + t % PAGE for own, n in zip(pages, lengths, strict=True) for t in range(n)]
    kv_rows, tokens = on.whole([*places, -1], torch.int64), len(places) + 1
    table = on.whole([own + (2**31 - 1,) * (4 - len(own)) for own in pages])
    cos, sin = (on.new(tokens, 1, HEAD_SIZE // 2) for _ in range(2))
    frequencies = (10000.0 ** (-torch.arange(HEAD_SIZE // 2) / HEAD_SIZE)).to(on.device)
    backbone.rotary_angles(cos, sin, on.whole(range(tokens), torch.int64), frequencies, 1.0)
    norms = HeadNorms(on.normal(HEAD_SIZE), on.normal(HEAD_SIZE), 1e-5)
    for dtype in (FP16, E4M3):
        keys, values = (on.new(5 * PAGE, KV_HEADS, HEAD_SIZE, dtype=dtype) for _ in range(2))
        qkv = on.normal(tokens, HEADS + 2 * KV_HEADS, HEAD_SIZE)
        backbone.rotate_and_store(qkv, cos, sin, kv_rows, keys, values, norms)
        cached = backbone.Pages(table, on.whole(lengths), on.whole([2, 0, 1]), PAGE)
        out, q = on.new(len(lengths), HEADS, HEAD_SIZE), qkv[: len(lengths), :HEADS]
        backbone.decode_attention(out, q, keys, values, cached, splits=2)
    parts, out = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1), on.new(tokens, HEADS, HEAD_SIZE)
    backbone.prompt_attention(out, *parts, on.whole([0, 9, 9, tokens - 1]))


def between(on: Memory) -> None:
    """Call norm, activation and argmax, and projections of one row and of several."""
    for delta in (None, on.normal(3, COLUMNS)):
        backbone.add_rms_norm(on.new(3, COLUMNS), on.normal(3, COLUMNS), delta, on.normal(COLUMNS), 1e-5)
    backbone.swiglu(on.new(3, 1100), on.normal(3, 2200))
    backbone.argmax(on.new(3, dtype=torch.int64), on.normal(3, 9001), -1)
    weight, bias = on.normal(WIDTHS[0], COLUMNS), on.normal(WIDTHS[0])
    for rows in (1, 7):
        backbone.skinny_gemm(on.new(rows, WIDTHS[0]), on.normal(rows, COLUMNS), weight, bias)


def slot(on: Memory) -> None:
    """Write an adapter into a slot: matrices as wide as it, wider, of odd sizes, and without a part of it."""
    shapes = [((8, 64), (8, 64)), ((16, 64), (RANK, 64)), ((65, 7), (65, 3)), ((8, 40), None)]
    parts = [SlotMatrix(None if part is None else torch.randn(part), RANK) for _, part in shapes]
    slots = [on.new(SLOTS, 1, *whole) for whole, _ in shapes]
    table = SlotTable(slots, [on.whole([0] * SLOTS) for _ in shapes])
    write_slot(pack_image(parts, FP16).to(on.device), table, 1)


CALLS: tuple[Callable[[Memory], None], ...] = (dense, fp8, experts, attention, between, slot)


def _factors() -> tuple[list[Tensor], list[Tensor]]:
    """Draw A and B of all slices, on the host."""
    a = [torch.randn(SLOTS, RANK, COLUMNS).to(FP16) for _ in WIDTHS]
    return a, [torch.randn(SLOTS, width, RANK).to(FP16) for width in WIDTHS]


def _step(on: Memory, slots: tuple[int, ...]) -> LoRABatch:
    batch = LoRABatch(len(slots), SLOTS, on.device)
    batch.fill(RowGroups.of_rows(np.array(slots)))
    return batch


def kernels() -> set[str]:
    """Return the names of all kernels of the package."""
    found = pkgutil.walk_packages(triton_ops.__path__, f"{triton_ops.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    return {
        name for module in modules for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, KernelInterface)
    }  # fmt: skip


@contextmanager
def launches() -> Iterator[set[str]]:
    """Collect the names of kernels that are launched."""
    names: set[str] = set()
    call = Launch.__call__

    def noted(launch: Launch, *given: Any, **named: Any) -> None:
        names.add(launch.kernel.__name__)
        call(launch, *given, **named)

    Launch.__call__ = noted  # type: ignore[method-assign]
    try:
        yield names
    finally:
        Launch.__call__ = call  # type: ignore[method-assign]


def main(device: str) -> None:
    """Launch all kernels and print their names; exit with a text where there are others, or too few."""
    torch.manual_seed(0)
    with launches() as names:
        for call in CALLS:
            call(Memory(device))
    if device == "cuda":
        torch.cuda.synchronize()
    for name in sorted(names):
        print(f"{LAUNCHED}{name}", flush=True)
    if names != kernels():
        sys.exit(f"launched and unknown: {sorted(names - kernels())}, known and not launched: "
                 f"{sorted(kernels() - names)}; add a call to {__file__}")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
