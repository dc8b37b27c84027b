"""The MoE kernels compile for an H200 without one, fit its shared memory, and spill no registers."""

import itertools
from typing import Any

import pytest
from target_compiler import compiled

CASE = {
    "layer": "qwen3", "tokens": 8, "rank": 16, "dtype": "bfloat16", "down": False, "naive": False,
    "ranks": True, "fp8": None, "block": 0, "w8a8": False, "height": 16,
}  # fmt: skip
E4M3 = "float8_e4m3fn"
USUAL = [
    CASE | {"layer": layer, "tokens": tokens, "down": down, "naive": naive, "fp8": fp8}
    for layer, tokens, down, fp8 in itertools.product(("mixtral", "qwen3"), (8, 128), (False, True), (None, E4M3))
    for naive in ((False, True) if tokens == 8 else (False,))
] + [
    CASE | {"layer": "mixtral", "tokens": tokens, "down": True, "height": height, "rank": rank}
    for tokens, height in ((512, 32), (1024, 64))
    for rank in (16, 32)
]
OTHERS = [
    CASE | changes
    for changes in (
        {"rank": 128, "dtype": "float16"},
        {"naive": True, "rank": 64},
        {"rank": 256, "tokens": 256},
        {"rank": 20, "layer": "odd", "dtype": "float32"},
        {"rank": 20, "layer": "odd", "dtype": "float16", "down": True, "tokens": 100},
        {"rank": 64, "tokens": 512, "dtype": "float32", "layer": "odd"},
        {"rank": 64, "tokens": 128, "fp8": "float8_e5m2", "ranks": False},
        *(
            {"naive": True, "fp8": E4M3, "w8a8": w8a8, "block": block, "rank": 64}
            for w8a8, block in ((True, 0), (True, 128), (False, 32))
        ),
        {"tokens": 128, "fp8": E4M3, "w8a8": True, "block": 128, "rank": 64},
        {"tokens": 128, "fp8": "float8_e5m2", "block": 20, "rank": 64, "dtype": "float32"},
        {"rank": 256, "tokens": 256, "fp8": E4M3, "dtype": "float16"},
        {"rank": 64, "tokens": 8, "down": True},
        {"rank": 64, "tokens": 128},
        {"rank": 64, "tokens": 128, "ranks": False},
    )
]


def check(records: list[dict[str, Any]]) -> None:
    assert {record["target"] for record in records} == {90}
    assert max(record["shared"] for record in records) <= 227 << 10


@pytest.mark.slow
def test_every_form_compiles_and_fits():
    records = compiled(90, [*OTHERS, CASE | {"naive": True}], "moe_target_compiler")
    check(records)
    assert [record["waits"] for record in records[-2:]] == [True, True]


@pytest.mark.slow
def test_usual_calls_spill_nothing_and_overlap():
    records = compiled(90, USUAL, "moe_target_compiler")
    check(records)
    assert not [(record["spilled"], record["case"]) for record in records if record["spilled"]]
    assert sum(record["waits"] for record in records) == 2 * len(USUAL)  # shrink and expand of each
    early = sum(record["starts_early"] for record in records)
    assert early == len(USUAL) + sum(case["down"] for case in USUAL)  # every expand, and shrink behind an activation
