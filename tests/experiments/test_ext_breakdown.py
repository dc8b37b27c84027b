"""Where a step's time goes: every instant counted once, the engine's steps as they were wanted, parts that add up."""

import re
import time
from dataclasses import replace

import pandas as pd
import pytest
from fakes import measured, points_of, settled
from tiny import TINY

from experiments.benches import step_parts
from experiments.benches.engine_steps import ROOM, EngineSteps, StepShape, bytes_moved, check_adapters_matter
from experiments.benches.step_parts import ATTENTION, BASE, EXPAND, HEAD, REST, SHRINK, SMALL, Kernel
from experiments.ext_breakdown import EXPERIMENT as BREAKDOWN
from experiments.harness import CheckFailed, ConfigError
from experiments.harness.schema import REPOSITORY, DType, model_conf
from experiments.measure import roofline
from experiments.measure.timing import Protocol
from punica.engine.runner import ModelRunner

PROTOCOL = Protocol("host_clock", "cpu", warmup=0, repeats=2, min_repeats=2, seconds=0.0, flush_mib=0)
CUBLAS = "nvjet_hsh_64x8_64x16_4x1_v_bz_TNN"


@pytest.fixture(scope="module")
def bench() -> EngineSteps:
    return EngineSteps.of_llama(TINY, 8, 4, 48, "cpu")


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (ATTENTION, ["_combine_kernel", "fmha_cutlassF_f16_aligned_64x128_rf_sm80",
                     "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>"]),
        (BASE, [CUBLAS, "_gemm_and_shrink_kernel", "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64",
                "void cublasLt::splitKreduce_kernel<32, 16, int, __half>", "void gemvNSP_kernel<__half, float>"]),
        (HEAD, ["void at::native::reduce_kernel<512, 1, at::native::ArgMaxOps<float>>>"]),
        (step_parts.COPIES, ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]),
        (REST, ["void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>"]),
    ],
)  # fmt: skip
def test_kernels_of_libraries_have_their_parts(part, names):
    assert {step_parts.part_of(name) for name in names} == {part}


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("lora_shrink", {SHRINK}), ("lora_expand", {EXPAND}), ("backbone/decode_attention", {ATTENTION}),
        ("backbone/prompt_attention", {ATTENTION}), ("backbone/skinny_gemm", {BASE}), ("backbone/rotary", {SMALL}),
        ("backbone/rows", {SMALL, HEAD, BASE}), ("mixture", {SHRINK, EXPAND}),
    ],
)  # fmt: skip
def test_the_kernels_of_this_repository_have_parts(file, parts):
    """A kernel that is renamed would be counted as rest."""
    source = (REPOSITORY / f"punica/ops/triton_ops/{file}.py").read_text(encoding="utf-8")
    names = re.findall(r"^def (\w+_kernel)\(", source, flags=re.MULTILINE)
    assert names
    assert {step_parts.part_of(name) for name in names} == parts
    assert all(step_parts.part_of(name) == HEAD for name in names if "argmax" in name)


def test_the_product_of_the_head_is_told_from_the_others():
    step = ["Memcpy HtoD", "embedding", "_add_rms_norm_kernel", CUBLAS, "_add_rms_norm_kernel", "index_select", CUBLAS,
            "_lora_shrink_rows_kernel", "ArgMaxOps", "Memcpy DtoH"]  # fmt: skip
    one = ["copies", REST, SMALL, BASE, SMALL, HEAD, HEAD, SHRINK, HEAD, "copies"]
    assert step_parts.parts_of([*step, *step]) == [*one, *one]


def test_every_instant_belongs_to_one_part():
    kernels = [
        Kernel("_add_rms_norm_kernel", 0.0, 2.0),
        Kernel("_lora_shrink_rows_kernel", 1.0, 6.0),  # beside the base product, and one second alone behind it
        Kernel(CUBLAS, 1.5, 5.0),
        Kernel("_lora_expand_rows_kernel", 8.0, 9.0),
        Kernel("_swiglu_kernel", 8.5, 10.0),  # launched early
    ]
    expected = {SMALL: 2.0 + 1.0, BASE: 3.0, SHRINK: 1.0, EXPAND: 1.0}
    assert step_parts.seconds_by_part(kernels[::-1]) == pytest.approx(expected)
    assert sum(expected.values()) == 10.0 - 2.0  # less the gap


def shape(decodes=3, context=17, prompt=0, adapters=None):
    requests = decodes + bool(prompt)
    return StepShape(decodes, context, prompt, tuple(range(1, requests + 1)) if adapters is None else adapters)


