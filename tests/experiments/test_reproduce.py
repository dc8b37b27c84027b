"""The end of `make reproduce`: what fails after the measurements loses none of them, and is said in one line."""

import json

import pytest
from fakes import composed
from omegaconf import OmegaConf

from experiments.commands import report, reproduce
from experiments.harness.passes import Outcome
from punica.measure.records import RowsError, write_rows
from tests.experiments.report.report_rows import decode_rows

REMEDY = "; the rows are on disk: once that is mended, make report judges and shows them"


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Run `make reproduce` with one figure that is measured at once; `left` is what it has to measure."""
    cfg = OmegaConf.create({**OmegaConf.to_container(composed(tmp_path), enum_to_str=True), "figures": ["fig08"]})
    rows = tmp_path / "cpu" / "smoke" / "rows" / "fig08_lora_operator.csv"

    def run(left):
        def one(*_):
            if left:
                write_rows(rows, decode_rows())
            return Outcome("fig08_lora_operator", 1, measured=left, rows_file=str(rows))

        monkeypatch.setattr(reproduce, "composed", lambda experiment: cfg)
        monkeypatch.setattr(reproduce, "run", one)
        return reproduce.reproduce(cfg)

    rows.parent.mkdir(parents=True)
    return run


@pytest.mark.parametrize(
    ("error", "said", "traces"),
    [
        (RowsError("fig01.csv, line 2: damaged"), "fig01.csv, line 2: damaged", 0),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device", 0),
        (ZeroDivisionError("of a formula"), "ZeroDivisionError: of a formula", 1),
    ],
    ids=["rows", "disk", "defect"],
)
def test_a_report_that_fails_keeps_the_run_and_the_next_writes_it(measured, error, said, traces, monkeypatch, capsys):
    def fails(places):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(report, "write_fresh", fails)
        assert measured(1) == 1
    out, err = capsys.readouterr()
    last = json.loads(out.splitlines()[-1])
    assert (last["measured"], last["report"], last["failed"]) == (["fig08_lora_operator"], "", {"report": said})
    assert f"report failed: {said}{REMEDY}" in err.splitlines()
    assert err.count("Traceback") == traces
    asked = []
    monkeypatch.setattr(report, "write_fresh", lambda places: asked.append(places) or fails(places))
    assert (measured(0), len(asked)) == (1, 1)  # though nothing new was measured


def test_a_page_that_is_newer_than_its_rows_is_not_written_again(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "write_fresh", lambda places: pytest.fail("written again"))
    write_rows(tmp_path / "cpu" / "smoke" / "rows" / "fig01_batching.csv", decode_rows())
    (tmp_path / "cpu" / "smoke" / report.PAGE).write_text("a page")
    assert measured(0) == 0
    assert "Nothing new was measured" in capsys.readouterr().err
