"""Every kernel form compiled ahead for the GPUs that the library is meant for, without one: what is chosen there must
compile, fit into that GPU's shared memory, and use only instructions that it has.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from target_compiler import LAYERS, ROCM_KIB, SHARED_KIB, STEPS, Operands, check_fit, compiled

from punica.ops.triton_ops import Options
from punica.ops.triton_ops import launch as launching
from punica.ops.triton_ops.lora_linear import LinearMode, choose_linear
from punica.ops.triton_ops.schedules import Schedule

lora_expand: Any = import_module("punica.ops.triton_ops.lora_expand")  # the package has the op under this name

Case = dict[str, Any]
Record = dict[str, Any]
CHOICES: dict[str, Sequence] = {
    "step": tuple(STEPS),
    "rank": (8, 16, 20, 64, 128, 256),
    "layer": tuple(LAYERS),
    "dtype": ("float16", "bfloat16", "float32"),
    "invariant": (False, True),
    "ranks": (True, False),  # a table of true ranks
    "by_ranks": (False, True),  # how B is stored
    "listed": (True, False),  # a step of the wrapper's, or tensors from elsewhere
    "linear": (True, False),  # both kernels as a layer has them run, or each op by itself
}
USUAL: Case = {name: values[0] for name, values in CHOICES.items()}
DEMANDING: list[Case] = [
    USUAL | {"step": step, "rank": rank, "dtype": dtype, "layer": layer, "invariant": invariant}
    for step, rank, dtype, layer, invariant in (
        ("64 of one", 128, "float32", "qkv", False),
        ("64 of one", 256, "float16", "down", False),
        ("64 of one", 256, "bfloat16", "down", True),
        ("prompt and 31 rows", 64, "float16", "qkv", False),
        ("prompt and 31 rows", 256, "float16", "down", False),
        ("prefill 2048", 64, "float32", "qkv", False),
        ("prefill 2048", 128, "float16", "qkv", False),
        ("prefill 2048", 128, "float16", "qkv", True),
        ("prefill 2048", 256, "float32", "qkv", True),
        ("prefill 8192", 256, "bfloat16", "qkv", False),
    )
]
"""Much shared memory, many registers, or both."""
SLOT_WRITES = [{"dtype": dtype, "elements": size} for dtype in ("float16", "float32") for size in (64, 33)]
WHOLE = (90,)
"""Capabilities for which every form is compiled; the others compile what is demanding."""
FORMS = {
    "shrink rows", "shrink search", "shrink search, swapped operands", "shrink list", "shrink list, swapped operands",
    "expand rows", "expand search", "expand search, swapped operands", "expand list", "expand list, swapped operands",
    "slot write",
}  # fmt: skip
SPILLED = 1024
"""Bytes that a thread may keep in memory for lack of registers."""


def pairwise(seed: int) -> list[Case]:
    """Cases in which every two values of two choices meet, others for another seed."""
    generator = random.Random(seed)
    names = list(CHOICES)
    missing = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(CHOICES[a], CHOICES[b])
    }
    cases = []
    while missing:
        wanted = dict(min(missing, key=lambda pair: sorted(map(repr, pair))))
        drawn = [{name: generator.choice(CHOICES[name]) for name in names} | wanted for _ in range(40)]
        met = [{frozenset(pair) for pair in itertools.combinations(case.items(), 2)} for case in drawn]
        best = max(range(len(drawn)), key=lambda i: len(met[i] & missing))
        cases.append(drawn[best])
        missing -= met[best]
    return cases


def everything(capability: int) -> list[Record]:
    """Every form, on two cores; for GPUs between those of `WHOLE` what is demanding."""
    cases = DEMANDING + SLOT_WRITES + (pairwise(capability) if capability in WHOLE else [])
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(partial(compiled, capability), (cases[::2], cases[1::2]))
    return [record for half in halves for record in half]


def check(capability: int, records: list[Record]) -> None:
    """They fit, and those of a linear overlap."""
    check_fit(capability, records)
    early = [one["case"].get("linear", False) and capability >= 90 for one in records]
    assert [one["waits"] for one in records] == early
    assert [one["starts_early"] for one in records] == early
    check_shrink_waits(records)


def check_shrink_waits(records: list[Record]) -> None:
    """A shrink lets expand start when it has waited itself: expand reads y early, which the base product before the
    shrink wrote.
    """
    orders = [["", *one["order"]] for one in records if one["form"].startswith("shrink") and one["waits"]]
    for order in orders:
        assert "launch_dependents" in order
        assert {before for before, op in itertools.pairwise(order) if op == "launch_dependents"} == {"wait"}


def check_registers(records: list[Record]) -> None:
    """They suffice on the tensor cores and for widths that memory likes."""
    usual = [one for one in records if one["case"]["dtype"] != "float32" and one["case"].get("layer", "odd") != "odd"]
    assert not [(one["spilled"], one["form"], one["case"]) for one in usual if one["spilled"] > SPILLED]


def check_instructions(records: list[Record]) -> None:
    """Weights left have one instruction for all steps; else a row's bits would depend on what else is in the batch."""
    found = defaultdict(set)
    for one in records:
        if "swapped operands" in one["form"]:
            op, case = one["form"].split()[0], one["case"]
            found[op, case["dtype"], case["rank"]].add((tuple(one["instructions"]), tuple(one["widths"])))
    assert {len(kinds) for kinds in found.values()} == {1}
    for (op, dtype, rank), ((instructions, _),) in found.items():
        if dtype == "float32":
            assert instructions == ()
        elif op == "expand" or rank <= 32:
            short = {"float16": "f16", "bfloat16": "bf16"}[dtype]
            assert instructions == (f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32",)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [one for one in SHARED_KIB if one != 89])
def test_every_form_compiles_and_fits(capability: int):
    """Plans depend on shared memory, on PDL (90) and, with FP8, on its conversion (89): 89 is 86 here.

    One test of a GPU: processes that share its tests would each compile its forms.
    """
    records = everything(capability)
    assert capability not in WHOLE or {one["form"] for one in records} == FORMS
    check(capability, records)
    check_registers(records)
    check_instructions(records)


FP8: Case = USUAL | {"by_ranks": True, "rank": 64, "fp8": "float8_e4m3fn", "w8a8": False, "scales": "channel"}
FP8_CASES: list[Case] = [
    FP8 | changes
    for changes in (
        {"step": "64 distinct"},
        {"step": "64 distinct", "rank": 16, "layer": "down", "fp8": "float8_e5m2"},
        {"step": "64 distinct", "by_ranks": False, "scales": "block", "ranks": False},
        {"step": "64 of one", "w8a8": True, "scales": "block", "linear": False},
        {"step": "one row", "w8a8": True, "scales": "tensor", "linear": False, "listed": False},
        {"step": "prompt and 31 rows"},
        {"step": "prompt and 31 rows", "rank": 256, "layer": "down"},
        {"step": "prefill 512", "rank": 20, "dtype": "bfloat16", "listed": False, "linear": False},
        {"step": "prefill 2048", "scales": "block"},
        {"step": "prefill 2048", "rank": 128, "w8a8": True, "fp8": "float8_e5m2", "linear": False},
        {"step": "prefill 8192", "rank": 16, "layer": "down"},
        {"step": "prefill 512", "rank": 16, "fp8": "float8_e5m2", "listed": False},
        {"step": "prefill 512"},
        {"step": "prefill 2048"},
        {"step": "prefill 2048", "dtype": "bfloat16"},
        {"step": "prefill 8192"},
        {"step": "one row", "invariant": True},
        {"step": "prefill 512", "invariant": True},
        {"step": "prefill 2048", "invariant": True},
        {"step": "prefill 8192", "invariant": True},
        {"step": "64 distinct", "invariant": True, "rank": 16, "dtype": "bfloat16"},
        {"step": "prefill 2048", "invariant": True, "dtype": "bfloat16", "rank": 16},
        {"step": "prefill 512", "dtype": "float32", "layer": "odd", "rank": 16},
    )
]

FP8_BY_BITS = [*FP8_CASES[:10], *FP8_CASES[17:19], FP8_CASES[-1]]
"""Every scheme, format and form once, for GPUs whose compiler does not convert FP8."""


def check_fp8(capability: int, records: list[Record]) -> None:
    """They compiled for this GPU, and fit; invariant steps have the one instruction."""
    records = [one for one in records if "fp8" in one["case"]]
    check_fit(capability, records)
    usual = [one for one in records if one["case"]["dtype"] != "float32"]
    assert not [(one["spilled"], one["form"], one["case"]) for one in usual if one["spilled"] > SPILLED]
    found = defaultdict(set)
    for one in records:
        if "swapped operands" in one["form"]:
            assert len(one["instructions"]) == 1
        if one["case"]["invariant"]:
            key = one["form"].split()[0], one["case"]["dtype"], one["case"]["rank"]
            found[key].add((*one["instructions"], *one["widths"]))
    assert {len(kinds) for kinds in found.values()} <= {1}
    check_shrink_waits(records)
    words = [one for one in records if "in words" in one["form"] and one["waits"]]
    assert not [one["case"] for one in words if not one["reads_first"]]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "cases"), [(80, FP8_BY_BITS), (90, FP8_CASES)], ids=["80", "90"])