def test_a_step_is_the_one_that_was_asked_for_until_the_batch_shrinks(bench):
    bench.begin(shape())
    assert [state.num_tokens for state in bench.engine.scheduler.running] == [17] * 3
    first, second = bench.step(), bench.step()
    assert [step.statistics.batch_size for step in (first, second)] == [3, 3]
    assert [state.num_tokens for state in bench.engine.scheduler.running] == [19] * 3
    for _ in range(ROOM - 3):
        bench.step()
    with pytest.raises(CheckFailed, match=r"\(0, 0, False\), wanted is \(3, 0, True\)"):
        bench.step()
    bench.begin(shape(2, prompt=20, adapters=(1, 1, 1)))
    for _ in range(2):
        mixed = bench.step().statistics
        assert (mixed.batch_size, mixed.num_prefill_tokens, mixed.num_segments) == (3, 20, 1)
    bench.begin(shape(0, prompt=20, adapters=(0,)))
    alone = bench.step().statistics
    assert (alone.batch_size, alone.num_prefill_tokens, alone.num_segments) == (1, 20, 0)


def test_decodes_with_a_prefix_cache_are_the_same_steps(bench):
    cached = EngineSteps.of_llama(TINY, 8, 4, 48, "cpu", prefix_cache=True)
    for one in (bench, cached, cached):  # twice: what the first left is removed
        one.begin(shape())
        assert one.step().statistics.batch_size == 3


def test_adapters_that_are_not_applied_are_seen(bench, monkeypatch):
    shapes = [shape(adapters=(0,) * 3), shape()]
    check_adapters_matter(bench, shapes)
    monkeypatch.setattr(bench.engine.manager.punica_wrapper, "add_linear", lambda *_, **__: None)
    with pytest.raises(CheckFailed, match="as if its rows had no adapters"):
        check_adapters_matter(bench, shapes)


def test_parts_of_a_cpu_add_up_to_the_steps(bench, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # less what others take meanwhile
    cases = step_parts.measured(bench, {"": shape(adapters=(0,) * 3), "Distinct": shape()}, PROTOCOL)
    for case in cases.values():
        parts = case.mean_parts()
        assert case.watched == case.steps
        assert len(case.steps) == len(case.host["schedule"]) == 2
        assert sum(parts.values()) == pytest.approx(sum(case.steps) / 2)
        assert set(parts) == {REST, step_parts.SCHEDULE, step_parts.METADATA}
        assert min(parts.values()) > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["one-by-one", "ahead"])
def test_a_gpu_is_timed_first_and_then_profiled(bench, monkeypatch, ahead):
    """With kernels that a script says ran: what is left of the steps is gaps. Steps launched ahead share the time."""

    def scripted(work):
        work()
        return [Kernel(CUBLAS, 0.0, 1e-6), Kernel("_lora_expand_rows_kernel", 1e-6, 3e-6), Kernel("odd", 3e-6, 4e-6)]

    if ahead:
        monkeypatch.setattr(ModelRunner, "works_ahead", True)
    monkeypatch.setattr(EngineSteps, "on_gpu", property(lambda _: True))
    monkeypatch.setattr(EngineSteps, "wait", lambda _: None)
    monkeypatch.setattr(step_parts, "watched_kernels", scripted)
    (case,) = step_parts.measured(bench, {"Distinct": shape()}, PROTOCOL).values()
    assert len(case.steps) == len(case.host["schedule"]) == len(case.watched) == 2
    assert case.watched != case.steps
    assert (len(set(case.watched)) == 1) == ahead
    parts = case.mean_parts()
    assert {name: parts[name] for name in (BASE, EXPAND, REST)} == pytest.approx({BASE: 5e-7, EXPAND: 1e-6, REST: 5e-7})
    assert sum(parts.values()) == pytest.approx(sum(case.watched) / 2)


def test_bytes_of_7b_at_batch_32_are_those_of_the_arithmetic():
    model, kind = model_conf("llama2-7b"), StepShape(32, 512, 0, (0,) * 32)
    weights = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 32000 * 4096 + 4096)
    cached = 32 * 512 * 2 * 32 * 4096 * 2
    assert bytes_moved(model, 16, kind) == weights + cached
    distinct = replace(kind, adapters=tuple(range(1, 33)))
    assert bytes_moved(model, 16, distinct) == weights + cached + 32 * 79_953_920
    assert bytes_moved(model, 16, StepShape(0, 512, 512, (1,))) == weights + 79_953_920


