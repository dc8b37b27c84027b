"""The page of operator tables: every line beside the public kernels, from rows alone."""

from dataclasses import replace

import pytest
from report_rows import PAPER

from experiments.benches.operator_lines import best_existing, lines
from experiments.ext_expert_tables import lines as expert_lines
from experiments.ext_expert_tables import rows_of as expert_rows
from experiments.ext_operator_tables import chosen_tables, rows_of
from experiments.measure.records import RowFile
from experiments.report.machines import machine_of
from experiments.report.operators import TITLES, write_operator_tables


@pytest.fixture
def folder(tmp_path):
    found = lines("gemm")
    for line in found:
        line.us = {"wrapper": 3.0, "added by wrapper": 1.25}
    RowFile(tmp_path / "ext_operator_tables_gemm.csv").replace(rows_of("gemm", found))
    decodes = lines("A")[:2]
    for line in decodes:
        line.us = {"wrapper": 3.1, "eager wrapper": 40.5}
    RowFile(tmp_path / "ext_operator_tables_A.csv").replace(rows_of("A", decodes))
    experts = expert_lines()[:1]
    experts[0].us = {"w13": 9.0, "w2": 6.0}
    RowFile(tmp_path / "ext_expert_tables.csv").replace(expert_rows(experts))
    return tmp_path


def test_tables_are_those_of_the_rows(folder):
    (path,) = write_operator_tables(machine_of(folder, folder, PAPER), folder / "operator_tables.md")
    text = path.read_text(encoding="utf-8")
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert headings == [TITLES["A"], TITLES["gemm"], "Experts: LoRA of w13 and of w2, rank 16"]
    assert "| row | floor | two-kernel stream | wrapper | eager wrapper | best existing | us | ratio, wrapper |" in text
    name, best = best_existing(lines("A")[0])
    assert f"| T=1 Distinct | 0.13 | 2.8 | 3.10 | 40.50 | {name} | {best:.1f} | {best / 3.1:.2f} |" in text
    assert "* best existing / wrapper: geometric mean" in text
    assert "| 3.00 | 1.25 |" in text
    first = expert_lines()[0]
    assert f"| {first.label} | 9.00 | 6.00 |  | 15.00 | {first.best_existing():.1f} |" in text


def test_lines_without_rows_are_empty_and_a_machine_without_any_has_no_page(folder, tmp_path):
    machine = machine_of(folder, folder, PAPER)
    text = write_operator_tables(machine, folder / "page.md")[0].read_text(encoding="utf-8")
    assert "| T=2 Skewed | 0.25 | 2.8 |  |  | sgl_v2_best | 6.4 |  |" in text
    none = replace(machine, rows=machine.rows.iloc[:0])
    assert write_operator_tables(none, tmp_path / "none.md") == []
    assert not (tmp_path / "none.md").exists()


def test_every_table_that_the_command_measures_for_readers_has_a_heading():
    assert set(chosen_tables("all")) - TITLES.keys() == {"mixed"}, "mixed steps are for the search of schedules alone"
