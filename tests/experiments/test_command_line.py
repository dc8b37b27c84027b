"""Where and how scripts may be started, keys that no schema has, and sweeps with a job that fails."""

import json
import os
import subprocess
import sys

import pytest

from experiments.harness import command
from experiments.harness.schema import REPOSITORY

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
