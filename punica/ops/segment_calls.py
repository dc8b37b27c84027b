"""The torch operators' plan of a product: a stack of weights cut by the segments of a step.

A model calls the operators with the same weights in step after step: only the activations are new. Checking the
operands and cutting the weights by segment costs as much as the products of a small batch. So a stack keeps its `Cut`
for the step at hand, by the shapes and dtypes of the operands.

A cut holds views of the weights, never values: a slot may be filled at any time. True ranks are values, so every call
compares them.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from punica.metadata.segment_plan import Run, SegmentPlan
from punica.ops.checks import weights_3d
from punica.ops.segment_gemm import Multiply, choose

Ranks = list[list[int]]


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


class Cut(NamedTuple):
    """A product whose operands were checked.

    Attributes:
        ranks: the true ranks as nested lists, or None.
        rows: of the plan, see `SegmentPlan`.
        slices: the products of each slice, and their rows.
        covers: the products write all rows and all lanes of the output of a shrink.
        only: set when one product takes all of ``x``'s and ``out``'s rows and columns, in a call of one slice.
    """

    ranks: Ranks | None
    rows: Tensor | None
    slices: list[Slice]
    covers: bool
    only: Product | None


def cut(
    plan: SegmentPlan, tensors: tuple[Tensor, ...], rank_dim: int, ranks: Ranks | None, x: Tensor, out: Tensor
) -> Cut:
    """Cut a call, whose operands were checked, into products.

    Args:
        tensors: one per slice, ``[L, (1,) out, in]``; ``rank_dim`` is where they have their rank: -2 in A (shrink), -1
            in B (expand).
        ranks: true rank per slice and slot; None for the full width.

    Raises:
        ValueError: a slot in use is beyond the weights, or a rank in use negative or above their width.
    """
    if plan.max_slot >= tensors[0].shape[0]:
        raise ValueError(f"the step uses slot {plan.max_slot}; the weights have slots 0 to {tensors[0].shape[0] - 1}")
    rows, columns = out.shape[-2:]
    product_rows = rows if plan.rows is None else plan.rows.shape[0]
    stacks = [weights_3d(weight, "weights") for weight in tensors]
    slices = [
        _cut_slice(plan, stack, None if ranks is None else ranks[i], rank_dim, product_rows, out.dtype, x.dtype)
        for i, stack in enumerate(stacks)
    ]
    full_rank = all(product.rank is None for one in slices for product in one.products)
    only = None
    if len(slices) == len(slices[0].blocks) == len(slices[0].products) == 1 and full_rank and plan.rows is None:
        (product,) = slices[0].products
        only = product if product.segments == 1 and stacks[0].shape[1] == columns else None
    return Cut(ranks, plan.rows, slices, full_rank and plan.all_active and plan.num_tokens == rows, only)


def _cut_slice(
    plan: SegmentPlan, stack: Tensor, ranks: list[int] | None,
    rank_dim: int, rows: int,
    out_dtype: torch.dtype, x_dtype: torch.dtype,
) -> Slice:  # fmt: skip
    """Cut one slice into products on ``rows`` rows; a run is also cut where the rank of its adapters changes."""
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
    """Compute the products of a slice in place: ``out [T, N]``, ``x [T, K]``; the rank is N (``rank_of_out``) or K."""
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
