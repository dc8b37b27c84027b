"""Every Triton kernel under the tools of NVIDIA's compute-sanitizer."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.reliability.trial import Trial, sized

SANITIZER, TOOLS = "compute-sanitizer", ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 86
"""Exit code of a tool that found errors in a program that itself succeeded."""
EDGE = "========="
SUMMARY = re.compile(rf"^{EDGE} (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"needs {SANITIZER} of the CUDA toolkit")
@sized("faults", 1, 4, 4, seconds=200)
def test_kernel_checks(trial: Trial) -> None:
    """Triton kernels under compute-sanitizer: no access out of bounds, race, wrong barrier or read of new memory."""
    from tests.ops.triton_ops.kernel_calls import kernels

    names, environment = sorted(kernels()), os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # tensors have ends
    for tool in TOOLS[: trial.count]:
        words = command(tool, names)
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        judge(trial, tool, names, done.stdout, done.returncode)


def command(tool: str, names: Sequence[str]) -> list[str]:
    """Return the command of a tool. Initcheck watches all kernels: writes of others are unknown to it."""
    words = [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "0"]
    words += ["--destroy-on-device-error", "kernel", "--show-backtrace", "device", "--launch-timeout", "300"]
    words += ["--target-processes", "application-only"]  # compilers are children
    if tool == "memcheck":
        words += ["--report-api-errors", "no"]  # torch asks for what a driver may not have
    if tool != "initcheck":
        words += [word for name in names for word in ("--kernel-name", f"kernel_name={name}")]
    return [*words, sys.executable, "-m", "tests.ops.triton_ops.kernel_calls", "cuda"]


def judge(trial: Trial, tool: str, names: Sequence[str], said: str, code: int) -> None:
    """Count a try for each kernel: survived if it ran and no line of the tool names it."""
    lines, before = said.splitlines(), trial.survived
    reports = [line for line in lines if line.startswith(EDGE)]
    named = {name: [i for i, line in enumerate(reports) if re.search(rf"\b{name}\b", line)] for name in names}
    failure = failure_of(said, code, any(named.values()))
    for name, places in named.items():
        why = failure or ("" if name in lines else "not launched")
        if places:
            why = "\n".join(reports[max(0, places[0] - 1) :][:4])
        trial.expect(not why, f"{tool}, {name}: {why}")
    trial.values[tool] = (trial.survived - before, "count")


def failure_of(said: str, code: int, named: bool) -> str:
    """Return what makes a run worthless for every kernel; empty if it is sound."""
    summary, last = SUMMARY.search(said), "\n".join(said.splitlines()[-6:])
    if code not in (0, FOUND) or summary is None:
        return f"exit code {code}, {'with' if summary else 'without'} a summary\n{last}"
    elsewhere = not named and (code == FOUND or int(summary.group(1)))
    return f"errors that name none of the kernels\n{last}" if elsewhere else ""


ALL = ("_argmax_kernel", "_combine_kernel", "_swiglu_kernel")
CLEAN = f"{EDGE} ERROR SUMMARY: 0 errors\n"
OUT_OF_BOUNDS = f"""{EDGE} Invalid __global__ write of size 2 bytes
{EDGE}     at _swiglu_kernel+0x2f0 in swiglu.py:38
{EDGE} ERROR SUMMARY: 1 error
"""
RACE = f"""{EDGE} Warning: Race reported between Write access at _combine_kernel+0x90 in decode_attention.py:188
{EDGE} RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""
ELSEWHERE = f"{EDGE} Uninitialized __global__ memory read of size 4 bytes\n{EDGE} ERROR SUMMARY: 1 error\n"


@pytest.mark.parametrize(
    ("said", "ran", "code", "lost"),
    [
        pytest.param(CLEAN, ALL, 0, (), id="clean"),
        pytest.param(OUT_OF_BOUNDS, ALL, FOUND, ALL[2:], id="out of bounds"),
        pytest.param(RACE, ALL, 0, ALL[1:2], id="race"),
        pytest.param(CLEAN, ALL[1:], 0, ALL[:1], id="not launched"),
        pytest.param(CLEAN, ALL, 1, ALL, id="exit code"),
        pytest.param("", ALL, 0, ALL, id="no summary"),
        pytest.param(ELSEWHERE, ALL, FOUND, ALL, id="errors elsewhere"),
        pytest.param(CLEAN, ALL, FOUND, ALL, id="errors without a report"),
    ],
)
def test_what_a_tool_says_is_judged(tmp_path, said, ran, code, lost) -> None:
    trial = Trial(1, 0, "cuda", tmp_path)
    judge(trial, "memcheck", ALL, "\n".join([*ran, said]), code)
    assert (trial.tried, trial.lost) == (len(ALL), len(lost))
    assert [note.split(": ")[0] for note in trial.notes] == [f"memcheck, {name}" for name in lost]