def test_fp8_compiles_and_fits(capability: int, cases: list[Case]):
    """GEMM tiles whose ranks fit one pass read B in words, before the PDL wait."""
    records = compiled(capability, cases)
    check_fp8(capability, records)
    tiles = [one for one in records if one["form"].startswith(("expand list", "expand search"))]
    for one in tiles:
        case = one["case"]
        words = case["linear"] and case["scales"] == "channel" and not case["invariant"] and case["dtype"] != "float32"
        if case["rank"] <= 128:  # more take several passes where shared memory is small
            assert ("in words" in one["form"]) == words


def test_partials_whose_stride_would_drop_the_wait_are_refused():
    given = Operands(USUAL | {"step": "prefill 512"}, "meta")
    partials = lora_expand.LowRank((8, 1, 512, 8), (0, 0, 8, 1), torch.float32)
    given = given.y, given.weights.b.form, given.batch, Schedule(16, 64, 16), lora_expand.ExpandMode(pdl=True)
    with pytest.raises(ValueError, match="partials of h have a stride of 0"):
        lora_expand.plan_expand(partials, *given)


@pytest.mark.parametrize("apart", [False, True])
def test_y_is_read_early_only_behind_a_shrink_that_waited_for_its_writer(apart):
    """Beside a base product on another stream neither shrink starts early nor expand reads y before its wait."""
    given = Operands(USUAL | {"step": "prefill 512"}, "meta")
    forms, mode = (given.weights.a.form, given.weights.b.form), LinearMode(pdl=True, apart=apart)
    plan = choose_linear(given.y, given.x, forms, given.batch, Options(), mode)
    tile = plan.expand.launch.tail[-1]
    assert (tile.pdl, tile.late) == (True, apart)
    assert plan.shrink.launch.options.get("launch_pdl", False) != apart


