"""Numbers between markers: each is filled by a function of rows, and the README has no other measured ones."""

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from experiments.harness.schema import REPOSITORY
from experiments.report import filled
from experiments.report.filled import MARKED, VALUES, fill, write_filled
from experiments.report.machines import machine_of
from experiments.report.tables import GENERATED
from punica.measure.records import COLUMNS, RowsError, write_rows
from tests.experiments.report.report_rows import PAPER, decode_rows, operator_rows

A = Path("A.md")
FILES = [
    path
    for path in (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(REPOSITORY.glob("docs/*.md")))
    if GENERATED not in path.read_text(encoding="utf-8")
]
MEASURED = re.compile(r"\d (ms|µs|us|ns|token/s|requests?/s|GB/s)\b|\d\.\d+ times|\d(\.\d+)? %")
SET = ("within 3 %", "within 12 %", "within 25 %", "1.5 times slower than a sibling")
"""Settings of the protocol: windows are drawn so, costs explain so, repeats are measured again so."""


ANY_ROWS = {
    "machines", "single-runs", "older-rows", "older-figures", "differing", "holding", "highlights", "claims",
    "reliability",
}  # fmt: skip
"""Markers that need no particular rows."""


@pytest.fixture
def cpu(tmp_path):
    write_rows(tmp_path / "fig01_batching.csv", decode_rows())
    return machine_of(tmp_path, tmp_path, PAPER, "cpu")


def test_a_marker_is_filled_from_rows_and_filled_again(cpu):
    text = "takes <!-- measured:cpu-decode-growth -->9<!-- /measured --> times as long"
    once = fill(text, {"cpu": cpu}, A)
    assert once == "takes <!-- measured:cpu-decode-growth -->1.2<!-- /measured --> times as long"
    assert fill(once, {"cpu": cpu}, A) == once


def test_a_table_spans_lines_and_what_stands_around_it_stays(cpu):
    table, word = "<!-- measured:machines -->\nold\nolder\n", "<!-- measured:single-runs -->"
    found = fill(f"a\n{table}<!-- /measured -->\nb {word}<!-- /measured -->", {"cpu": cpu}, A)
    assert found.startswith("a\n<!-- measured:machines -->\n\n| recorded on | verdicts | results |\n")
    assert found.endswith("|\n\n<!-- /measured -->\nb <!-- measured:single-runs -->2 of 2 (cpu)<!-- /measured -->")


def test_rows_of_older_source_are_counted_by_machine(cpu):
    half = replace(cpu, rows=cpu.rows.assign(older=[True, False]))
    assert filled.older_rows({"cpu": half, "h200": cpu}) == "1 of 2 (50.0 %) on cpu, 2 of 2 (100.0 %) on h200"
    none = replace(cpu, rows=cpu.rows.assign(older=False))
    assert filled.older_by_machine({"a": half, "b": none, "c": cpu}) == "a: 1; b: none; c: all"


def ray_hours(disturbed=False):
    """Rows of two rules' hours, and of the first's with a runner killed; an older rule without numbers of moves."""
    numbers = {
        ("ray hour", "punica"): {"requests_checked": 9, "requests_with_other_tokens": 0},
        ("ray hour", "least_loaded"): {"total_requests": 40, "requests_with_other_tokens": 2},
        ("ray hour, a runner killed", "punica"): {
            "requests_checked": 9, "total_requests": 40, "requests_with_other_tokens": 3,
            "requests_with_other_tokens_not_recomputed": 1,
        },
    }  # fmt: skip
    late = {"ray hour": 2_880.0, "ray hour, a runner killed": 16_800.0}
    cells = [(panel, system, metric, value) for (panel, system), found in numbers.items()
             for metric, value in {**found, "p99_time_to_first_token": late[panel]}.items()]  # fmt: skip
    rows = pd.DataFrame(cells, columns=["panel", "system", "metric", "value"]).assign(figure="13", statistic="value")
    return rows.reindex(columns=COLUMNS).assign(repeat=0, disturbed=disturbed)


def test_other_tokens_of_all_rules_are_counted_and_those_of_moved_requests_told_apart(cpu):
    assert filled.other_tokens({"cpu": replace(cpu, rows=ray_hours())}) == (
        "Requests that got other tokens than alone, as recorded: 2 of 49 (cpu, ray hour), "
        "3 of 9 (cpu, ray hour, a runner killed; recomputed before: 2)"
    )
    with pytest.raises(KeyError, match="ray hour"):
        filled.other_tokens({"cpu": cpu})


def test_first_tokens_of_the_hour_with_a_killed_runner_stand_beside_those_without(cpu):
    rows = ray_hours()
    alone = rows[rows["panel"] == "ray hour"]
    machines = {"h200": replace(cpu, rows=ray_hours(disturbed=True)), "h100": replace(cpu, rows=alone), "cpu": cpu}
    assert filled.killed_runner(machines) == (
        "p99 of first tokens, in the paper's seconds: 16.8 instead of 2.88 s (h200, disturbed)"
    )
    with pytest.raises(KeyError, match="killed"):
        filled.killed_runner({"h100": machines["h100"]})
    loud = ray_hours(disturbed=True).assign(repeat=1)
    both = replace(cpu, rows=pd.concat([rows, loud.assign(value=9 * loud["value"])]))
    assert filled.killed_runner({"h200": both}).endswith("16.8 instead of 2.88 s (h200)")


