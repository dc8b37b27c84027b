"""What the ops refuse: the exception, its message, and an untouched output."""

import math
import re
from typing import Any

import pytest
import torch
from triton_batches import Batch

from punica.ops.triton_ops import lora_expand, lora_linear, lora_shrink
from punica.wrapper.backends import verify_indices

FP16, FP32 = torch.float16, torch.float32


@pytest.fixture
def batch(device: str) -> Batch:
    return Batch([0, 1, -1], 64, (24, 8), 16, 2, FP16, device)


def shrink_call(batch: Batch) -> dict[str, Any]:
    mapping, order, counts, starts, ids, flag = batch.args
    return {
        "inputs": batch.x, "lora_a_weights": batch.a, "output_tensor": torch.full((2, 3, 16), 7.0, device=batch.device),
        "token_lora_mapping": mapping, "token_indices_sorted_by_lora_ids": order, "num_tokens_per_lora": counts,
        "lora_token_start_loc": starts, "lora_ids": ids, "no_lora_flag_cpu": flag, **batch.count,
        "scaling": 0.5,
    }  # fmt: skip


def expand_call(batch: Batch) -> dict[str, Any]:
    call = shrink_call(batch)
    del call["scaling"], call["lora_a_weights"]
    return {
        **call,
        "inputs": torch.zeros(2, 3, 16, device=batch.device),
        "lora_b_weights": batch.b,
        "output_tensor": batch.y,
    }


def every(change: Any) -> Any:
    return lambda call: tuple(change(one) for one in call["lora_a_weights"])


METADATA_ERRORS = {
    "mapping too short": (
        "token_lora_mapping", lambda c: c["token_lora_mapping"][:2], ValueError, "token_lora_mapping",
    ),
    "sorted too short": (
        "token_indices_sorted_by_lora_ids", lambda c: c["token_lora_mapping"][:2], ValueError, "sorted",
    ),
    "starts too short": ("lora_token_start_loc", lambda c: c["lora_token_start_loc"][:-1], ValueError, "start_loc"),
    "ids too long": ("lora_ids", lambda c: c["lora_token_start_loc"], ValueError, "lora_ids"),
    "mapping int64": ("token_lora_mapping", lambda c: c["token_lora_mapping"].long(), TypeError, "int32"),
    "mapping strided": (
        "token_lora_mapping", lambda c: c["token_lora_mapping"].repeat_interleave(2)[::2], ValueError, "contig",
    ),
    "flag not a tensor": ("no_lora_flag_cpu", lambda c: False, ValueError, "no_lora_flag_cpu"),
    "flag too long": ("no_lora_flag_cpu", lambda c: torch.tensor([False, False]), ValueError, "no_lora_flag_cpu"),
    "count too large": ("num_active_loras", lambda c: 4, ValueError, "4"),
    "count a float": ("num_active_loras", lambda c: 1.5, TypeError, "1.5"),
    "count a float tensor": ("num_active_loras", lambda c: torch.tensor([1.0]), TypeError, "num_active_loras"),
    "ranks shape": ("lora_ranks", lambda c: torch.ones(2, 3, dtype=torch.int32), ValueError, "(2, 2)"),
}  # fmt: skip
SHRINK_ERRORS = {
    "no slices": ("lora_a_weights", lambda c: (), ValueError, "lora_a_weights"),
    "not a sequence": ("lora_a_weights", lambda c: c["lora_a_weights"][0], TypeError, "tuple"),
    "slice missing": ("lora_a_weights", lambda c: c["lora_a_weights"][:1], ValueError, "output_tensor"),
    "slices differ": (
        "lora_a_weights", lambda c: (c["lora_a_weights"][0], torch.zeros(2, 1, 8, 64).half()), ValueError, "rank 16",
    ),
    "dtypes differ": ("inputs", lambda c: c["inputs"].float(), TypeError, "float32"),
    "fp8 weights": ("lora_a_weights", every(lambda a: a.to(torch.float8_e4m3fn)), TypeError, "float8"),
    "hidden size": ("inputs", lambda c: c["inputs"][:, :60], ValueError, "hidden size"),
    "one-dimensional": ("inputs", lambda c: c["inputs"][0], ValueError, "inputs"),
    "weight 2-D": ("lora_a_weights", every(lambda a: a[0, 0]), ValueError, "(16, 64)"),
    "second dimension": ("lora_a_weights", every(lambda a: a.view(1, 2, 16, 64)), ValueError, "(1, 2, 16, 64)"),
    "weight strided": ("lora_a_weights", every(lambda a: torch.cat([a, a], -1)[..., ::2]), ValueError, "contiguous"),
    "output shape": ("output_tensor", lambda c: torch.zeros(2, 3, 15), ValueError, "(2, 3, 16)"),
    "output strided": (
        "output_tensor", lambda c: torch.cat([c["output_tensor"]] * 2, 2)[..., ::2], ValueError, "contiguous",
    ),
    "output int": ("output_tensor", lambda c: c["output_tensor"].int(), TypeError, "output_tensor"),
    "scaling nan": ("scaling", lambda c: math.nan, ValueError, "scaling"),
}  # fmt: skip
EXPAND_ERRORS = {
    "rank": ("inputs", lambda c: c["inputs"][..., :15], ValueError, "rank"),
    "slices": ("inputs", lambda c: c["inputs"][:1], ValueError, "slices"),
    "rows": ("output_tensor", lambda c: c["output_tensor"][:2], ValueError, "rows"),
    "output 1-D": ("output_tensor", lambda c: c["output_tensor"][0], ValueError, "output_tensor"),
    "output columns strided": (
        "output_tensor", lambda c: torch.cat([c["output_tensor"]] * 2, 1)[:, ::2], ValueError, "stride 1",
    ),
    "offset too large": ("offset_start", lambda c: 1, ValueError, "offset_start"),
    "offset negative": ("offset_start", lambda c: -1, ValueError, "offset_start"),
    "ranks differ": (
        "lora_b_weights", lambda c: (c["lora_b_weights"][0], torch.zeros(2, 1, 8, 8).half()), ValueError, "rank 16",
    ),
}  # fmt: skip


