"""The backbone's kernels compile for GPUs that are not there, fit their shared memory, start early where they can."""

import itertools
from typing import Any

import pytest
from target_compiler import ROCM_KIB, SHARED_KIB, check_fit, compiled

USUAL = [
    {"layer": layer, "dtype": dtype, "splits": splits}
    for layer, dtype, splits in itertools.product(
        ("llama2-7b", "llama2-70b", "small"), ("float16", "bfloat16"), (1, 8)
    )
]  # fmt: skip
OTHERS = [
    {"layer": layer, "dtype": dtype, "splits": splits}
    for layer, dtype, splits in (
        ("llama2-7b", "float32", 1), ("llama2-70b", "float32", 32), ("odd", "float32", 2), ("odd", "float16", 1),
        ("wide", "float32", 2), ("wide", "bfloat16", 1),
    )
] + [
    {"layer": layer, "dtype": dtype, "splits": 8, "fp8": True}
    for layer, dtype in (("llama2-70b", "bfloat16"), ("wide", "float16"), ("odd", "float32"), ("small", "bfloat16"),
                         ("slim", "float16"))
]  # fmt: skip


def check(capability: int, cases: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    for case in cases:
        launches = 13 + (case["splits"] > 1)  # and a kernel that adds the splits
        assert len([one for one in records if one["case"] == case]) in (launches, launches + 1)  # a shrink by itself
    early = [record for record in records if not record["form"].startswith("shrink")]  # which has a plain launch
    check_fit(capability, records)
    for switch in ("waits", "starts_early"):
        assert {record[switch] for record in early} == {capability >= 90}
    if capability >= 90:  # what is behind is there, with its weights asked for, when a short kernel ends
        behind = [record for record in early if not record["form"].startswith("expand")]  # may wait for that shrink
        assert {record["order"][0] for record in behind} == {"launch_dependents"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_a_decode_step_compiles_for_every_gpu(capability: int) -> None:
    cases = [{"layer": "llama2-7b", "dtype": "float16", "splits": 8, "fp8": fp8} for fp8 in (False, True)]
    records = compiled(capability, cases, "backbone_target_compiler")
    check(capability, cases, records)
    # attention of prompts, and all over FP8, may spill some registers where they were never timed
    assert not [one["form"] for one in records[:12] if one["spilled"] and one["form"] != "prompt attention"]
    assert max(record["spilled"] for record in records) <= (0 if capability == 90 else 64)
    assert sum(bool(record["instructions"]) for record in records) == 10  # three attentions, projections of many rows
    if capability >= 89:  # FP8 goes to the tensor cores by words, but for values cached before a prompt
        assert {record["form"] for record in records if record["reads_bytes"]} <= {"prompt attention"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ROCM_KIB)
def test_a_decode_step_over_fp8_compiles_for_rocm(arch: str) -> None:
    cases = [case for case in OTHERS if case.get("fp8") and case["layer"] in ("small", "slim")]
    check_fit(arch, compiled(arch, cases, "backbone_target_compiler"))


@pytest.mark.slow
def test_every_form_compiles_and_usual_ones_spill_nothing() -> None:
    records = compiled(90, USUAL + OTHERS, "backbone_target_compiler")
    check(90, USUAL + OTHERS, records)
    assert not [record for record in records if record["spilled"] and record["case"] in USUAL]
