"""The commands as a user types them. What takes more than a few seconds is marked slow and runs in CI."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import BASE, composed
from omegaconf import OmegaConf

from experiments.commands import report, reproduce
from experiments.commands.batch import batch_main
from experiments.harness.catalogue import experiments
from experiments.harness.command import or_exit
from experiments.harness.passes import Outcome
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.measure.records import Row, read_rows, write_rows
from tests.experiments.report.report_rows import decode_rows


def command(module: str, *words: str, **more) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", f"experiments.{module}", *words]
    return subprocess.run(line, capture_output=True, text=True, cwd=REPOSITORY, check=False, **more)


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_folder_that_cannot_be_written_is_one_line_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("in the way")
    blocked = command("fig08_lora_operator", f"paths.outputs={tmp_path}/file")
    full = command("commands.reproduce", "scale=smoke", f"paths.outputs={tmp_path}/new", env=os.environ,
                   preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)))  # fmt: skip
    for done in (blocked, full):
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert done.stderr.startswith(f"error: cannot write in {tmp_path}")


@pytest.mark.parametrize(("name", "ending"), [("ray", SystemExit), ("experiments.none", ModuleNotFoundError)])
def test_a_package_of_an_extra_that_is_missing_is_one_line_that_says_which(capsys, name, ending):
    def work():
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with pytest.raises(ending):
        or_exit(work)
    assert (".[cluster]" in capsys.readouterr().err) is (name == "ray")


def test_a_script_runs_by_its_path_from_another_folder_and_writes_nothing_there(tmp_path):
    words = [sys.executable, str(REPOSITORY / "experiments/fig08_lora_operator.py"), "--cfg", "job", "hardware=cpu"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}
    told = subprocess.check_output(words, text=True, cwd=tmp_path, env=environment)
    assert "outputs: outputs" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_reproduce_redoes_only_what_was_deleted_and_a_figure_that_fails_stops_no_other(tmp_path):
    words = ["scale=smoke", "hardware=cpu", "figures=[fig08,readme]", f"paths.outputs={tmp_path}"]
    words += [f"paths.results={tmp_path}/recorded"]  # so that no recorded machine is judged beside it
    first = last_json(command("commands.reproduce", *words))
    assert (first["measured"], first["failed"]) == (["fig08_lora_operator", "readme_backbone"], {})
    assert Path(first["report"]).exists()
    rows = tmp_path / "cpu" / "smoke" / "rows"
    (rows / "readme_backbone.csv").unlink()
    second = last_json(command("commands.reproduce", *words))
    assert set(second["measured"]) - set(first["disturbed"]) == {"readme_backbone"} - set(first["disturbed"])
    (rows / "readme_backbone.csv").unlink()
    (rows / "fig08_lora_operator.csv").write_text("not,rows\n")
    done = command("commands.reproduce", *words)
    assert (done.returncode, last_json(done)["measured"]) == (1, ["readme_backbone"])
    assert "line 1" in last_json(done)["failed"]["fig08_lora_operator"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "said", "traces"),
    [(OSError(13, "Permission denied"), "[Errno 13] Permission denied", 0),
     (ZeroDivisionError("of a formula"), "ZeroDivisionError: of a formula", 1)],
    ids=["disk", "defect"],
)  # fmt: skip
def test_a_report_that_fails_keeps_the_run_and_the_next_writes_it(tmp_path, error, said, traces, monkeypatch, capsys):
    """The first run measures a point, the second none."""
    cfg = OmegaConf.create({**OmegaConf.to_container(composed(tmp_path), enum_to_str=True), "figures": ["fig08"]})
    rows, measured, asked = tmp_path / "cpu/smoke/rows/fig08_lora_operator.csv", iter((1, 0)), []
    write_rows(rows, decode_rows())

    def fails(places):
        asked.append(places)
        raise error

    monkeypatch.setattr(reproduce, "composed", lambda experiment: cfg)
    monkeypatch.setattr(reproduce, "run", lambda *_: Outcome("", 1, measured=next(measured), rows_file=str(rows)))
    monkeypatch.setattr(report, "write_fresh", fails)
    assert reproduce.reproduce(cfg) == 1
    out, err = capsys.readouterr()
    last = json.loads(out.splitlines()[-1])
    assert (last["measured"], last["report"], last["failed"]) == (["fig08_lora_operator"], "", {"report": said})
    assert f"\nFailed (1):\n  report: {said}\n" in err
    assert err.count("Traceback") == traces
    assert (reproduce.reproduce(cfg), len(asked)) == (1, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("figures=fig08", "figures=fig08 must be a list"),
        ("figures=[fig99]", "figures has 'fig99'"),
        ("figures=[8,99]", "figures has '99'"),
        ("figures=[fig08] scale.repeats=0", "scale.repeats=0 must be greater than or equal to 1"),
        ("source=old", "source=old must be 'auto'"),
        ("figures=[fig08,readme] model=llama-tiny", "model=llama-tiny would change nothing"),
        ("figure.minutes.laptop=0.01", "figure= would be read by nothing"),
        ("~scale", "~scale: ~ is no home folder here, and no key can be deleted"),
        ("scale=foo", "Could not find 'scale/foo' Available options in 'scale': gpu laptop paper smoke"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(monkeypatch, capsys, tmp_path, words, said):
    monkeypatch.setattr(sys, "argv", ["reproduce", *words.split(), f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        batch_main("reproduce", "", lambda cfg: pytest.fail("it ran"), "figures", measures=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, line.startswith("error: ")) == (2, True)
    assert said in line


@pytest.mark.parametrize(
    ("entry", "name"),
    [("1", "fig01_batching"), ("fig1", "fig01_batching"), ("Figure 1", "fig01_batching"), ("08", "fig08_lora_operator"),
     ("12", "fig12_textgen_70b"), ("sec6", "sec6_norm"), ("fig2", ""), ("fig0", ""), ("nope", "")],
)  # fmt: skip
def test_a_figure_is_named_by_its_number_or_the_beginning_of_its_name(entry, name):
    if name:
        assert [experiment.name for experiment in experiments([entry])] == [name]
        return
    with pytest.raises(ConfigError, match=f"^figures has '{entry}', but .* fig07_sgmv_roofline, fig08_"):
        experiments([entry])


def fake_rows(hardware: str, commit: str = "0123456789ab") -> list[Row]:
    about = {"device": "some CPU", "date": "2026-01-01"}
    base = replace(BASE, hardware=hardware, timer="host_clock", commit=commit, **about)
    return [replace(base, batch_size=rows, statistic=kind) for rows in (1, 8, 64) for kind in ("median", "p10", "p90")]


@pytest.mark.slow
def test_record_promotes_rows_and_figures_draws_recorded_ones_without_measuring(tmp_path):
    write_rows(tmp_path / "o" / "cpu" / "rows" / "fig08_lora_operator.csv", fake_rows("cpu", "0123-dirty"))
    words = [f"paths.outputs={tmp_path}/o", f"paths.results={tmp_path}/r", f"paths.figures={tmp_path}/f"]
    assert command("commands.record", *words, "hardware=cpu").returncode == 1
    assert not (tmp_path / "r").exists()
    done = command("commands.record", *words, "hardware=cpu", "allow_dirty=true")
    assert done.returncode == 0, done.stderr
    assert len(read_rows(tmp_path / "r" / "cpu" / "fig08_lora_operator.csv")) == 9
    assert (tmp_path / "f" / "cpu" / "fig08_lora_operator.png").exists()
    write_rows(tmp_path / "r" / "h200" / "fig08_lora_operator.csv", fake_rows("h200"))
    done = command("commands.figures", *words, "hardware=h200")
    assert done.returncode == 0, done.stderr
    assert b"commit 0123456789ab;" in (tmp_path / "f" / "h200" / "fig08_lora_operator.png").read_bytes()
    assert not (tmp_path / "o" / "h200" / "figures").exists()
    assert command("commands.figures", *words, "hardware=h100").returncode == 2