def test_the_grid_has_every_kind_of_step_without_adapters_and_with(tmp_path):
    points = points_of(tmp_path, BREAKDOWN, "scale=gpu", "hardware=h200")
    decodes = [("decode", 32, 512), ("decode", 32, 2048)]
    kinds = [*decodes, ("prefill", 1, 512), ("mixed", 32, 512)]
    assert [(p.panel, p.batch_size, p.seq_len) for p in points[::3]] == [*kinds, *decodes * 3]
    switches = [name for name in ("batch invariant", "fp8 cache", "prefix cache") for _ in decodes]
    assert [p.system for p in points[::3]] == ["punica"] * 4 + switches
    assert [p.workload for p in points] == ["", "Identical", "Distinct"] * 10
    assert [len(group) for group in BREAKDOWN.together(points)] == [3] * 10
    assert {point.system for point in points_of(tmp_path, BREAKDOWN)} == {"punica"}
    with pytest.raises(ConfigError, match="it has punica"):
        settled(tmp_path, BREAKDOWN, "system=batch_invariant")


def test_parts_of_rows_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda _: 1e10)
    outcome, rows = measured(tmp_path, BREAKDOWN)
    assert outcome.measured == 12
    cells = pd.DataFrame([vars(row) for row in rows if row.statistic in ("median", "value")])
    cells = cells.set_index(["panel", "seq_len", "workload", "metric"])["value"].sort_index()
    for _, cell in cells.groupby(["panel", "seq_len", "workload"]):
        found = cell.droplevel([0, 1, 2])
        assert found[found.index.str.startswith("time_")].sum() == pytest.approx(found["step_latency_watched"])
        assert found["floor"] == pytest.approx(found["bytes_moved"] / 1e10 * 1e3)
        assert ("added_latency" in found) == (cell.index[0][2] != "")
        assert "inflation" not in found.index  # a CPU's step is watched as it is
    added = cells["decode", 16, "Distinct"]
    assert added["added_per_token"] == pytest.approx(1e3 * added["added_latency"] / 3)


@pytest.mark.gpu
def test_a_gpu_says_where_its_time_goes():
    model = TINY.model_copy(update=dict(hidden_size=512, intermediate_size=1024, dtype=DType.float16))
    gpu = EngineSteps.of_llama(model, 16, 4, 64, "cuda")
    shapes = {"": shape(adapters=(0,) * 3), "Distinct": shape()}
    cases = step_parts.measured(gpu, shapes, replace(PROTOCOL, device="cuda"))
    plain, distinct = cases[""].mean_parts(), cases["Distinct"].mean_parts()
    assert {BASE, ATTENTION, SMALL, HEAD, step_parts.GAPS} <= set(plain)
    assert EXPAND not in plain
    assert SHRINK not in plain
    assert distinct[EXPAND] > 0
    assert sum(distinct.values()) == pytest.approx(sum(cases["Distinct"].watched) / len(cases["Distinct"].watched))
    assert distinct[step_parts.GAPS] > 0
    assert roofline.copy_bandwidth("cuda") > 1e11


def test_steps_that_are_begun_ahead_are_timed_from_the_end_of_the_one_before(bench, monkeypatch):
    """What passes on the host between two of them is the device's time, too."""
    monkeypatch.setattr(ModelRunner, "works_ahead", True)
    bench.settle(shape())
    assert bench.engine.is_ahead
    late, clock = [3600.0], time.perf_counter  # an hour, which no busy machine takes for a step
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(late))
    assert bench.step().seconds > 3600
    assert bench.step().seconds < 3600
    late.append(3600.0)
    bench.begin(shape())
    assert bench.step().seconds < 3600, "of what was begun for others nothing counts"


def test_a_prompt_joins_a_step_that_is_launched_beside_the_one_before(bench, monkeypatch):
    """As in a stream: the engine takes three steps for one, and its kernels are those of that step."""
    monkeypatch.setattr(ModelRunner, "works_ahead", True)
    monkeypatch.setattr(EngineSteps, "on_gpu", property(lambda _: True))
    monkeypatch.setattr(EngineSteps, "wait", lambda _: None)
    mixed = shape(2, 16, prompt=20)

    def scripted(work):
        work()
        names = CUBLAS, "argmax", CUBLAS, "argmax", "_decode_attention_kernel", "argmax", CUBLAS
        return [Kernel(name, time, time + 0.5) for time, name in enumerate(names)]

    monkeypatch.setattr(step_parts, "watched_kernels", scripted)
    bench.settle(mixed)
    step = bench.step()
    assert (step.statistics.batch_size, step.statistics.num_prefill_tokens) == (3, 20)
    (case,) = step_parts.measured(bench, {"Distinct": mixed}, PROTOCOL).values()
    assert case.parts == {ATTENTION: 0.5, HEAD: 0.5, step_parts.GAPS: sum(case.watched) - 1.0}
    assert bench.steps_each(shape()) == bench.steps_each(shape(0, prompt=20, adapters=(0,))) == 1
