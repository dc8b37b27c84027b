"""The operator tables and the tuner, as far as they need no GPU: shapes, anchors, candidates, written tables."""

import copy
import csv
import itertools
import json
import random
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
                for config in found:
                    configs._complete(op_type, config, "candidate")

    def test_written_tables_are_what_was_fastest(self, tune, tmp_path):
        from punica.ops.triton_ops import configs

        times = {}
        for op in (*tune.operators("A"), *tune.operators("C")):
            pairs = zip(tune.shrink_candidates(op), tune.expand_candidates(op), strict=False)
            for us, (shrink, expand) in enumerate(pairs):
                times[json.dumps([[op.k, op.widths, op.rank, op.sizes], shrink, expand])] = abs(us - 3.0)
        best = tune.best_pairs(times)
        earlier = tmp_path / configs.tuned_file_name("expand", True, configs._gpu_name())
        earlier.write_text("{}")
        tune.write_tables(best, tmp_path, configs._gpu_name())
        assert not earlier.exists()
        configs.clear_config_cache()
        _, shrink, expand = best[Operator(4096, (11008,), 16, (1,) * 64)]
        for add_inputs in (True, False):
            query = (64, 64, 11008, 16, 1, add_inputs, None, str(tmp_path))
            assert configs.get_lora_op_configs("expand", *query) == expand
        assert configs.get_lora_op_configs("shrink", 64, 64, 4096, 16, 1, tuned_dir=str(tmp_path)) == shrink
        configs.clear_config_cache()

    def test_sparse_tables_answer_every_look_up_alike(self, tune):
        def answer(node: dict, *wanted: int) -> int:
            """The nearest key of every level, the smaller of two; the second level (slices) must match."""
            for level, number in enumerate(wanted):
                keys = [int(key) for key in node]
                node = node[str(number if level == 1 else min(keys, key=lambda k, n=number: (abs(k - n), k)))]
            return node["block_m"]

        axes = ((1, 2, 4, 9, 16), (1, 3), (1, 4, 8), (5, 6, 8), (7,))
        numbers = random.Random(0)
        whole = {"block_m": 0}
        for axis in reversed(axes):
            whole = {str(key): copy.deepcopy(whole) for key in axis}
        for cell in itertools.product(*axes):
            node = whole
            for key in cell:
                node = node[str(key)]
            # rows (and slices) decide, segments and sizes only now and then: long runs of equal neighbours
            node["block_m"] = cell[1] * (cell[2] > 1) + (numbers.random() < 0.1)
        sparse = tune.sparse(whole)
        for wanted in itertools.product(range(1, 19), (1, 3), range(1, 10), range(4, 10), (1, 7, 9)):
            assert answer(sparse, *wanted) == answer(whole, *wanted), wanted
        assert len(json.dumps(sparse)) < len(json.dumps(whole)) / 2

    def test_packaged_tables_hold_nothing_that_neighbours_answer(self, tune):
        from punica.ops.triton_ops import configs

        for path in configs.PACKAGED.glob("*.json"):
            table = json.loads(path.read_text())
            named = table.pop("configurations")
            assert len({json.dumps(config) for config in named.values()}) == len(named)
            assert tune.sparse(table) == table

    def test_unknown_options_are_refused(self, tune):
        command = [sys.executable, "-m", tune.__name__, "minute=3"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "Key 'minute' not in 'Options'" in done.stderr
