"""Random calls of all ops (`random_calls.py`) in processes that may die; on a GPU 20,000, in about six minutes:

    python -m pytest -m "slow and gpu" tests/ops/triton_ops/test_triton_random.py

``RANDOM_CALLS`` and ``RANDOM_SEED`` in the environment ask for more of them, and for others.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from random_calls import NAN, PER_FORM, Output, main

PROGRAM, ROOT = Path(__file__).with_name("random_calls.py"), Path(__file__).resolve().parents[3]
CALLS, SEED = int(os.environ.get("RANDOM_CALLS", 20_000)), int(os.environ.get("RANDOM_SEED", 0))
LIMIT = 900.0
"""Seconds for the calls of a form; a GPU that hangs takes longer."""


def faults(first: int, count: int, seed: int) -> list[str]:
    """Make these calls in another process; return what is wrong, with the last call of a process that ended."""
    command = [sys.executable, str(PROGRAM), str(first), str(count), str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            lines = process.communicate(timeout=LIMIT)[0].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            lines = process.communicate()[0].splitlines()
    found = [line for line in lines if line.startswith("failed ")]
    made = sum(line.startswith("call ") for line in lines)
    if (process.returncode, made) != (0, count):
        end = f"ended with {process.returncode}: {lines[-9:]}"
        found.append(f"the process of calls {first} to {first + count - 1} {end}")
    return found


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(0)  # each process has a limit
def test_random_calls() -> None:
    parts = [(first, min(PER_FORM, CALLS - first), SEED) for first in range(0, CALLS, PER_FORM)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = [fault for of_part in pool.map(lambda part: faults(*part), parts) for fault in of_part]
    repeat = f"repeat one by python {PROGRAM.relative_to(ROOT)} NUMBER 1 {SEED}"
    assert not found, "\n\n".join([f"{len(found)} faults; {repeat}", *[fault[:1400] for fault in found[:8]]])


def test_a_few_calls_and_a_process_that_dies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(0, 40, SEED)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed ")] == []
    monkeypatch.setenv("RANDOM_CALLS_END", "2")
    (fault,) = faults(2, 4, SEED)
    assert fault.startswith("the process of calls 2 to 5 ended with 9: ")
    assert "call 2: " in fault


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        (None, 0.0, ""),
        ((0, 1), 1.0, "1 of 3 elements wrong; at (0, 1)"),
        (0, NAN, "3 of 3 elements wrong"),
        ((1, 0), 5.0, "1 elements changed that must not be written, [6]"),
    ],
    ids=["right", "wrong", "NaN", "another row"],
)
def test_faults_are_found(place: object, value: float, fault: str, device: str) -> None:
    touched = torch.tensor([[True], [False]], device=device).expand(2, 3)
    y = Output(torch.ones(2, 3, device=device), touched, add=False, off=True, layout="gaps")
    y.view[0] = 2.0
    if place is not None:
        y.view[place] = value
    found = y.fault(torch.full((2, 3), 2.0, dtype=torch.float64, device=device), torch.zeros((), device=device))
    assert (found.startswith(fault), bool(found)) == (True, bool(fault))