def check(op: Any, call: dict[str, Any], case: tuple, device: str) -> None:
    name, change, error, text = case
    before = call["output_tensor"].clone()
    output = call["output_tensor"]
    value = change(call)
    if isinstance(value, torch.Tensor) and name not in ("no_lora_flag_cpu", "num_active_loras"):
        value = value.to(device)
    elif isinstance(value, tuple):
        value = tuple(v.to(device) for v in value)
    with pytest.raises(error, match=re.escape(text)):
        op(**{**call, name: value})
    assert torch.equal(output, before)


@pytest.mark.parametrize("case", [*METADATA_ERRORS, *SHRINK_ERRORS])
def test_shrink_refuses(case, batch, device):
    check(lora_shrink, shrink_call(batch), {**METADATA_ERRORS, **SHRINK_ERRORS}[case], device)


@pytest.mark.parametrize("case", [*METADATA_ERRORS, *EXPAND_ERRORS])
def test_expand_refuses(case, batch, device):
    check(lora_expand, expand_call(batch), {**METADATA_ERRORS, **EXPAND_ERRORS}[case], device)


@pytest.mark.parametrize("op", [lora_shrink, lora_expand], ids=["shrink", "expand"])
def test_flag_is_looked_at_first(op, batch):
    call = shrink_call(batch) if op is lora_shrink else expand_call(batch)
    wrong = {**call, "token_lora_mapping": call["token_lora_mapping"].long(), "no_lora_flag_cpu": torch.tensor([True])}
    before = call["output_tensor"].clone()
    op(**wrong)
    assert torch.equal(call["output_tensor"], before)


def test_verify_indices_names_the_first_bad_value(batch):
    mapping, order, counts, starts, ids = batch.args[:5]
    verify_indices((mapping, order, counts, starts, ids), 2)
    for tensors, text in (
        ((mapping + 1, order, counts, starts, ids), r"token_lora_mapping\[1\] is 2"),
        ((mapping, order - 9, counts, starts, ids), r"sorted_by_lora_ids\[0\] is -"),
        ((mapping, order, counts, starts, ids * 2), r"lora_ids\[0\] is -2"),
        ((mapping.flip(0), order, counts, starts, ids), "another slot"),
    ):
        with pytest.raises(ValueError, match=text):
            verify_indices(tensors, 2)


def test_linear_refuses_weights_that_do_not_fit_together(batch):
    y = batch.y.clone()
    with pytest.raises(ValueError, match=r"rank 16.*rank 8"):
        lora_linear(y, batch.x, batch.a, tuple(b[..., :8].contiguous() for b in batch.b), *batch.args, 0.5)
    with pytest.raises(ValueError, match="1 slices"):
        lora_linear(y, batch.x, batch.a, batch.b[:1], *batch.args, 0.5, **batch.count)
    with pytest.raises(TypeError, match="bfloat16"):
        lora_linear(y, batch.x.bfloat16(), batch.a, batch.b, *batch.args, 0.5, **batch.count)
    assert torch.equal(y, batch.y)


def test_a_failed_call_leaves_no_plan_behind(batch):
    call = shrink_call(batch)
    for _ in range(2):
        with pytest.raises(ValueError, match="scaling"):
            lora_shrink(**{**call, "scaling": math.nan})
        with pytest.raises(ValueError, match="hidden size"):
            lora_shrink(**{**call, "inputs": batch.x[:, :60]})


@pytest.mark.gpu
def test_devices_must_agree(batch):
    call = shrink_call(batch)
    before = call["output_tensor"].clone()
    for name in ("inputs", "output_tensor", "token_lora_mapping", "lora_ids"):
        with pytest.raises(ValueError, match="cpu"):
            lora_shrink(**{**call, name: call[name].cpu()})
    with pytest.raises(ValueError, match="cpu"):
        lora_shrink(**{**call, "lora_a_weights": tuple(a.cpu() for a in batch.a)})
    with pytest.raises(ValueError, match="cuda"):
        lora_shrink(**{**call, "no_lora_flag_cpu": torch.tensor([False], device="cuda")})
    assert torch.equal(call["output_tensor"], before)
