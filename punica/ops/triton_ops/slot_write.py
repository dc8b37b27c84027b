"""Filling a slot on all layers of a model from a slot image in host memory: one launch per adapter.

    slots_m[index, i, j] = image_m[i, j]  where i < r_m and j < c_m, else 0          for every matrix m of the slot
    ranks_m[index]       = rank_m

Rows and columns are those of the memory: an adapter of lower rank has fewer rows than its slot, and only where ranks
are columns (the A of an embedding) fewer columns. The kernel reads the image (:mod:`punica.ops.slot_image`) from
page-locked memory through the link, so an adapter moves once. A few programs keep the link busy and leave the other
multiprocessors to the model: on an H200 (PCIe Gen5 x16, 54 GB/s) 32 programs read 40 to 640 MB with 43 to 50 GB/s
(results/h200/sec52_adapter_loading.csv).

Addresses and sizes of the slots are in a table on the device (:class:`SlotTable`), beside a list of tiles. Tile
``(m, k)`` is the k-th piece of ``BLOCK`` elements of matrix m in its slot, and of the adapter's part of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.expect import INT32, expect
from punica.ops.slot_image import ALIGNMENT, HEADER
from punica.ops.triton_ops.launch import Launch, all_aligned, on_device

BLOCK_BYTES = 32768
PROGRAMS = 32
NUM_WARPS = 8
_COLUMNS = 4  # of the table: address, elements of a slot, columns, address of the ranks


class _Schedule(NamedTuple):
    """Constexpr of the kernel: elements of a tile and of a unit, columns of header and table, and alignment."""

    block: int
    unit: int
    aligned: bool
    header: int = HEADER
    columns: int = _COLUMNS


class SlotTable:
    """Addresses and sizes of a slot's matrices. ``slots[m]``: ``[L, ..., rows, cols]``; ``ranks[m]``: int32 ``[L]``.

    The tensors must stay where they are: their addresses are kept (and the tensors with them). ValueError: no matrix,
    or not all on one device, of one number of slots, and contiguous; TypeError: not of one dtype, or ranks not int32.
    """

    def __init__(self, slots: Sequence[Tensor], ranks: Sequence[Tensor]) -> None:
        _check(slots, ranks)
        self.slots, self.ranks = tuple(slots), tuple(ranks)
        self.dtype, self.device, self.num_slots = slots[0].dtype, slots[0].device, slots[0].shape[0]
        block, per_unit = BLOCK_BYTES // self.dtype.itemsize, ALIGNMENT // self.dtype.itemsize
        rows: list[tuple[int, ...]] = []
        tiles: list[tuple[int, int]] = []
        for m, (stacked, live) in enumerate(zip(slots, ranks, strict=True)):
            elements, width = stacked[0].numel(), stacked.shape[-1]
            rows.append((stacked.data_ptr(), elements, width, live.data_ptr()))
            tiles += [(m, k) for k in range(triton.cdiv(elements, block))]
        aligned = all(row[0] % ALIGNMENT == 0 and row[1] % per_unit == 0 for row in rows)
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device="cpu").to(self.device)
        grid = (min(PROGRAMS, len(tiles)), 1, 1)
        constants = {"SCHEDULE": _Schedule(block, per_unit, aligned)}
        self.launch = Launch(
            _slot_write_kernel, grid, (self.dtype,), (), constants, num_warps=NUM_WARPS, pdl=False, device=self.device
        )


def _check(slots: Sequence[Tensor], ranks: Sequence[Tensor]) -> None:
    if not slots or len(slots) != len(ranks):
        raise ValueError(f"slots and ranks need one entry per matrix, got {len(slots)} and {len(ranks)}")
    dtype, device, sizes = (slots[0].dtype,), slots[0].device, {"L": slots[0].shape[0], "of L": "slots[0]"}
    for m, (stacked, live) in enumerate(zip(slots, ranks, strict=True)):
        expect(f"slots[{m}]", stacked, dtype=dtype, device=device, contiguous=True)
        expect(f"slots[{m}]", stacked.flatten(1), "L *", sizes=sizes)
        expect(f"ranks[{m}]", live, "L", dtype=INT32, device=device, sizes=sizes, contiguous=True)


@triton.jit
def _write_tile(part, slot, tile, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Write one tile of a slot whose rows are longer than the part's, ``UNIT`` neighbours at a time: all live or all
    zero. part: pointer, rows and columns; slot: pointer, elements and columns.
    """
    part_ptr, part_rows, part_cols = part
    target_ptr, slot_size, cols = slot
    UNITS: tl.constexpr = BLOCK // UNIT
    first = tile * BLOCK + tl.arange(0, UNITS) * UNIT
    lanes = tl.arange(0, UNIT)[None, :]
    width = tl.maximum(part_cols, 1)
    live = tl.broadcast_to((first < part_rows * part_cols)[:, None], (UNITS, UNIT))
    values = tl.load(part_ptr + first[:, None] + lanes, mask=live, other=0.0)
    there = first // width * cols + first % width
    tl.store(target_ptr + there[:, None] + lanes, values, mask=live)
    outside = (first < slot_size) & ((first // cols >= part_rows) | (first % cols >= part_cols))
    zeros = tl.zeros((UNITS, UNIT), target_ptr.dtype.element_ty)
    tl.store(target_ptr + first[:, None] + lanes, zeros, mask=tl.broadcast_to(outside[:, None], (UNITS, UNIT)))


@triton.jit(do_not_specialize=["index", "num_tiles"])
def _slot_write_kernel(
    table_ptr, tiles_ptr, image_ptr, data_ptr,
    index, num_tiles, SCHEDULE: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = SCHEDULE.block
    UNIT: tl.constexpr = SCHEDULE.unit
    for pid in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        matrix = tl.load(tiles_ptr + 2 * pid).to(tl.int64)
        tile = tl.load(tiles_ptr + 2 * pid + 1)
        row = table_ptr + matrix * SCHEDULE.columns
        slot_size = tl.load(row + 1)
        if SCHEDULE.aligned:
            slot_size = tl.multiple_of(slot_size, UNIT)
        cols = tl.load(row + 2).to(tl.int32)
        head = image_ptr + matrix * SCHEDULE.header
        part_ptr = data_ptr + tl.load(head) * UNIT
        part_rows = tl.load(head + 1).to(tl.int32)
        part_cols = tl.load(head + 2).to(tl.int32)
        target_ptr = tl.load(row).to(tl.pointer_type(data_ptr.dtype.element_ty)) + index * slot_size
        if SCHEDULE.aligned:
            target_ptr = tl.multiple_of(target_ptr, 16)

        if part_cols == cols:  # both sides are one run of elements; the image fills it up to whole units, with zeros
            offs = tile * BLOCK + tl.arange(0, BLOCK)
            run = tl.cdiv(part_rows * part_cols, UNIT) * UNIT
            values = tl.load(part_ptr + offs, mask=(offs < slot_size) & (offs < run), other=0.0)
            tl.store(target_ptr + offs, values, mask=offs < slot_size)
        elif SCHEDULE.aligned and (cols % UNIT == 0) and (part_cols % UNIT == 0):
            # products, as the compiler then knows what divides them; tl.multiple_of would promise it on every path
            cols_in_units = cols // UNIT * UNIT
            part_in_units = part_cols // UNIT * UNIT
            part, slot = (part_ptr, part_rows, part_in_units), (target_ptr, slot_size, cols_in_units)
            _write_tile(part, slot, tile, BLOCK, UNIT)
        else:
            _write_tile((part_ptr, part_rows, part_cols), (target_ptr, slot_size, cols), tile, BLOCK, 1)
        if tile == 0:
            ranks_ptr = tl.load(row + 3).to(tl.pointer_type(tl.int32))
            tl.store(ranks_ptr + index, tl.load(head + 3).to(tl.int32))


def write_slot(image: Tensor, table: SlotTable, index: int) -> None:
    """Replace slot ``index`` on all layers by ``image`` (uint8), in page-locked memory or on the device,
    asynchronously; it stays alive and unchanged until the kernel has ended. ValueError: an index out of range, or an
    image elsewhere.
    """
    if not 0 <= index < table.num_slots:
        raise ValueError(f"index must be a slot in [0, {table.num_slots}), got {index}")
    if image.device != table.device and not image.is_pinned():
        raise ValueError(f"image is on {image.device}, the slots on {table.device}; pin its memory, or copy it")
    with on_device(table.table.get_device()):
        tensors = (table.table, table.tiles, image.view(torch.int64), image.view(table.dtype))
        table.launch(tensors, (index, len(table.tiles)), all_aligned(image))
