"""One trial in a process of its own, which is ended with its children at a time limit."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from experiments.harness.schema import REPOSITORY
from experiments.reliability.groups import all_trials
from experiments.reliability.trial import Outcome, Setting, Trial

TAIL = 2000
"""Characters of the error output of a failed process that are shown."""


def run_apart(trial: Trial, size: str, seed: int, device: str) -> Outcome:
    """Run a trial in a new process; a process that fails or takes too long is one try, lost, with its last output."""
    with tempfile.TemporaryDirectory(prefix=f"punica-{trial.name}-", ignore_cleanup_errors=True) as home:
        words = [sys.executable, "-m", __name__, trial.name, size, str(seed), device, home]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
        with open(Path(home, "errors"), "w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=REPOSITORY, env=environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                said, _ = process.communicate(timeout=trial.limit_s(size))
                why = f"exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                said, why = "", f"more than {trial.limit_s(size):.0f} s"
            finally:
                _end_session(process)
            errors.seek(0)
            tail = errors.read()[-TAIL:]
    if process.returncode == 0 and said:
        return outcome_of(said.strip().splitlines()[-1])
    return Outcome(tried=1, notes=[f"the process ended: {why}\n{tail}"])


def _end_session(process: subprocess.Popen[str]) -> None:
    """End the process and the children that it left in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def outcome_of(text: str) -> Outcome:
    """Read an outcome from the line of JSON that a process printed."""
    read = json.loads(text)
    return Outcome(**{**read, "values": {name: tuple(pair) for name, pair in read["values"].items()}})


def main(name: str, size: str, seed: str, device: str, home: str) -> None:
    """Run a trial here and print its outcome."""
    trial, folder = all_trials().get(name), Path(home, "trial")
    folder.mkdir()
    outcome = trial.run(Setting(trial.counts[size], int(seed), device, folder))
    print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
