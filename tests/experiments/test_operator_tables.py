"""The operator tables and the tuner, as far as they need no GPU: lines, anchors, columns, candidates, tables."""

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import ext_operator_tables as tables
from experiments.benches.operator_lines import (
    ANCHORS,
    SHAPES,
    TABLES,
    anchors_of,
    best_existing,
    lines,
    parts_of_step,
    read_anchors,
    sizes_of,
)
from experiments.benches.operator_shapes import Operator, floor_us
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ConfigError
from experiments.measure.records import STATISTICS
from experiments.plots.operator_tables import show

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("table", "rows"), [("A", 29), ("B", 16), ("C", 18), ("shapes", 48), ("step", 14)])
def test_every_row_of_an_anchor_table_has_its_anchor(table, rows):
    found = lines(table)
    assert len(found) == rows
    for line in found:
        times = anchors_of(line)
        name, us = best_existing(line)
        assert not name.startswith(("proto", "floor"))
        assert us == min(value for key, value in times.items() if not key.startswith("proto"))


@pytest.mark.parametrize("table", ["A", "B", "C"])
def test_floors_are_those_of_the_anchors(table):
    for line in lines(table):
        same = [row for row in read_anchors(ANCHORS) if all(row[key] == value for key, value in line.anchor.items())]
        assert floor_us(line.operator) == pytest.approx(float(same[0]["floor_us"]), rel=0.01), line.label


@pytest.mark.parametrize("table", ["shapes", "step"])
def test_bytes_and_rows_of_other_shapes_are_those_of_the_anchors(table):
    found = lines(table)
    assert len({line.label for line in found}) == len(found)
    for line in found:
        same = [row for row in read_anchors(SHAPES) if all(row[key] == value for key, value in line.anchor.items())]
        assert len(same) == 5, line.label
        assert {(row["bytes"], row["T"], row["L"], row["S"]) for row in same} == {
            (str(line.operator.bytes()), str(line.operator.tokens), str(len(line.operator.sizes)),
             str(len(line.operator.widths)))
        }  # fmt: skip


def test_segment_lengths_are_read_as_the_anchors_spell_them():
    assert sizes_of("128 1x31") == (128, *[1] * 31)
    assert sizes_of("3x2 2") == (3, 3, 2)
    assert sizes_of("48") == (48,)


def test_the_parts_of_a_step_are_its_prompt_and_its_decodes_in_the_same_projection():
    found = lines("step")
    parts = {line.label: [part.label for part in parts_of_step(line, found)] for line in found}
    assert parts["up prompt512+31"] == ["up prompt512", "up 31decodes"]
    assert parts["qkv prompt2048+31"] == ["qkv prompt2048", "qkv 31decodes"]
    assert parts["qkv prompt2048"] == parts["up 31decodes"] == []
    assert sum(map(bool, parts.values())) == 6


def test_bytes_count_true_ranks():
    narrow, wide = (Operator(4096, (4096,), 64, (1, 1), ranks) for ranks in ((8, 16), (64, 64)))
    assert wide.bytes() - narrow.bytes() == 2 * (128 - 24) * 8192
    assert wide.bytes() == Operator(4096, (4096,), 64, (1, 1)).bytes()


def test_lines_without_anchors_have_none():
    assert [line.label for line in lines("ranks") if "r=24" in line.label and not anchors_of(line)] == [
        "T=64 Distinct r=24", "T=64 Identical r=24",
    ]  # fmt: skip
    for table in ("gemm", "invariant", "padding"):
        assert not any(map(anchors_of, lines(table))), table


def test_the_projection_is_timed_at_every_popularity_and_before_prompts():
    found = lines("gemm")
    assert [line.operator.tokens for line in found] == [1, *[8] * 4, *[16] * 4, *[32] * 4, *[64] * 4, 512, 2048, 8192]
    assert {line.operator.widths for line in found[:17]} == {(11008,)}
    assert {(line.operator.widths, len(line.operator.sizes), line.operator.rank) for line in found[17:]} == {
        ((4096,), 4, 16)
    }