def test_what_differs_on_the_gpu_is_a_table_and_on_a_cpu_a_list(cpu):
    half = replace(cpu, clocks={"auto": [replace(one, verdict="reproduced") for one in cpu.verdicts]})
    found = filled.differing({"h200": cpu, "cpu": half})
    differs = [one.id for one in cpu.verdicts if one.verdict == "differs"]
    assert [line.split()[1] for line in found.splitlines() if line.startswith("| C")] == differs != []
    assert "On the CPU: none." in found
    assert f"On the CPU: {', '.join(differs)}." in filled.differing({"h200": half, "cpu": cpu})


def test_the_two_tables_and_what_is_in_none_have_all_claims(cpu):
    machines = {"h200": cpu, "cpu": cpu}
    tables = [line.split()[1] for text in (filled.holding(machines), filled.differing(machines))
              for line in text.splitlines() if line.startswith("| C")]  # fmt: skip
    (last,) = [line for line in filled.holding(machines).splitlines() if "In no table, cpu:" in line]
    others = re.findall(r"C\d\d", last.partition("In no table, cpu:")[2])
    assert sorted([*tables, *others]) == [verdict.id for verdict in cpu.verdicts]


def test_an_unknown_marker_and_a_machine_without_rows_are_refused_before_anything_is_written(cpu, tmp_path):
    good = "<!-- measured:single-runs --><!-- /measured -->"
    (tmp_path / "A.md").write_text(good)
    (tmp_path / "B.md").write_text("<!-- measured:nothing --><!-- /measured -->")
    with pytest.raises(RowsError, match=r"B.md: the marker measured:nothing is filled by no function: choose one"):
        write_filled([cpu], tmp_path)
    (tmp_path / "B.md").write_text("<!-- measured:gpu-steps --><!-- /measured -->")
    with pytest.raises(RowsError, match=r"B.md: .*measured:gpu-steps needs recorded rows for 'h200'.*make record"):
        write_filled([cpu], tmp_path)
    assert (tmp_path / "A.md").read_text() == good
    (tmp_path / "B.md").write_text("no marker")
    assert write_filled([cpu], tmp_path) == [tmp_path / "A.md"]
    assert "2 of 2 (cpu)" in (tmp_path / "A.md").read_text()


@pytest.mark.parametrize("name", sorted({*VALUES} - ANY_ROWS))
def test_rows_that_a_marker_needs_are_asked_for(name, tmp_path):
    row = replace(decode_rows()[0], figure="2")
    write_rows(tmp_path / "rows.csv", [row])
    machines = {machine: machine_of(tmp_path, tmp_path, PAPER, machine) for machine in ("cpu", "h200")}
    with pytest.raises(RowsError, match=f"A.md: the marker measured:{name} needs recorded rows for "):
        fill(f"<!-- measured:{name} --><!-- /measured -->", machines, A)


def test_a_highlight_without_rows_is_not_left_out(tmp_path):
    write_rows(tmp_path / "rows.csv", decode_rows())
    table = filled.highlights({"h200": machine_of(tmp_path, tmp_path, PAPER, "h200")})
    assert table.count("| not measured |") == sum(map(len, filled.HIGHLIGHTS.values()))


def test_a_claim_without_rows_is_not_left_out_and_a_clock_that_turns_a_verdict_is_named(tmp_path):
    rows = [*operator_rows("host_clock", 160.0), *operator_rows("cuda_graph", 20.0)]
    for name, found in (("h200", rows), ("cpu", decode_rows())):
        write_rows(tmp_path / "results" / name / "rows.csv", found)
    machines = {
        name: machine_of(tmp_path / "results" / name, tmp_path / "figures" / name, PAPER, name)
        for name in ("h200", "cpu")
    }
    lines = filled.claims(machines).strip().splitlines()[2:]
    assert len(lines) == len(filled.CLAIMS)
    assert sum("| not measured here |" in line for line in lines) == len(filled.CLAIMS) - 1
    (operators,) = (line for line in lines if "Gather-BMM" in line)
    assert "| h200 | differs‡; cuda_graph: reproduced‡ | - |" in operators


def test_every_function_fills_a_marker():
    used = {name for path in FILES for _, name, _ in MARKED.findall(path.read_text(encoding="utf-8"))}
    assert used == set(VALUES)


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_no_measured_number_is_typed(path):
    """Outside of code, markers and what is said of the paper."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", MARKED.sub("", path.read_text(encoding="utf-8")), flags=re.DOTALL)
    text = re.sub(r"\([^()]*in the paper\)", "", text)
    for setting in SET:
        text = text.replace(setting, "")
    assert [match[0] for match in MEASURED.finditer(text)] == []


def test_the_readme_repeats_findings_that_are_sought():
    names = {one.what for sought in filled.SOUGHT.values() for one in sought}
    assert {what for key, wanted in filled.HIGHLIGHTS.items() if key in filled.SOUGHT for what in wanted} <= names


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_no_marker_ends_a_paragraph(path):
    """A line that begins with a comment is a block of its own in Markdown."""
    assert re.findall(r"[^\n]\n<!-- measured:.*", path.read_text(encoding="utf-8")) == []
