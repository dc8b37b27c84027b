"""Calls of every Triton kernel on small ragged operands, for a tool that watches kernels to run.

    python -m tests.ops.triton_ops.kernel_calls cuda         prints the name of each kernel that it launched

Operands are copied from the host, so that all of them count as initialised whichever kernels a tool watches. Results
are new memory and are never read. A process that does not launch all kernels of the package fails.
"""

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from punica.metadata import MixedBatch, MixedRows
from punica.ops import triton_ops
from punica.ops.backbone import HeadNorms
from punica.ops.experts import Experts, Switches
from punica.ops.interface import Beside
from punica.ops.quant import E4M3, quantize_per_channel
from punica.ops.scales import Scheme
from punica.ops.slot_image import pack_image
from punica.ops.triton_ops import Options, TritonOps, backbone, moe_lora_align_block_size
from punica.ops.triton_ops.launch import Launch
from punica.ops.triton_ops.moe_align import PairGroups
from punica.ops.triton_ops.moe_ops import TritonExpertOps
from punica.ops.triton_ops.slot_write import SlotTable, write_slot
from punica.ops.weights import LoRAWeights
from tests.ops.helpers import step as step_of

FP16 = torch.float16
SLOTS, RANK, WIDTHS = 4, 5, (40, 33)
COLUMNS = 520
"""Columns of x: no multiple of a block, and enough for a base product that is cut into two parts."""
FEW, MANY = (3, 0, -1, 1, 2, 0, 3), (0,) * 351 + (-1,) * 2 + (2,) + (1,) * 47
"""Slots of rows: few without tensor cores, many in tiles; one of their segments is one row."""
EXPERTS, TOP_K, BLOCK = 3, 2, 16
HEADS, KV_HEADS, SIZE, PAGE = 3, 1, 40, 7