def measured(table: str, count: int | None = None, **us: float) -> list:
    return [replace(line, us={name.replace("_", " "): value for name, value in us.items()}) for line in lines(table)][
        :count
    ]


def test_rows_and_text_of_a_measured_table():
    found = measured("A", 3, punica=2.0, wrapper=2.5, normal_shrink=3.0, eager_punica=36.0, eager_wrapper=60.0)
    text = show("A", found)
    assert len(text.splitlines()) == 1 + 3 + 3
    assert text.splitlines()[0].endswith("us | ratio, punica | ratio, wrapper | ratio, normal shrink")
    assert "best existing / wrapper: geometric mean" in text
    rows = tables.rows_of("A", found)
    assert {(row.metric, row.timer, row.system) for row in rows} == {
        ("latency", "cuda_graph", "punica"), ("latency", "cuda_graph", "wrapper"),
        ("latency", "cuda_graph", "normal shrink"), ("host_latency", "host_clock", "punica"),
        ("host_latency", "host_clock", "wrapper"),
    }  # fmt: skip
    assert all(row.statistic in STATISTICS and row.unit == "us" for row in rows)
    assert {row.scale for row in rows} == {"paper"}
    digests = {row.panel: row.config_hash for row in rows}
    assert len(set(digests.values())) == len(digests) == 3
    assert {row.panel: row.config_hash for row in tables.rows_of("A", found)} == digests
    assert tables.rows_of("ranks", found)[0].config_hash not in digests.values()


def test_a_column_that_failed_leaves_its_cell_empty_and_counts_nowhere():
    found = measured("A", 3, punica=2.0, wrapper=2.0)
    del found[1].us["wrapper"]
    text = show("A", found).splitlines()
    assert len({line.count("|") for line in text[:4]}) == 1
    assert [line.rpartition(" ")[2] for line in text[4:]] == ["3", "2"]


def test_shapes_are_summed_up_apart_for_decodes_and_prefills():
    text = show("shapes", measured("shapes", punica=1.0, wrapper=2.0))
    for name, part, rows in itertools.product(("punica", "wrapper"), ("decode", "prefill"), (30, 18)):
        wanted = (part, rows) in (("decode", 30), ("prefill", 18))
        (line,) = [one for one in text.splitlines() if one.startswith(f"best existing / {name}, {part}:")]
        assert line.endswith(f"rows {rows}") == wanted


def test_a_step_stands_beside_its_parts():
    text = show("step", measured("step", punica=3.0, wrapper=6.0))
    assert "up prompt128+31, punica: 3.00 us, apart 3.00 + 3.00 = 6.00 (0.50)" in text
    assert text.count("apart") == 12


def test_one_layer_is_summed_up_where_every_projection_was_measured():
    found = measured("B", punica=1.0, wrapper=2.0)
    del found[0].us["wrapper"]
    text = show("B", found)
    assert "sum of one layer, Distinct: punica 4.0\n" in text
    assert "sum of one layer, Uniform: punica 4.0, wrapper 8.0" in text


def test_what_is_added_behind_a_projection_is_a_metric_of_its_own():
    found = [replace(line, us={"base": 30.0, "base + punica": 40.0, "added by punica": 10.0}) for line in lines("gemm")]
    rows = tables.rows_of("gemm", found[:1])
    assert [(row.metric, row.system, row.value) for row in rows] == [
        ("latency", "base", 30.0), ("latency", "base + punica", 40.0), ("added_latency", "punica", 10.0),
    ]  # fmt: skip
    assert len(show("gemm", found).splitlines()) == 1 + 20