@pytest.mark.parametrize(("kib", "ranks"), [(227, 256), (163, 128), (99, 64), (64, 32)])
def test_blocks_of_many_ranks_fit_the_shared_memory(kib, ranks, monkeypatch):
    for module in (launching, lora_expand):
        monkeypatch.setattr(module, "shared_memory", lambda device: kib << 10)
    monkeypatch.setattr(lora_expand, "INTERPRETED", False)  # whose tensors are limited, too
    given = Operands(USUAL | {"step": "prefill 512", "rank": 256}, "meta")
    partials, schedule = lora_expand.LowRank.sums(1, 3, 512, 256), Schedule(64, 256, 256, 8, 3)
    given = given.y, given.weights.b.form, given.batch, schedule, lora_expand.ExpandMode()
    assert lora_expand.plan_expand(partials, *given).launch.tail[-1].block_r == ranks


@pytest.mark.parametrize(
    ("capability", "fp8"),
    [pytest.param(89, FP8_CASES[0], id="89"), pytest.param(120, FP8_CASES[1], id="120", marks=pytest.mark.slow)],
)
def test_a_usual_step_compiles(capability: int, fp8: Case):
    records = compiled(capability, [USUAL | {"step": "prompt and 31 rows"}, fp8])
    check(capability, [one for one in records if "fp8" not in one["case"]])
    check_fp8(capability, records)


