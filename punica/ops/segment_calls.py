"""What a shrink or expand works out once per plan and set of weights, and then repeats.

A model calls the operators with the same plan and the same stacked weights in step after step: only the activations are
new. Checking the operands and cutting the weights by segment costs as much as the products of a small batch, so a
`PreparedCall` keeps the outcome and the plan keeps the prepared calls. A call that is found again only compares shapes
and dtypes.

Weights may change *in place* at any time (an adapter loaded into a slot): prepared calls hold views, never values. True
ranks are values, so each call compares them. A weight tensor that gets other memory or another shape (``w.data = ...``,
``w.t_()``) is recognised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from punica.metadata.segment_plan import Run, SegmentPlan
from punica.ops.checks import weights_3d
from punica.ops.segment_gemm import Multiply, choose

# Prepared shrinks and prepared expands per plan; the oldest is dropped first. Llama-70B has 80 layers of 4 packed
# projections: 320 of each.
KEPT_CALLS = 512


class Product(NamedTuple):
    """One run, with its weights cut out of the stack; ``block`` is the number of its rows' block in the slice."""

    block: int
    segments: int
    length: int
    rank: int | None
    multiply: Multiply
    weight: Tensor


class Slice(NamedTuple):
    """The products of one slice, and how many rows each block has: the blocks of the products and those between them.

    The rows are cut into all blocks by one call, which is faster than one call per product.
    """

    blocks: tuple[int, ...]
    products: tuple[Product, ...]


@dataclass(slots=True)
class PreparedCall:
    """A validated call, found again under the id of its first weight.

    Attributes:
        weights: as the caller gave them; holding them keeps their ids and addresses from being reused.
        layouts: where the memory of each weight lies, and how.
        x_shape, x_dtype, out_shape, out_dtype, device: of the other operands.
        offset: first column written (0 for a shrink).
        ranks: ``lora_ranks`` as nested lists, or None.
        rows: of the plan, see `SegmentPlan`.
        slices: the products of each slice, and their rows.
        covers: whether the products write all rows and all lanes of the output of a shrink.
        partner: of a shrink, the expand that it was last checked to go with.
        only: set when one product takes all of ``x``'s and ``out``'s rows and columns, in a call of one slice.
    """

    weights: tuple[Tensor, ...]
    layouts: list[tuple]
    x_shape: torch.Size
    x_dtype: torch.dtype
    out_shape: torch.Size
    out_dtype: torch.dtype
    device: torch.device
    offset: int
    ranks: list[list[int]] | None
    rows: Tensor | None
    slices: list[Slice]
    covers: bool
    only: Product | None
    partner: PreparedCall | None = None

    def repeats(
        self, x: Tensor, weights: Sequence[Tensor], out: Tensor, offset: int, lora_ranks: Tensor | None
    ) -> bool:
        """Whether a call with these operands needs neither checks nor cuts. Ranks are compared by value."""
        return (
            x.shape == self.x_shape
            and x.dtype is self.x_dtype
            and out.shape == self.out_shape
            and out.dtype is self.out_dtype
            and offset == self.offset
            and x.device == out.device == self.device
            and len(weights) == len(self.weights)
            and weights[0] is self.weights[0]
            and weights[0].data_ptr() == self.layouts[0][0]
            and weights[0].shape == self.layouts[0][1]
            and weights[0].stride() == self.layouts[0][2]
            and (len(weights) == 1 or self._same_weights(weights))
            and (self.ranks is None if lora_ranks is None else self._same_ranks(lora_ranks))
        )

    def _same_weights(self, weights: Sequence[Tensor]) -> bool:
        known = zip(weights, self.weights, self.layouts, strict=True)
        return all(mine is kept and _layout(mine) == layout for mine, kept, layout in known)

    def _same_ranks(self, lora_ranks: Tensor) -> bool:
        known = isinstance(lora_ranks, Tensor) and lora_ranks.dtype == torch.int32
        return known and lora_ranks.tolist() == self.ranks


def _layout(weight: Tensor) -> tuple:
    """Where the memory of a weight lies, and how."""
    return weight.data_ptr(), weight.shape, weight.stride()


