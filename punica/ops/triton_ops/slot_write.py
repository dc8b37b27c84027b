"""Spreading a slot image over the stacked buffers of a whole model: one launch per adapter that becomes active.

    slots_m[index, i, j] = image_m[i, j]  where i < r_m and j < c_m, else 0          for every matrix m of the slot
    ranks_m[index]       = rank_m

Which buffers there are never changes, so their addresses, strides and shapes lie in a table on the device
(:class:`SlotTable`), beside a list of tiles: program p fills tile ``tiles[p] = (m, k)``, the k-th piece of ``BLOCK``
elements of matrix m. What the adapter brings (offset, rows, columns, rank) is read from the image's own header, so the
host passes three pointers and one number, whatever the model. The kernel moves each byte once through device memory,
which takes a small part of the time that the link took to bring it.

The buffers are reached through raw addresses, so this is a plain function and no torch custom op: no schema could say
what it writes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.slot_image import ALIGNMENT, HEADER
from punica.ops.triton_ops.launch import Launch, all_aligned, cdiv, on_device

__all__ = ["SlotTable", "write_slot"]

BLOCK = 4096
_COLUMNS = 4  # of the table: address, elements of a slot, columns, address of the ranks


class SlotTable:
    """Where the matrices of a slot lie. ``slots[m]``: ``[L, ..., rows, cols]``; ``ranks[m]``: int32 ``[L]``.

    The tensors must stay where they are: their addresses are kept (and the tensors with them). ValueError: no matrix,
    or not all of one dtype, device and number of slots, or not contiguous; TypeError: ranks that are not int32.
    """

    def __init__(self, slots: Sequence[Tensor], ranks: Sequence[Tensor]) -> None:
        _check(slots, ranks)
        self.slots, self.ranks = tuple(slots), tuple(ranks)
        self.dtype, self.device, self.num_slots = slots[0].dtype, slots[0].device, slots[0].shape[0]
        rows: list[tuple[int, ...]] = []
        tiles: list[tuple[int, int]] = []
        for m, (stacked, live) in enumerate(zip(slots, ranks, strict=True)):
            elements, width = stacked[0].numel(), stacked.shape[-1]
            rows.append((stacked.data_ptr(), elements, width, live.data_ptr()))
            tiles += [(m, k) for k in range(cdiv(elements, BLOCK))]
        aligned = all(row[0] % ALIGNMENT == 0 and row[1] * self.dtype.itemsize % ALIGNMENT == 0 for row in rows)
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self.tiles = torch.tensor(tiles, dtype=torch.int32).to(self.device)
        constants = (BLOCK, HEADER, _COLUMNS, ALIGNMENT // self.dtype.itemsize, aligned)
        self.launch = Launch(_slot_write_kernel, (len(tiles), 1, 1), (), constants, num_warps=4, pdl=False)

    def __len__(self) -> int:
        return len(self.slots)


def _check(slots: Sequence[Tensor], ranks: Sequence[Tensor]) -> None:
    if not slots or len(slots) != len(ranks):
        raise ValueError(f"slots and ranks need one entry per matrix, got {len(slots)} and {len(ranks)}")
    first = (slots[0].dtype, slots[0].device, slots[0].shape[0])
    for m, (stacked, live) in enumerate(zip(slots, ranks, strict=True)):
        if (stacked.dtype, stacked.device, stacked.shape[0]) != first:
            raise ValueError(
                f"all slots must share dtype, device and number, {first}; slots[{m}] is {stacked.dtype} on "
                f"{stacked.device} with {stacked.shape[0]} slots"
            )
        if not stacked.is_contiguous() or not live.is_contiguous():
            raise ValueError(f"slots[{m}] and ranks[{m}] must be contiguous, got strides {stacked.stride()}")
        if live.dtype != torch.int32:
            raise TypeError(f"ranks[{m}] must be int32, got {live.dtype}")
        if live.shape != (first[2],) or live.device != first[1]:
            raise ValueError(f"ranks[{m}] must be [{first[2]}] on {first[1]}, got {tuple(live.shape)} on {live.device}")


@triton.jit(do_not_specialize=["index"])
def _slot_write_kernel(
    image_ptr,
    data_ptr,
    table_ptr,
    tiles_ptr,
    index,
    BLOCK: tl.constexpr,
    HEADER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    matrix = tl.load(tiles_ptr + 2 * pid).to(tl.int64)
    tile = tl.load(tiles_ptr + 2 * pid + 1)
    row = table_ptr + matrix * COLUMNS
    slot_size = tl.load(row + 1)
    if ALIGNED:
        slot_size = tl.multiple_of(slot_size, PER_UNIT)
    cols = tl.load(row + 2).to(tl.int32)
    head = image_ptr + matrix * HEADER
    part_ptr = data_ptr + tl.load(head) * PER_UNIT
    part_rows = tl.load(head + 1).to(tl.int32)
    part_cols = tl.load(head + 2).to(tl.int32)
    target_ptr = tl.load(row).to(tl.pointer_type(data_ptr.dtype.element_ty)) + index * slot_size
    if ALIGNED:
        target_ptr = tl.multiple_of(target_ptr, 16)

    offs = tile * BLOCK + tl.arange(0, BLOCK)
    inside = offs < slot_size
    if part_cols == cols:  # rows of equal length: both sides are one run of elements, filled up to 16 bytes with zeros
        run = tl.cdiv(part_rows * part_cols, PER_UNIT) * PER_UNIT
        values = tl.load(part_ptr + offs, mask=inside & (offs < run), other=0.0)
    else:
        i = offs // cols
        j = offs % cols
        live = inside & (i < part_rows) & (j < part_cols)
        values = tl.load(part_ptr + i * part_cols + j, mask=live, other=0.0)
    tl.store(target_ptr + offs, values, mask=inside)
    if tile == 0:
        ranks_ptr = tl.load(row + 3).to(tl.pointer_type(tl.int32))
        tl.store(ranks_ptr + index, tl.load(head + 3).to(tl.int32))


def write_slot(image: Tensor, table: SlotTable, index: int) -> None:
    """Replace slot ``index`` on all layers of ``table`` by ``image`` (uint8, on the table's device), asynchronously on
    the current stream.

    ValueError: an index out of range, or an image on another device.
    """
    if not 0 <= index < table.num_slots:
        raise ValueError(f"index must be a slot in [0, {table.num_slots}), got {index}")
    if image.device != table.device:
        raise ValueError(f"image is on {image.device}, the slots are on {table.device}; copy it there first")
    with on_device(image.get_device()):
        tensors = (image.view(torch.int64), image.view(table.dtype), table.table, table.tiles)
        table.launch(tensors, (index,), all_aligned(image))
