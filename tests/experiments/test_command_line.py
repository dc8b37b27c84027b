"""Where and how scripts may be started, keys that no schema has, and sweeps with a job that fails."""

import json
import os
import re
import subprocess
import sys

import pytest
from fakes import composed
from hydra import compose, initialize_config_dir

from experiments.harness import command
from experiments.harness.schema import CONF, REPOSITORY

NAME = "fig08_lora_operator"


@pytest.mark.parametrize(("name", "ending"), [("ray", SystemExit), ("experiments.none", ModuleNotFoundError)])
def test_a_package_of_an_extra_that_is_missing_is_one_line_that_says_which(capsys, name, ending):
    def work():
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with pytest.raises(ending):
        command.or_exit(work)
    assert (".[cluster]" in capsys.readouterr().err) is (name == "ray")


def test_a_script_runs_by_its_path_from_another_folder_and_writes_nothing_there(tmp_path):
    words = [sys.executable, str(REPOSITORY / "experiments" / f"{NAME}.py"), "--cfg", "job", "hardware=cpu"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}
    told = subprocess.check_output(words, text=True, cwd=tmp_path, env=environment)
    assert "outputs: outputs" in told
    assert list(tmp_path.iterdir()) == []


def test_runs_are_kept_in_the_repository_wherever_they_were_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    composed(tmp_path)  # registers
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(NAME, overrides=["hardware=cpu", "hydra.job.num=0"], return_hydra_config=True)
    for folder in (cfg.hydra.run.dir, cfg.hydra.sweep.dir):
        assert folder.startswith(f"{REPOSITORY}/outputs/cpu/runs/{NAME}/")


def test_the_environment_of_make_finds_the_experiments_from_any_folder(tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (venv / ".created").touch()
    subprocess.run(["make", f"VENV={venv}", f"{venv}/.path"], cwd=REPOSITORY, capture_output=True, check=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONSAFEPATH": "1"}
    words = [venv / "bin" / "python", "-c", "import experiments; print(experiments.__file__)"]
    found = subprocess.check_output(words, text=True, cwd=tmp_path, env=clean)
    assert found.strip() == str(REPOSITORY / "experiments" / "__init__.py")


@pytest.mark.parametrize("terminal", [True, False])
def test_set_up_shows_what_pip_does_on_a_terminal_alone(tmp_path, terminal):
    (tmp_path / "bin").mkdir()
    for name in (".created", ".path"):
        (tmp_path / name).touch()
    pip = tmp_path / "bin" / "python"
    pip.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n')
    pip.chmod(0o755)
    ours, theirs = os.openpty() if terminal else os.pipe()
    subprocess.run(["make", f"VENV={tmp_path}", f"{tmp_path}/.experiments"], cwd=REPOSITORY, stderr=theirs, check=True)
    for end in (ours, theirs):
        os.close(end)
    words = (tmp_path / "words").read_text().split()
    assert words[:3] == ["-m", "pip", "install"]
    assert ("--quiet" in words) is not terminal


def test_the_line_for_the_cpu_wheel_installs_the_pinned_torch():
    (pinned,) = re.findall(r"^torch==(\S+)$", (REPOSITORY / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    line = f"$ .venv/bin/pip install torch=={pinned} --index-url https://download.pytorch.org/whl/cpu\n"
    assert line in (REPOSITORY / "docs" / "index.md").read_text("utf-8")


SWEEP = """
from experiments.harness.command import with_options
from experiments.harness.schema import Count, Settings

class Options(Settings):
    size: Count = 1

def job(options):
    print({"size": options.size, "half": 6 // (options.size - 3)}, flush=True)

with_options("sweep", "A sweep.", "sweep", Options, job)
"""


def test_a_job_of_a_sweep_that_fails_does_not_stop_the_later_ones(tmp_path):
    """Sizes 0, refused, and 3, an error of the code, beside 4 and 5."""
    words = [sys.executable, "-c", SWEEP, "--multirun", "size=0,4,3,5", f"hydra.sweep.dir={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert [json.loads(line.replace("'", '"'))["size"] for line in done.stdout.splitlines() if line[0] == "{"] == [4, 5]
    assert done.returncode == 1
    assert done.stderr.splitlines()[-3:] == ["jobs that failed: 2", "  size=0", "  size=3"]
    assert "error: size=0 must be at least 1" in done.stderr
    assert "ZeroDivisionError" in done.stderr