def prepare(
    plan: SegmentPlan, x: Tensor, weights: Sequence[Tensor], out: Tensor, lora_ranks: Tensor | None,
    *,
    rank_dim: int,
    offset: int = 0,
) -> PreparedCall:  # fmt: skip
    """Cut the products of a call whose operands were checked, and keep them in the plan.

    Args:
        weights: one per slice, ``[L, (1,) out, in]``; ``rank_dim`` is where they have their rank: -2 in A (shrink), -1
            in B (expand).
        lora_ranks: true rank per slice and slot, int32 ``[n, L]``; None for the full width.

    Raises:
        ValueError: a slot in use is beyond the weights, or a rank in use negative or above their width. Nothing is kept
            then.
    """
    if plan.max_slot >= weights[0].shape[0]:
        raise ValueError(f"the step uses slot {plan.max_slot}; the weights have slots 0 to {weights[0].shape[0] - 1}")
    rows, columns = out.shape[-2:]
    product_rows = rows if plan.rows is None else plan.rows.shape[0]
    stacks = [weights_3d(weight, "weights") for weight in weights]
    ranks = None if lora_ranks is None else lora_ranks.tolist()
    slices = [
        _cut_slice(plan, stack, None if ranks is None else ranks[i], rank_dim, product_rows, out.dtype, x.dtype)
        for i, stack in enumerate(stacks)
    ]
    full_rank = all(product.rank is None for one in slices for product in one.products)
    only = None
    if len(slices) == len(slices[0].blocks) == len(slices[0].products) == 1 and full_rank and plan.rows is None:
        (product,) = slices[0].products
        only = product if product.segments == 1 and stacks[0].shape[1] == columns else None
    call = PreparedCall(
        weights=tuple(weights),
        layouts=[_layout(weight) for weight in weights],
        x_shape=x.shape,
        x_dtype=x.dtype,
        out_shape=out.shape,
        out_dtype=out.dtype,
        device=out.device,
        offset=offset,
        ranks=ranks,
        rows=plan.rows,
        slices=slices,
        covers=full_rank and plan.all_active and plan.num_tokens == rows,
        only=only,
    )
    calls = plan.shrinks if rank_dim == -2 else plan.expands
    key = id(weights[0])
    if key not in calls and len(calls) >= KEPT_CALLS:
        del calls[next(iter(calls))]
    calls[key] = call
    return call


def _cut_slice(
    plan: SegmentPlan, stack: Tensor, ranks: list[int] | None,
    rank_dim: int, rows: int,
    out_dtype: torch.dtype, x_dtype: torch.dtype,
) -> Slice:  # fmt: skip
    """The products of one slice on ``rows`` rows; a run whose adapters differ in rank is cut where the rank changes."""
    blocks: list[int] = []
    products: list[Product] = []
    done = 0
    for slot, start, segments, length, rank in (
        plan.runs if ranks is None else _cut_by_rank(plan.runs, ranks, stack.shape[rank_dim])
    ):
        if start > done:
            blocks.append(start - done)
        w = stack.narrow(0, slot, segments)
        if rank is not None:
            w = w.narrow(rank_dim, 0, rank)
        multiply, operand = choose(out_dtype, x_dtype, w, length)
        products.append(Product(len(blocks), segments, length, rank, multiply, operand))
        blocks.append(segments * length)
        done = start + segments * length
    if rows > done:
        blocks.append(rows - done)
    return Slice(tuple(blocks), tuple(products))


def _cut_by_rank(runs: tuple[Run, ...], ranks: list[int], width: int) -> tuple[Run, ...]:
    pieces: list[Run] = []
    for run in runs:
        done = 0
        for rank, members in groupby(ranks[run.slot : run.slot + run.segments]):
            if not 0 <= rank <= width:
                raise ValueError(f"lora_ranks holds {rank} for slot {run.slot + done}; expected 0 to {width}")
            count = len(list(members))
            true_rank = rank if rank < width else None
            pieces.append(Run(run.slot + done, run.start + done * run.length, count, run.length, true_rank))
            done += count
    return tuple(pieces)


def multiply_products(out: Tensor, x: Tensor, part: Slice, alpha: float, beta: float, rank_of_out: bool) -> None:
    """All products of one slice, in place: ``out [T, N]``, ``x [T, K]``. The rank is N (``rank_of_out``) or K."""
    blocks, products = part
    out_blocks, x_blocks = out.split_with_sizes(blocks), x.split_with_sizes(blocks)
    for block, segments, length, rank, multiply, weight in products:
        out_rows, x_rows = out_blocks[block], x_blocks[block]
        if rank is not None:
            if rank_of_out:
                out_rows = out_rows.narrow(1, 0, rank)
            else:
                x_rows = x_rows.narrow(1, 0, rank)
        if segments != 1:
            out_rows = out_rows.view(segments, length, out_rows.shape[1])
            x_rows = x_rows.view(segments, length, x_rows.shape[1])
        multiply(out_rows, x_rows, weight, alpha, beta)
