"""What the ops refuse: the exception, its message, and an untouched output; and the checker of operands by itself."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_batches import Batch

from punica.ops.expect import expect, expect_slices
from punica.ops.triton_ops import lora_expand, lora_linear, lora_shrink
from punica.vllm.ops.dense import NAMES
from punica.wrapper.backends import verify_indices
from tests.ops.helpers import step as step_of

Call = dict[str, Any]


@pytest.fixture
def batch(device: str) -> Batch:
    return Batch([0, 1, -1], 64, (24, 8), 16, 2, torch.float16, device)


def shrink_call(batch: Batch) -> Call:
    step = dict(zip((*NAMES, "no_lora_flag_cpu"), batch.args, strict=True)) | batch.count
    output = torch.full((2, 3, 16), 7.0, device=batch.device)
    return {"inputs": batch.x, "lora_a_weights": batch.a, "output_tensor": output, "scaling": 0.5, **step}


def expand_call(batch: Batch) -> Call:
    call = shrink_call(batch)
    del call["scaling"], call["lora_a_weights"]
    h = torch.zeros(2, 3, 16, device=batch.device)
    return call | {"inputs": h, "lora_b_weights": batch.b, "output_tensor": batch.y}


def every(change: Any) -> Any:
    return lambda call: tuple(change(one) for one in call["lora_a_weights"])


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], -1)[..., ::2]


SHRINK = {
    "mapping too short": ("token_lora_mapping", lambda c: c["token_lora_mapping"][:2], ValueError, "token_lora_map"),
    "starts too short": ("lora_token_start_loc", lambda c: c["lora_token_start_loc"][:-1], ValueError, "start_loc"),
    "mapping int64": ("token_lora_mapping", lambda c: c["token_lora_mapping"].long(), TypeError, "int32"),
    "mapping strided": ("token_lora_mapping", lambda c: spaced(c["token_lora_mapping"]), ValueError, "contig"),
    "flag not a tensor": ("no_lora_flag_cpu", lambda c: False, ValueError, "no_lora_flag_cpu"),
    "flag too long": ("no_lora_flag_cpu", lambda c: torch.tensor([False, False]), ValueError, "no_lora_flag_cpu"),
    "count too large": ("num_active_loras", lambda c: 4, ValueError, "4"),
    "count a float": ("num_active_loras", lambda c: 1.5, TypeError, "1.5"),
    "count a float tensor": ("num_active_loras", lambda c: torch.tensor([1.0]), TypeError, "num_active_loras"),
    "ranks shape": ("lora_ranks", lambda c: torch.ones(2, 3, dtype=torch.int32), ValueError, "(2, 2)"),
    "ranks no tensor": ("lora_ranks", lambda c: [[1.0]], TypeError, "lora_ranks must be a tensor"),
    "x no tensor": ("inputs", lambda c: [[1.0]], TypeError, "inputs must be a tensor, got list"),
    "output no tensor": ("output_tensor", lambda c: [[1.0]], TypeError, "output_tensor must be a tensor"),
    "no slices": ("lora_a_weights", lambda c: (), ValueError, "lora_a_weights"),
    "slice missing": ("lora_a_weights", lambda c: c["lora_a_weights"][:1], ValueError, "output_tensor"),
    "dtypes differ": ("inputs", lambda c: c["inputs"].float(), TypeError, "float32"),
    "fp8 weights": ("lora_a_weights", every(lambda a: a.to(torch.float8_e4m3fn)), TypeError, "float8"),
    "hidden size": ("inputs", lambda c: c["inputs"][:, :60], ValueError, "hidden size"),
    "second dimension": ("lora_a_weights", every(lambda a: a.view(1, 2, 16, 64)), ValueError, "(1, 2, 16, 64)"),
    "weight strided": ("lora_a_weights", every(spaced), ValueError, "contiguous"),
    "output strided": ("output_tensor", lambda c: spaced(c["output_tensor"]), ValueError, "contiguous"),
    "output int": ("output_tensor", lambda c: c["output_tensor"].int(), TypeError, "output_tensor"),
    "scaling nan": ("scaling", lambda c: math.nan, ValueError, "scaling"),
}
EXPAND = {
    "mapping too short": SHRINK["mapping too short"],
    "rank": ("inputs", lambda c: c["inputs"][..., :15], ValueError, "rank"),
    "slices": ("inputs", lambda c: c["inputs"][:1], ValueError, "slices"),
    "rows": ("output_tensor", lambda c: c["output_tensor"][:2], ValueError, "rows"),
    "columns strided": ("output_tensor", lambda c: spaced(c["output_tensor"]), ValueError, "stride 1"),
    "offset too large": ("offset_start", lambda c: 1, ValueError, "offset_start"),
    "offset negative": ("offset_start", lambda c: -1, ValueError, "offset_start"),
}
CALLS = {"shrink": (lora_shrink, shrink_call, SHRINK), "expand": (lora_expand, expand_call, EXPAND)}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, (*_, cases) in CALLS.items() for case in cases])
def test_bad_operands_are_refused_each_time(name: str, case: str, batch: Batch) -> None:
    op, make, cases = CALLS[name]
    call, (argument, change, error, text) = make(batch), cases[case]
    output, before = call["output_tensor"], call["output_tensor"].clone()
    wrong = call | {argument: change(call)}
    for _ in range(2):  # a failed call leaves no plan behind
        with pytest.raises(error, match=re.escape(text)):
            op(**wrong)
    assert torch.equal(output, before)


@pytest.mark.parametrize("name", CALLS)
def test_flag_is_looked_at_first(name: str, batch: Batch) -> None:
    op, make, _ = CALLS[name]
    call = make(batch)
    before = call["output_tensor"].clone()
    op(**call | {"token_lora_mapping": call["token_lora_mapping"].long(), "no_lora_flag_cpu": torch.tensor([True])})
    assert torch.equal(call["output_tensor"], before)


@pytest.mark.parametrize("place", range(len(NAMES)))
def test_verify_indices_names_the_first_bad_value(place: int) -> None:
    step = step_of([1, -1, 1, 0])
    verify_indices(step)
    step.tensors[1][4] = 7  # behind the rows of the step
    verify_indices(step)
    step.tensors[place][2:] += 1
    with pytest.raises(ValueError, match=rf"{NAMES[place]}\[2\] is "):
        verify_indices(step)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda batch: {"b": tuple(b[..., :8].contiguous() for b in batch.b)}, ValueError, r"rank 16.*rank 8"),
        (lambda batch: {"b": batch.b[:1]}, ValueError, "1 slices"),
        (lambda batch: {"x": batch.x.bfloat16()}, TypeError, "bfloat16"),
    ],
)
def test_linear_refuses_what_does_not_fit_together(change: Callable, error: type, text: str, batch: Batch) -> None:
    y, given = batch.y.clone(), {"x": batch.x, "b": batch.b} | change(batch)
    with pytest.raises(error, match=text):
        lora_linear(y, given["x"], batch.a, given["b"], *batch.args, 0.5, **batch.count)
    assert torch.equal(y, batch.y)


@pytest.mark.gpu
def test_devices_must_agree(batch: Batch) -> None:
    call = shrink_call(batch)
    before, on_gpu = call["output_tensor"].clone(), {"no_lora_flag_cpu": torch.tensor([False], device="cuda")}
    moved = {name: call[name].cpu() for name in ("inputs", "output_tensor", "token_lora_mapping", "lora_ids")}
    for name, value in {**moved, "lora_a_weights": tuple(a.cpu() for a in batch.a), **on_gpu}.items():
        with pytest.raises(ValueError, match="cuda" if name in on_gpu else "cpu"):
            lora_shrink(**call | {name: value})
    assert torch.equal(call["output_tensor"], before)


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
