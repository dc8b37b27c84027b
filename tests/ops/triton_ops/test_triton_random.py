"""Random calls of all ops (`random_calls.py`) in processes that may die; on a GPU 20,000, in about six minutes:

    python -m pytest -m "slow and gpu" tests/ops/triton_ops/test_triton_random.py

``RANDOM_CALLS`` and ``RANDOM_SEED`` in the environment ask for more of them, and for others.
"""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Timer

import pytest
import torch
from guarded_memory import NAN, Output
from random_calls import PER_FORM

PROGRAM, ROOT = Path(__file__).with_name("random_calls.py"), Path(__file__).resolve().parents[3]
CALLS, SEED = int(os.environ.get("RANDOM_CALLS", 20_000)), int(os.environ.get("RANDOM_SEED", 0))
START_LIMIT, CALL_LIMIT = 600.0, 180.0  # seconds without a new line: the GPU hangs
MOST_PROCESSES = 20  # for one part


def run(first: int, count: int, seed: int, limit: float = CALL_LIMIT, end: str = "") -> tuple[int, dict[int, str]]:
    """Make these calls, in another process wherever one ends; return how many were made, and what is wrong with which.
    ``end``: calls with which the process ends or hangs, such as "3=exit 5=hang".
    """
    environment = os.environ | {"RANDOM_CALLS_END": end, "OMP_NUM_THREADS": "1"}
    made, faults, number = 0, {}, first
    for _ in range(MOST_PROCESSES):
        command = [sys.executable, str(PROGRAM), str(number), str(first + count - number), str(seed)]
        tail: deque[str] = deque(maxlen=20)
        called, seen = "", time.monotonic()
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            watch = Timer(START_LIMIT, process.kill)
            watch.start()
            for line in process.stdout or ():
                watch.cancel()
                watch, seen = Timer(limit, process.kill), time.monotonic()
                watch.start()
                if line.startswith("call "):
                    called, made = line, made + 1
                    number = int(line.split()[1][:-1]) + 1
                elif line.startswith("failed "):
                    faults[number - 1] = f"{json.loads(line.removeprefix('failed '))}\n{called}"
                else:
                    tail.append(line)
            watch.cancel()
        if process.returncode:
            silent = f"after {time.monotonic() - seen:.0f} s without a line, "
            what = f"the process ended with {process.returncode}, {silent}{''.join(tail)[-1500:]}\n{called}"
            faults.setdefault(number - 1 if called else number, what)
        if number == first + count or not called:
            return made, faults
    return made, faults | {number: f"{MOST_PROCESSES} processes have ended; the calls from here on are not made"}


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(0)  # each call has a limit
def test_random_calls(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [(first, min(PER_FORM, CALLS - first), SEED) for first in range(0, CALLS, PER_FORM)]
    total, faults, begin = 0, {}, time.monotonic()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool, capsys.disabled():
        for done, part in enumerate(as_completed([pool.submit(run, *part) for part in parts]), 1):
            made, wrong = part.result()
            total, faults = total + made, faults | wrong
            if wrong or done % 16 == 0 or done == len(parts):
                print(f"\n{time.monotonic() - begin:.0f} s: {total} calls, {len(faults)} wrong: {sorted(faults)[:20]}")
    repeat = f"python {PROGRAM.relative_to(ROOT)} NUMBER 1 {SEED}"
    texts = [f"{number}: {text[:1400]}" for number, text in sorted(faults.items())[:8]]
    assert not faults, f"of {total} calls are wrong {sorted(faults)}; repeat one by {repeat}\n" + "\n\n".join(texts)
    assert total == CALLS


@pytest.mark.parametrize(
    ("count", "end", "words"),
    [(40, "2=exit", "ended with 9"), pytest.param(4, "2=hang", "ended with -9", marks=pytest.mark.slow)],
)
def test_a_process_that_ends_costs_one_call(count: int, end: str, words: str) -> None:
    made, faults = run(0, count, SEED, limit=90.0, end=end)
    assert (made, list(faults)) == (count, [2]), faults
    assert words in faults[2]
    assert "call 2: " in faults[2]


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda y: None, ""),
        (lambda y: y.view[0, 1].fill_(1.0), "1 of 3 elements wrong; at (0, 1)"),
        (lambda y: y.view[0].fill_(NAN), "3 of 3 elements wrong"),
        (lambda y: y.view[1, 0].fill_(5.0), "1 elements changed that must not be written, [6]"),
        (lambda y: y.whole[-1].fill_(5.0), "1 elements changed"),
    ],
    ids=["right", "wrong", "NaN", "another row", "behind"],
)  # fmt: skip
def test_faults_are_found(spoil: Callable[[Output], None], fault: str, device: str) -> None:
    touched = torch.tensor([[True], [False]], device=device).expand(2, 3)
    y = Output(torch.ones(2, 3, device=device), touched, add=False, off=True, layout="gaps")
    y.view[0] = 2.0
    spoil(y)
    found = y.fault(torch.full((2, 3), 2.0, dtype=torch.float64, device=device), torch.zeros((), device=device))
    assert found.startswith(fault)
    assert bool(found) == bool(fault)
