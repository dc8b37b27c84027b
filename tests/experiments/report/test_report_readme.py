"""Numbers of the README: each is filled by a function of rows, and no page has other measured ones."""

import re
from dataclasses import replace

import pytest

from experiments.harness.schema import REPOSITORY
from experiments.measure.records import RowsError, write_rows
from experiments.report.machines import machine_of
from experiments.report.major import MAJOR
from experiments.report.reproducing import GENERATED, MARKED, VALUES, claims, write_readme
from tests.experiments.report.report_rows import PAPER, decode_rows, operator_rows

README = REPOSITORY / "README.md"
FILES = [
    path
    for path in (README, REPOSITORY / "CONTRIBUTING.md", *sorted(REPOSITORY.glob("docs/*.md")))
    if GENERATED not in path.read_text(encoding="utf-8")
]
MEASURED = re.compile(r"\d (ms|µs|us|ns|token/s|requests?/s|GB/s)\b|\d\.\d+ times|\d(\.\d+)? %")
SET = ("within 3 %", "within 12 %", "within 25 %", "1.5 times slower than a sibling")
"""Settings of the protocol: windows are drawn so, repeats are measured again so."""
OLDER = "<!-- measured:older-rows --><!-- /measured -->"


@pytest.fixture
def cpu(tmp_path):
    write_rows(tmp_path / "fig01_batching.csv", decode_rows())
    return machine_of(tmp_path, tmp_path, PAPER, "cpu")


def filled(text, path, *machines):
    path.write_text(text, encoding="utf-8")
    return write_readme(machines, path).read_text(encoding="utf-8")


def test_a_marker_is_filled_from_rows_and_filled_again(cpu, tmp_path):
    machines = [replace(cpu, rows=cpu.rows.assign(older=[True, False])), replace(cpu, name="h200")]
    once = filled(f"a {OLDER} b", tmp_path / "A.md", *machines)
    said = "1 of 2 (50.0 %) on cpu, 2 of 2 (100.0 %) on h200"
    assert once == f"a {OLDER.replace('--><', f'-->{said}<')} b"
    assert filled(once, tmp_path / "A.md", *machines) == once


def test_a_table_spans_lines_and_what_stands_around_it_stays(cpu, tmp_path):
    text = "a\n<!-- measured:machines -->\nold\nolder\n<!-- /measured -->\nb"
    found = filled(text, tmp_path / "A.md", cpu)
    assert found.startswith("a\n<!-- measured:machines -->\n\n| recorded on | verdicts | results |\n")
    assert found.endswith("|\n\n<!-- /measured -->\nb")


def test_an_unknown_marker_and_a_machine_without_rows_are_refused_before_anything_is_written(cpu, tmp_path):
    path = tmp_path / "B.md"
    path.write_text("<!-- measured:nothing --><!-- /measured -->")
    with pytest.raises(RowsError, match=r"B.md: the marker measured:nothing is filled by no function: choose one"):
        write_readme([cpu], path)
    text = f"{OLDER}<!-- measured:speedup-7b --><!-- /measured -->"
    path.write_text(text)
    with pytest.raises(RowsError, match=r"B.md: .*measured:speedup-7b needs recorded rows for 'h200'.*record them"):
        write_readme([cpu], path)
    assert path.read_text() == text
    path.write_text(OLDER)
    assert "2 of 2" in write_readme([cpu], path).read_text()


def test_every_major_claim_is_shown_with_the_papers_value_and_its_verdict(tmp_path):
    for name, found in (("h200", operator_rows("host_clock", 160.0)), ("cpu", decode_rows())):
        write_rows(tmp_path / "results" / name / "rows.csv", found)
    machines = {name: machine_of(tmp_path / "results" / name, tmp_path, PAPER, name) for name in ("h200", "cpu")}
    lines = claims(machines).strip().splitlines()[2:]
    assert len(lines) == len(MAJOR)
    (operators,) = (line for line in lines if "Gather-BMM" in line)
    assert "| C12 smallest<br>C13 smallest | 2.07<br>3.09 | 0.5<br>0.5 | differs‡<br>differs‡ | [h200]" in operators
    assert "| C01 ratio | 1.27 | 1.2 | reproduced‡ | [cpu]" in lines[0], "what the GPU lacks is of the CPU"


def test_every_function_fills_a_marker_of_the_readme_and_no_other_page_has_any():
    used = {path: {name for _, name, _ in MARKED.findall(path.read_text(encoding="utf-8"))} for path in FILES}
    assert used.pop(README) == set(VALUES)
    assert not any(used.values())


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_no_measured_number_is_typed(path):
    """Outside of code, markers and what is said of the paper."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", MARKED.sub("", path.read_text(encoding="utf-8")), flags=re.DOTALL)
    text = re.sub(r"\([^()]*in the paper\)", "", text)
    for setting in SET:
        text = text.replace(setting, "")
    assert [match[0] for match in MEASURED.finditer(text)] == []


def test_no_marker_ends_a_paragraph():
    """A line that begins with a comment is a block of its own in Markdown."""
    assert re.findall(r"[^\n]\n<!-- measured:.*", README.read_text(encoding="utf-8")) == []
