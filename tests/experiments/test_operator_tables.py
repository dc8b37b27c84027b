"""The operator tables and the tuner, as far as they need no GPU: shapes, anchors, candidates, written tables."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import ext_operator_tables as tables
from experiments.benches.operator_shapes import Operator, floor_us
from punica.measure.records import STATISTICS

ROOT = Path(__file__).resolve().parents[2]
ANCHORS = list(csv.DictReader(tables.ANCHORS.open(newline="")))


@pytest.mark.parametrize(("table", "rows"), [("A", 29), ("B", 16), ("C", 18)])
def test_every_row_of_an_anchor_table_has_its_anchor(table, rows):
    found = tables.lines(table)
    assert len(found) == rows
    for line in found:
        times = tables.anchors_of(line, ANCHORS)
        name, us = tables.best_existing(times)
        assert not name.startswith(("proto", "floor"))
        assert us == min(value for key, value in times.items() if not key.startswith("proto"))


@pytest.mark.parametrize("table", ["A", "B", "C"])
def test_floors_are_those_of_the_anchors(table):
    for line in tables.lines(table):
        same = [row for row in ANCHORS if all(row[name] == value for name, value in line.anchor.items())]
        assert floor_us(line.operator) == pytest.approx(float(same[0]["floor_us"]), rel=0.01), line.label


def test_bytes_count_true_ranks():
    narrow, wide = (Operator(4096, (4096,), 64, (1, 1), ranks) for ranks in ((8, 16), (64, 64)))
    assert wide.bytes() - narrow.bytes() == 2 * (128 - 24) * 8192
    assert wide.bytes() == Operator(4096, (4096,), 64, (1, 1)).bytes()


def test_rows_and_text_of_a_measured_table():
    found = tables.lines("A")[:3]
    for line in found:
        line.us = {"punica": 2.0, "normal shrink": 3.0, "eager": 36.0}
    text = tables.show("A", found, ANCHORS)
    assert "geometric mean" in text
    assert len(text.splitlines()) == 1 + 3 + 2
    rows = tables.rows_of("A", found)
    assert {row.metric for row in rows} == {"latency", "host_latency"}
    assert all(row.statistic in STATISTICS and row.unit == "us" for row in rows)


def test_the_listing_of_experiments_does_not_pay_for_torch():
    code = "import sys, experiments.ext_operator_tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table=Z"], "error: table=Z is unknown: choose table=A"),
        (["A"], "Error parsing override 'A'"),
        (["table=A", "speed=1"], "Key 'speed' not in 'Options'"),
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

    @pytest.mark.parametrize("group", "ARBCPD")
    def test_candidates_are_legal(self, tune, group):
        from punica.ops.triton_ops import configs

        for op in tune.operators(group):
            for op_type, found in (("shrink", tune.shrink_candidates(op)), ("expand", tune.expand_candidates(op))):
                assert found, (op, op_type)
                default = configs._default(op_type, 1, op.tokens, op.k, op.rank, 1, False)
                for config in found:
                    configs._complete(op_type, config, "candidate", default)

    def test_written_tables_are_what_was_fastest(self, tune, tmp_path):
        from punica.ops.triton_ops import configs

        times = {}
        for op in (*tune.operators("A"), *tune.operators("C")):
            pairs = zip(tune.shrink_candidates(op), tune.expand_candidates(op), strict=False)
            for us, (shrink, expand) in enumerate(pairs):
                times[json.dumps([[op.k, op.widths, op.rank, op.sizes], shrink, expand])] = abs(us - 3.0)
        best = tune.best_pairs(times)
        tune.write_tables(best, tmp_path, "cpu")
        exact = Operator(4096, (11008,), 16, (1,) * 64)
        _, shrink, expand = best[exact]
        for op_type, add, config in (("shrink", None, shrink), ("expand", True, expand)):
            table = json.loads((tmp_path / configs.tuned_file_name(op_type, add, "cpu")).read_text())
            keys = ("64", "1", "64", "4096", "16") if op_type == "shrink" else ("64", "1", "64", "16", "11008")
            for key in keys:
                table = table[key]
            assert {**config, **table} == config

    def test_unknown_options_are_refused(self, tune):
        command = [sys.executable, "-m", tune.__name__, "minute=3"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "Key 'minute' not in 'Options'" in done.stderr