class Memory:
    """Tensors on a device, float16 without a word, each an allocation of its own size."""

    def __init__(self, device: str) -> None:
        self.device = device

    def normal(self, *shape: int) -> Tensor:
        """Draw numbers."""
        return torch.randn(shape).to(FP16).to(self.device)

    def new(self, *shape: int, dtype: torch.dtype = FP16) -> Tensor:
        """Allocate without initialising."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def whole(self, numbers: Sequence, dtype: torch.dtype = torch.int32) -> Tensor:
        """Copy integers."""
        return torch.tensor(numbers, dtype=dtype).to(self.device)


def lora(on: Memory) -> None:
    """Call shrink, expand, gradient and mixtures, beside a base product and with weights in FP8, too."""
    a, b = ([torch.randn(SLOTS, *shape) for shape in shapes]
            for shapes in ([(RANK, COLUMNS)] * len(WIDTHS), [(width, RANK) for width in WIDTHS]))  # fmt: skip
    stored = [[one.to(on.device, FP16) for one in factor] for factor in (a, b)]
    pairs = [[quantize_per_channel(one) for one in factor] for factor in (a, b)]
    values, scales = ([[pair[i].to(on.device) for pair in factor] for factor in pairs] for i in (0, 1))
    schemes = [Scheme(use_fp8_w8a8=w8a8, per_channel_quant=True) for w8a8 in (False, True)]
    fp8 = [LoRAWeights.of(values[0], values[1], None, (scales[0], scales[1]), (one, one)) for one in schemes]
    base = on.normal(sum(WIDTHS), COLUMNS), on.normal(sum(WIDTHS))
    for weights in (LoRAWeights.of(stored[0], stored[1]), *fp8):
        for slots, beside in ((FEW, ()), (MANY, ()), (FEW, base)):
            step = step_of(slots, on.device, SLOTS, len(slots))
            x, y = on.normal(len(slots), COLUMNS), on.normal(len(slots), sum(WIDTHS))
            TritonOps().linear(y, x, weights, step, beside=Beside(base=beside))
            if not weights.a.form.is_fp8:
                low = torch.randn(len(WIDTHS), len(slots), RANK).to(on.device)
                TritonOps().gradient(weights.a, low, x, step)
                mixed = MixedBatch(len(slots), SLOTS, on.device)
                mixed.fill(MixedRows.of_runs(np.array([[2, 0], [-1, -1], [3, -1]]), np.full((3, 2), 0.5), (2, 1, 3)))
                TritonOps().mix(y[:6], x[:6], weights, mixed)


def experts(on: Memory) -> None:
    """Call the base product of experts, and their LoRA with aligned pairs and with others."""
    tokens, hidden, width = len(FEW), 100, 40
    choices = on.whole([(token % EXPERTS, (token + 1) % EXPERTS) for token in range(tokens)], torch.int64)
    x, y = on.normal(tokens, hidden), on.normal(tokens, TOP_K, width)
    PairGroups(choices, EXPERTS, whole=True).multiply(x, on.normal(EXPERTS, width, hidden), TOP_K)
    blocks = -(-(tokens * TOP_K + EXPERTS * (BLOCK - 1)) // BLOCK)
    shapes = ((blocks * BLOCK,), (blocks,), ())
    ids, of_block, counts = (on.new(SLOTS, *shape, dtype=torch.int32) for shape in shapes)
    sizes, of_step = (EXPERTS, BLOCK, SLOTS, blocks * BLOCK, blocks), (on.whole(FEW), on.whole([1] * SLOTS + [0]))
    moe_lora_align_block_size(choices, of_step[0], *sizes, ids, of_block, counts, of_step[1], None)
    weights = [on.normal(SLOTS, EXPERTS, RANK, hidden)], [on.normal(SLOTS, EXPERTS, width, RANK)]
    for rows, places, filled in ((ids, of_block, counts), (None, choices.reshape(-1), None)):
        given = Experts(y, x, *weights, on.normal(tokens, TOP_K), rows, places, filled, *of_step, None)
        TritonExpertOps(Options()).add(given, RANK, TOP_K, Switches(), None, SLOTS, None)


def attention(on: Memory) -> None:
    """Call RoPE and attention on new caches, of which only rows of tokens are written; the last row is padding."""
    pages, lengths = ((3, 0), (), (4, 1, 2)), (9, 0, 15)
    places = [own[t // PAGE] * PAGE + t % PAGE for own, n in zip(pages, lengths, strict=True) for t in range(n)]
    kv_rows, tokens = on.whole([*places, -1], torch.int64), len(places) + 1
    table = on.whole([own + (2**31 - 1,) * (4 - len(own)) for own in pages])
    cached = backbone.Pages(table, on.whole(lengths), on.whole([2, 0, 1]), PAGE)
    cos, sin = (on.new(tokens, 1, SIZE // 2) for _ in range(2))
    frequencies = (10000.0 ** (-torch.arange(SIZE // 2) / SIZE)).to(on.device)
    backbone.rotary_angles(cos, sin, on.whole(range(tokens), torch.int64), frequencies, 1.0)
    qkv = on.normal(tokens, HEADS + 2 * KV_HEADS, SIZE)
    queries, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    for dtype in (FP16, E4M3):
        keys, values = (on.new(5 * PAGE, KV_HEADS, SIZE, dtype=dtype) for _ in range(2))
        norms = HeadNorms(on.normal(SIZE), on.normal(SIZE), 1e-5)
        backbone.rotate_and_store(qkv, cos, sin, kv_rows, keys, values, norms)
        out, q = on.new(len(pages), HEADS, SIZE), queries[: len(pages)]
        backbone.decode_attention(out, q, keys, values, cached, splits=2)
    backbone.prompt_attention(on.new(tokens, HEADS, SIZE), queries, k, v, on.whole([0, 9, 9, len(places)]))


def between(on: Memory) -> None:
    """Call norm, activation and argmax, and projections of one row and of several."""
    for delta in (None, on.normal(3, COLUMNS)):
        backbone.add_rms_norm(on.new(3, COLUMNS), on.normal(3, COLUMNS), delta, on.normal(COLUMNS), 1e-5)
    backbone.swiglu(on.new(3, 1100), on.normal(3, 2200))
    backbone.argmax(on.new(3, dtype=torch.int64), on.normal(3, 9001), -1)
    weight, bias = on.normal(WIDTHS[0], COLUMNS), on.normal(WIDTHS[0])
    products: list[tuple[Tensor, ...]] = [(weight, bias)]
    for columns in (COLUMNS, COLUMNS + 8):  # FP8 is read in words where its rows are whole units of 16 bytes
        stored, scale = (part.to(on.device) for part in quantize_per_channel(torch.randn(WIDTHS[0], columns)))
        products.append((stored, bias, scale))
        backbone.dequantise(on.new(WIDTHS[0], columns), stored, scale)
    for rows in (1, len(FEW)):
        for product in products:
            backbone.skinny_gemm(on.new(rows, WIDTHS[0]), on.normal(rows, product[0].shape[1]), *product)


def slot(on: Memory) -> None:
    """Write an adapter into a slot: matrices as wide as it, wider, of odd sizes, and without a part of it."""
    shapes = [((8, 64), (8, 64)), ((16, 64), (RANK, 64)), ((65, 7), (65, 3)), ((8, 40), None)]
    image = pack_image([(None if part is None else torch.randn(part), RANK) for _, part in shapes], FP16)
    table = SlotTable([on.new(SLOTS, *whole) for whole, _ in shapes], [on.whole([0] * SLOTS) for _ in shapes])
    write_slot(image.to(on.device), table, 1)


CALLS = (lora, experts, attention, between, slot)


def kernels() -> set[str]:
    """Return the names of all kernels of the package."""
    found = pkgutil.walk_packages(triton_ops.__path__, f"{triton_ops.__name__}.")
    members = [item for one in found for item in vars(importlib.import_module(one.name)).items()]
    return {name for name, one in members if name.endswith("_kernel") and isinstance(one, KernelInterface)}


def launched(device: str) -> set[str]:
    """Launch all kernels and return their names."""
    names: set[str] = set()
    call = Launch.__call__

    def noted(launch: Launch, *given: Any, **named: Any) -> None:
        names.add(launch.kernel.__name__)
        call(launch, *given, **named)

    with mock.patch.object(Launch, "__call__", noted):
        for one in CALLS:
            one(Memory(device))
    return names


def main(device: str) -> None:
    """Print the names of the kernels that ran; exit with a text where these are not all kernels, or others."""
    torch.manual_seed(0)
    ran, known = launched(device), kernels()
    if device == "cuda":
        torch.cuda.synchronize()
    print(*sorted(ran), sep="\n", flush=True)
    if ran != known:
        sys.exit(f"not launched: {sorted(known - ran)}, launched and unknown: {sorted(ran - known)}; change {__file__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