def test_the_price_of_invariance_is_summed_up_for_decodes_and_prefills():
    us = {"wrapper": 2.0, "wrapper, batch invariant": 3.0}
    text = show("invariant", [replace(line, us=us) for line in lines("invariant")]).splitlines()
    assert text[-2] == (
        "wrapper, batch invariant / wrapper, A: geometric mean 1.50, lowest 1.50, highest 1.50, rows 29"
    )
    assert text[-1].startswith("wrapper, batch invariant / wrapper, C:")
    assert text[-1].endswith("rows 18")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("A", ["A"]), (["A", "ranks", "A"], ["A", "ranks"]), ("all", list(TABLES))],
    ids=["one", "several", "all"],
)
def test_tables_are_chosen_by_name(given, expected):
    assert tables.chosen_tables(given) == expected
    with pytest.raises(ConfigError, match="table=nine is unknown"):
        tables.chosen_tables(["A", "nine"])


INTERPRETED = """
import sys
sys.path.insert(0, "tests/ops/triton_ops")
import fast_interpreter
fast_interpreter.install()
from experiments.benches import operator_gemm
from experiments.benches.operator_columns import columns
from experiments.benches.operator_gemm import Projection
from experiments.benches.operator_sets import OperatorSets
from experiments.benches.operator_shapes import Operator

(table,) = sys.argv[1:]
mixed = Operator(64, (32,), 32, (1, 2), (8, 32))
sets = OperatorSets(mixed if table == "padding" else Operator(64, (24, 16), 16, (2, 1)), "cpu", rotating_bytes=20000)
assert sets.count == 2 and sets.stacked_a[1][0].shape[0] == 64
assert sets.stacked_a[1][0].data_ptr() == sets.a[1][0].data_ptr()
found = columns(sets, table)
if table != "gemm":
    for name, call in found.items():
        print(name, sets.relative_error(call), sep=";")
    sys.exit()
operator_gemm.ROTATING_BYTES = 1 << 14
projection = Projection(sets)
for name, call in found.items():
    projection.alone(1)
    print("base", projection.error(1, with_lora=False), sep=";")
    assert projection.error(1, with_lora=True) > 0.1
    projection.before(call)(1)
    print(name, projection.error(1, with_lora=True), sep=";")
"""


@pytest.mark.parametrize(
    ("table", "count"),
    [("gemm", 4), *[pytest.param(*one, marks=pytest.mark.slow)
                    for one in (("A", 6), ("padding", 5), ("invariant", 4), ("determinism", 4))]],
)  # fmt: skip
def test_every_column_computes_the_operator(table, count):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", INTERPRETED, table]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    errors = [line.split(";") for line in done.stdout.splitlines()]
    assert len(errors) == count
    assert max(float(error) for _, error in errors) < 1e-3, errors


def test_columns_are_timed_in_turns_and_a_wrong_one_once(monkeypatch):
    pytest.importorskip("triton")
    from experiments.benches import operator_columns

    asked = []

    def timed(sets, name, call, calls, replays):
        asked.append(name)
        if name == "wrong":
            raise CheckFailed("wrong: relative error 1")
        return {"first": [5.0, 1.0, 2.0], "second": [4.0, 9.0, 8.0]}[name][asked.count(name) - 1]

    monkeypatch.setattr(operator_columns, "sets_of", lambda operator, table: SimpleNamespace(count=1))
    monkeypatch.setattr(operator_columns, "columns", lambda sets, table: dict.fromkeys(("first", "wrong", "second")))
    monkeypatch.setattr(operator_columns, "checked_us", timed)
    line = lines("C")[0]
    assert tables.measure(line, "C") == [f"{line.label}: wrong: relative error 1"]
    assert asked == ["first", "wrong", "second", "first", "second", "first", "second"]
    assert line.us == {"first": 2.0, "second": 8.0}


@pytest.mark.gpu
@pytest.mark.parametrize("table", ["A", "step", "gemm", "determinism", "invariant"])
def test_a_line_is_measured_on_a_gpu(table):
    line = lines(table)[0]
    assert tables.measure(line, table) == []
    assert min(us for name, us in line.us.items() if not name.startswith("added")) > 0
    assert len(show(table, [line]).splitlines()) >= 2


