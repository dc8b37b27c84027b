"""The checker of operands: letters bind sizes across a call, and a wrong size is told with both operands."""

import pytest
import torch

from punica.ops.expect import expect, expect_slices

F32, ONES = (torch.float32,), torch.ones


def test_letters_bind_sizes_across_a_call():
    sizes = {"n": 2, "of n": "b"}
    expect("x", ONES(3, 8), "T K", dtype=F32, device=torch.device("cpu"), sizes=sizes, contiguous=True)
    expect("h", ONES(2, 3, 4), "n T r", sizes=sizes)
    expect_slices("a", [ONES(5, 4, 8), ONES(5, 1, 4, 8)], "L (1) r K", dtype=F32, sizes=sizes, count=2)
    expect_slices("b", (ONES(5, 9, 4), ONES(5, 7, 4)), "L (1) * r", dtype=F32, sizes=sizes)
    assert {letter: sizes[letter] for letter in "nTKrL"} == {"n": 2, "T": 3, "K": 8, "r": 4, "L": 5}
    for tensor, dims, message in (
        (ONES(3, 9), "T K", r"y has shape \(3, 9\), expected \(3, 8\) \(rows, hidden size\), hidden size 8 as in x"),
        (ONES(2, 4, 4), "n T r", "rows 3 as in x"),
        (ONES(1, 3, 4), "n T r", "slices 2 as in b"),
        (ONES(6, 7, 4), "L (1) * r", r"expected \(5, \(1\), \*, 4\) \(slots, any, rank\), slots 5 as in a\[0\]"),
        (ONES(5, 2, 7, 4), "L (1) * r", r"\(5, 2, 7, 4\)"),
        (ONES(3), "T K", r"y has shape \(3,\), expected \(3, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            expect("y", tensor, dims, sizes=sizes)


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"),
    [
        (ONES(2, 2), {}, TypeError, "got Tensor"),
        ((), {}, ValueError, "empty"),
        ((ONES(2),), {"count": 2}, ValueError, "1 tensors.* 2 slices"),
        ((ONES(2), [1.0]), {}, TypeError, r"a\[1\] must be a tensor, got list"),
        ((ONES(2), ONES(2).double()), {}, TypeError, r"a\[1\].*float64"),
        ((ONES(2), ONES(2, device="meta")), {}, ValueError, r"a\[1\] is on meta.* cpu"),
        ((ONES(2), ONES(4)[::2]), {"contiguous": True}, ValueError, r"a\[1\] has strides \(2,\)"),
        ((ONES(2), ONES(3)), {}, ValueError, r"a\[1\] has shape \(3,\).* 2 as in a\[0\]"),
    ],
)
def test_slices_are_alike(tensors, options, error, message):
    with pytest.raises(error, match=message):
        expect_slices("a", tensors, "K", dtype=(*F32, torch.float64), sizes={}, **options)
