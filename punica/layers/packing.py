"""Packed adapters: fewer (A, B) groups than slices, because the adapter was trained on some matrices fused."""

from collections.abc import Sequence

from torch import Tensor

from punica.ops.quant import Fp8Matrix

LoRAFactor = Tensor | Fp8Matrix | None
Slices = list[tuple[LoRAFactor, LoRAFactor]]
"""A ``[r, in]`` and B ``[out, r]`` of every slice, of experts with ``E`` before both; ``(None, None)``: not adapted."""


def expand_groups(
    lora_a: Sequence[LoRAFactor], lora_b: Sequence[LoRAFactor], slice_sizes: Sequence[int]
) -> tuple[list[LoRAFactor], list[LoRAFactor]]:
    """One pair per slice. Slice ``i`` of the layer has ``slice_sizes[i]`` full output rows.

    Groups are laid over the slices from left to right. A group whose B has ``m`` rows covers the next slices whose
    sizes add up to ``m``: its B is split by their sizes (views), its A is repeated. A ``None`` group covers the fewest
    slices, at least one, with which the remaining groups fit. All slices must be covered exactly.

    Example: sizes ``(8, 4, 4, 6)``, groups with 16 and 6 rows: slices 0 to 2 share the first A, slice 3 has the second.
    Raises ``ValueError`` naming the group's rows, the slice sizes and the slice at which the matching stopped.
    """
    if len(lora_a) != len(lora_b):
        raise ValueError(f"lora_a and lora_b must have equally many groups, got {len(lora_a)} and {len(lora_b)}")
    rows = [None if b is None else b.shape[0] for b in lora_b]
    expanded_a: list[LoRAFactor] = []
    expanded_b: list[LoRAFactor] = []
    start = 0
    for a, b, covered in zip(lora_a, lora_b, _cover(rows, list(slice_sizes)), strict=True):
        expanded_a += [a] * covered
        sizes = list(slice_sizes[start : start + covered])
        expanded_b += [None] * covered if b is None else b.split(sizes)
        start += covered
    return expanded_a, expanded_b


def _cover(rows: list[int | None], sizes: list[int]) -> list[int]:
    """Number of slices that each group covers, by depth-first search over the widths of the ``None`` groups."""
    furthest = (0, 0)  # (slice, group) of the deepest failure: what the caller most likely got wrong

    def fit(group: int, start: int) -> list[int] | None:
        nonlocal furthest
        if group == len(rows):
            if start == len(sizes):
                return []
        else:
            for count in range(1, len(sizes) - start + 1):
                covers = rows[group] in (None, sum(sizes[start : start + count]))
                if covers and (rest := fit(group + 1, start + count)) is not None:
                    return [count, *rest]
        furthest = max(furthest, (start, group))
        return None

    counts = fit(0, 0)
    if counts is not None:
        return counts
    at_slice, at_group = furthest
    culprit = f"group {at_group} with {rows[at_group]} rows" if at_group < len(rows) else "no group left"
    raise ValueError(
        f"packed groups with rows {rows} do not cover the {len(sizes)} slices of sizes {sizes}: "
        f"matching stopped at slice {at_slice} ({culprit})"
    )