def test_the_listing_of_experiments_does_not_pay_for_torch():
    code = "import sys, experiments.ext_operator_tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table=Z"], "error: table=Z is unknown: choose table=A"),
        (["A"], "Error parsing override 'A'"),
        (["table=A", "speed=1"], "speed= would be read by nothing"),
    ],
    ids=["table", "no-key", "option"],
)
def test_wrong_command_lines_say_what_is_wrong(words, message):
    command = [sys.executable, "-m", "experiments.ext_operator_tables", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr


class TestTuner:
    @pytest.fixture
    def tune(self):
        return pytest.importorskip("experiments.commands.tune")

    def test_candidates_of_the_tables_are_those_worth_timing(self, tune):
        from punica.ops.triton_ops.schedules import expand_schedules, shrink_schedules

        found = tune.operators(["A", "ranks", "C", "A"])
        assert len(found) == len(set(found)) > 40
        for op in found:
            for schedules in (shrink_schedules, expand_schedules):
                some = tune.candidates(op, schedules)
                assert 1 <= len(some) <= len(list(schedules(tune.problem_of(op)))), op
                assert op.tokens <= tune.MOST_GEMV_ROWS or all(one.block_m for one in some)

    def test_a_written_table_is_read_back(self, tune, tmp_path, monkeypatch):
        from punica.ops.triton_ops import clear_config_cache, tuned

        first, second = tune.operators("A")[:2]
        (shrink, expand), other = tune.estimated(first), tune.estimated(second)
        faster = shrink._replace(num_warps=1), expand
        times = {(first, (shrink, expand)): 12.0, (first, faster): 10.0, (second, other): 10.0}
        times[second, (other[0]._replace(num_warps=1), other[1])] = 9.9  # less than the gain
        assert {op: regret for op, (regret, _) in tune.regrets(times).items()} == {first: 1.2, second: 10 / 9.9}
        entries = tune.table(times, 0.03)
        monkeypatch.setattr(tuned, "FOLDER", tmp_path)
        tune.write_table(entries, tmp_path / tuned.table_name("A GPU"), {"gain": 0.03})
        clear_config_cache()
        read = [tuned.measured_schedule(name, tune.problem_of(first), "A GPU") for name in ("shrink", "expand")]
        assert tuple(read) == faster
        assert tuned.measured_schedule("shrink", tune.problem_of(second), "A GPU") is None
        clear_config_cache()
        path, key = tmp_path / tuned.table_name("A GPU"), tuned.key_of(tune.problem_of(first))
        assert tune.merged(path, {"new": {}}, {"new"}) == {key: entries[key], "new": {}}
        assert tune.merged(path, {}, {key}) == {}

    def test_the_estimate_loses_what_its_choice_takes_longer(self, tune):
        from punica.ops.triton_ops.schedules import Gpu

        op = tune.operators("C")[0]
        shrink, expand = tune.estimated(op)
        slower = next(one for one in tune.candidates(op, tune.shrink_schedules) if one != shrink)
        for us, lost in ((5.0, 0.0), (1.0, (math.log(2) + (math.log(2) - 0.1) / 2) / 2)):
            times = {(op, (shrink, expand)): 2.0, (op, (slower, expand)): us}
            found = tune.cases(times, Gpu())
            assert [len(us) for _, us in found] == [2, 1]
            assert tune.loss(found) == pytest.approx(lost)

    def test_measurements_are_read_back_and_not_repeated(self, tune, tmp_path):
        op = tune.operators("C")[0]
        path, pair = tmp_path / "measurements.jsonl", tune.estimated(op)
        line = [[op.k, op.widths, op.rank, op.sizes], *pair, 3.5]
        path.write_text(json.dumps(line) + "\n")
        tuner = tune.Tuner(path, deadline=0.0, workers=0)
        assert tuner.measure(op, pair) == 3.5
        with pytest.raises(TimeoutError):
            tuner.measure(op, (pair[0]._replace(num_warps=1), pair[1]))
        assert tune.regrets({(op, pair): math.inf}) == {}

    def test_unknown_options_are_refused(self, tune):
        command = [sys.executable, "-m", tune.__name__, "minute=3"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "minute= would be read by nothing" in done.stderr
