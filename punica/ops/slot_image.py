"""The slot image: everything that one adapter puts into a slot of a whole model, in one block of bytes.

Copied matrix by matrix, an adapter of a Llama-2 7B costs some 450 host calls. An image is packed when the adapter is
registered, and moves in one launch (`punica.ops.triton_ops.slot_write`). Layout, for M matrices (A and B of every slice
of every layer):

    header  int64 [M, 4]       offset of the matrix in units of 16 bytes, its rows, its columns (no matrix: 0), its rank
    data    the matrices, row by row, each beginning at a multiple of 16 bytes

Matrices are in the order of the slots' memory, A ``[rank, in]`` and B ``[rank, out]``, so that both are the first piece
of their slot. The kernel makes the zeros around a matrix.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from punica.ops.pages import LockedPages
from punica.threads import map_in_threads, thread_count

ALIGNMENT = 16
HEADER = 4


def pack_image(
    matrices: Sequence[tuple[Tensor | None, int]], dtype: torch.dtype, *, pin_memory: bool = False
) -> Tensor:
    """Pack matrices ``[r, c]``, cast to ``dtype``, into an image: uint8 ``[bytes]`` on the CPU, page-locked if asked.
    Each is for the top-left corner of a slot's ``[rows, cols]`` (``None``: all zeros), with its entry in the ranks.
    """
    sizes = [0 if part is None else part.numel() * dtype.itemsize for part, _ in matrices]
    units = [-(-size // ALIGNMENT) for size in (len(matrices) * HEADER * 8, *sizes)]
    offsets = list(itertools.accumulate(units))  # first unit of every matrix, and the end
    size = offsets[-1] * ALIGNMENT
    pages = LockedPages.of(size) if pin_memory else None
    image = torch.empty(size, dtype=torch.uint8, device="cpu") if pages is None else pages.tensor(size)
    header = [
        (0, 0, 0, rank) if part is None else (offset, *part.shape, rank)
        for offset, (part, rank) in zip(offsets[:-1], matrices, strict=True)
    ]
    if header:
        _header(image, len(matrices)).copy_(torch.tensor(header, device="cpu"))
    targets, parts = [], []
    found = image_matrices(image, len(matrices), dtype)
    for target, (part, _), start, end in zip(found, matrices, offsets[:-1], offsets[1:], strict=True):
        if target is not None and part is not None:
            if (gap := start * ALIGNMENT + target.nbytes) < end * ALIGNMENT:  # between it and the next one
                image[gap : end * ALIGNMENT] = 0
            targets.append(target)
            # fetched here: threads have a stream each
            parts.append(part.detach() if part.device.type == "cpu" else part.detach().to("cpu", dtype))
    bounds = [len(targets) * i // thread_count() for i in range(thread_count() + 1)]
    shares = [slice(*share) for share in itertools.pairwise(bounds)]  # two threads would each clear a new page
    map_in_threads(lambda share: copy_matrices(targets[share], parts[share]), shares)
    if pages is not None:
        pages.lock()
    return image


def copy_matrices(targets: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy matrices on the CPU, cast to the targets' dtypes, in one call of torch, during which other threads run.
    Those whose rows are no runs of memory take a call each: numpy turns them in half the time of torch.
    """
    plain: tuple[list[Tensor], list[Tensor]] = ([], [])
    for target, part in zip(targets, parts, strict=True):
        if part.stride(-1) == 1:
            plain[0].append(target)
            plain[1].append(part)
            continue
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.dtype.itemsize]
        np.copyto(target.view(integers).numpy(), part.to(target.dtype).view(integers).numpy())
    if plain[0]:
        torch._foreach_copy_(*plain)


def image_matrices(image: Tensor, count: int, dtype: torch.dtype) -> list[Tensor | None]:
    """Return the ``count`` matrices of an image on the CPU, as views; ``None`` where a slot's matrix is all zeros."""
    data, per_unit = image.view(dtype), ALIGNMENT // dtype.itemsize
    first = data.storage_offset()
    return [
        data.as_strided((rows, cols), (cols, 1), first + offset * per_unit) if offset else None
        for offset, rows, cols, _ in _header(image, count).tolist()
    ]


def _header(image: Tensor, count: int) -> Tensor:
    return image[: count * HEADER * 8].view(torch.int64).view(count, HEADER)
