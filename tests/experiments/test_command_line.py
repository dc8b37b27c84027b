"""Where and how scripts may be started."""

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