@pytest.mark.slow
def test_ranks_of_h_and_of_b_share_no_register():
    """An expand of SGLang's chunked decode: 64 rows, rank 32, 16-bit inputs, tables of ranks; no address of a GPU with
    Triton 3.6 was aligned.
    """
    case = USUAL | {"step": "64 of five", "rank": 32, "linear": False, "listed": False, "slots": 8}
    records = compiled(90, [case | {"dtype": dtype} for dtype in ("float16", "bfloat16")])
    check(90, records)
    assert not [one["form"] for one in records if one["packed"]]


ROCM_CASES: list[Case] = [
    USUAL | {"step": "64 distinct", "rank": 16},
    USUAL | {"step": "prefill 2048", "rank": 16},
    USUAL | {"step": "prefill 2048", "rank": 64, "invariant": True, "by_ranks": True},
    FP8 | {"step": "64 distinct", "rank": 16},
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ROCM_KIB)
def test_demanding_steps_compile_for_rocm(arch: str):
    """For AMD GPUs, without PDL, into whose LDS they fit; FP8 is upcast by its bits."""
    check_fit(arch, compiled(arch, DEMANDING + ROCM_CASES))


@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("rank", CHOICES["rank"])
@pytest.mark.parametrize("dtype", CHOICES["dtype"])
def test_blocks_that_decide_the_bits_are_those_of_every_step(capability, rank, dtype, monkeypatch):
    """With `batch_invariant`, on every GPU: only what does not change a row's sums may follow the step. How much of K
    is read at once changes them above 32 lanes, where a product is not each warp's own.
    """
    for module in (launching, lora_expand):
        monkeypatch.setattr(module, "shared_memory", lambda device: SHARED_KIB[capability] << 10)
    for layer, listed in itertools.product(LAYERS, (True, False)):
        found = set()
        for step in STEPS:
            case = USUAL | {"rank": rank, "dtype": dtype, "layer": layer, "listed": listed, "step": step}
            given = Operands(case, "meta")
            forms = given.weights.a.form, given.weights.b.form
            plan = choose_linear(given.y, given.x, forms, given.batch, Options(batch_invariant=True), LinearMode())
            shrink, expand = plan.shrink.launch.tail[-1], plan.expand.launch.tail
            of_k = (shrink.block_k, shrink.block_m) if rank > 32 else ()
            found.add((shrink.split_k, shrink.block_r, of_k, expand[-1].block_r, expand[-2].partials))
        assert len(found) == 1


MOE_CASE = {
    "layer": "qwen3", "tokens": 8, "rank": 16, "dtype": "bfloat16", "down": False, "naive": False,
    "ranks": True, "fp8": None, "block": 0, "w8a8": False, "height": 16,
}  # fmt: skip
E4M3 = "float8_e4m3fn"
MOE_USUAL = [
    MOE_CASE | {"layer": layer, "tokens": tokens, "down": down, "naive": naive, "fp8": fp8}
    for layer, tokens, down, fp8 in itertools.product(("mixtral", "qwen3"), (8, 128), (False, True), (None, E4M3))
    for naive in ((False, True) if tokens == 8 else (False,))
] + [
    MOE_CASE | {"layer": "mixtral", "tokens": tokens, "down": True, "height": height, "rank": rank}
    for tokens, height in ((512, 32), (1024, 64))
    for rank in (16, 32)
]
MOE_OTHERS = [
    MOE_CASE | changes
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


@pytest.mark.slow
def test_every_form_of_experts_compiles_and_fits():
    records = compiled(90, [*MOE_OTHERS, MOE_CASE | {"naive": True}], "moe_target_compiler")
    check_fit(90, records)
    assert [record["waits"] for record in records[-2:]] == [True, True]


@pytest.mark.slow
def test_usual_calls_spill_nothing_and_overlap():
    records = compiled(90, MOE_USUAL, "moe_target_compiler")
    check_fit(90, records)
    assert not [(record["spilled"], record["case"]) for record in records if record["spilled"]]
    assert sum(record["waits"] for record in records) == 2 * len(MOE_USUAL)  # shrink and expand of each
    early = sum(record["starts_early"] for record in records)
    downs = sum(case["down"] for case in MOE_USUAL)
    assert early == len(MOE_USUAL) + downs  # every expand, and shrink behind an activation
