"""Matrices that were read at once, in one block of memory: scaling and turning them takes one operation each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from punica.ops.pages import Pages
from punica.ops.slot_image import copy_matrices


class Shaped(Protocol):
    """Entry of a tensor."""

    @property
    def shape(self) -> torch.Size:
        """Its shape."""


Entry = TypeVar("Entry", bound=Shaped)


class Form(NamedTuple):
    """Common form of the tensors of a block. Those that are scaled have one number of columns."""

    is_b: bool
    scaling: float | None = None
    columns: int = 0


def alike(
    run: Iterable[tuple[str, Entry]], scalings: Mapping[str, float], is_b: Callable[[str], bool]
) -> dict[Form, list[tuple[str, Entry]]]:
    """Group named tensors by their form. A's are apart from B's also unscaled: a B that is scaled later drops its
    memory.
    """
    forms: dict[Form, list[tuple[str, Entry]]] = {}
    for key, entry in run:
        form = Form(is_b(key))
        if key in scalings:
            form = form._replace(scaling=scalings[key], columns=entry.shape[-1])
        forms.setdefault(form, []).append((key, entry))
    return forms


def new_block(numel: int, dtype: torch.dtype) -> Tensor:
    """Return memory for `numel` elements."""
    size = numel * dtype.itemsize
    return Pages.of(size).tensor(size).view(dtype)


def split(block: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """View a block as tensors, one after the other."""
    pieces = block.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def split_scaled(block: Tensor, shapes: Sequence[torch.Size], scaling: float) -> list[Tensor]:
    """Scale a block of B's with one number of columns in place; return views of a copy that holds them as slots do,
    rank after rank.
    """
    if scaling != 1:
        block *= scaling  # torch computes products of half precision in float32
    columns = shapes[0][-1]
    turned = new_block(block.numel(), block.dtype).view(columns, -1)
    copy_matrices([turned], [block.view(-1, columns).T])
    pieces = turned.split([shape[:-1].numel() for shape in shapes], 1)
    return [piece.T.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
