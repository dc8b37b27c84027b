"""Every Triton kernel under the tools of NVIDIA's compute-sanitizer."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil

from experiments.harness.schema import REPOSITORY
from experiments.reliability.trial import Outcome, Setting, trial

SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
LIMIT_S = 450
"""Seconds of one tool."""
FOUND = 86
"""Exit code of a tool that found errors in a program that itself succeeded."""
KEPT = REPOSITORY / "outputs" / "kernel_checks"
"""Folder of what each tool said last."""
EDGE, REFUSAL = "=========", "Device not supported"
SUMMARY = re.compile(rf"^{EDGE} (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)


@trial("faults", smoke=1, laptop=4, full=4, seconds=200, needs_gpu=True, program=SANITIZER)
def kernel_checks(setting: Setting) -> Outcome:
    """Triton kernels under compute-sanitizer: no access out of bounds, race, wrong barrier or read of new memory."""
    from experiments.reliability.kernel_calls import kernels  # imports Triton

    outcome, names = Outcome(), sorted(kernels())
    for tool in TOOLS[: setting.count]:
        said, code = watch(tool, names)
        if REFUSAL in said:
            outcome.expect(False, f"{tool} checked no kernel: {REFUSAL} (a GPU behind gVisor is not)")
            break
        judge(outcome, tool, names, said, code)
    return outcome


def watch(tool: str, names: Sequence[str]) -> tuple[str, int | None]:
    """Run all kernels under a tool; return what both said and their exit code, None of a run that took too long."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # a tensor is an allocation, with its own end
    KEPT.mkdir(parents=True, exist_ok=True)
    file = KEPT / f"{tool}.txt"
    with open(file, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command(tool, names), stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment
        )
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            # in the session of the trial's process, whose end would end it, so not one to kill as a whole
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
            psutil.wait_procs(family, timeout=10)
    return file.read_text(encoding="utf-8", errors="replace"), code


def command(tool: str, names: Sequence[str]) -> list[str]:
    """Return the command of a tool. Initcheck watches all kernels: writes of others are unknown to it."""
    words = [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "0"]
    words += ["--destroy-on-device-error", "kernel", "--show-backtrace", "device", "--launch-timeout", "300"]
    words += ["--target-processes", "application-only"]  # compilers are children
    if tool == "memcheck":
        words += ["--report-api-errors", "no"]  # torch asks for what a driver may not have
    if tool != "initcheck":
        words += [word for name in names for word in ("--kernel-name", f"kernel_name={name}")]
    return [*words, sys.executable, "-m", "experiments.reliability.kernel_calls", "cuda"]


def judge(outcome: Outcome, tool: str, names: Sequence[str], said: str, code: int | None) -> None:
    """Count a try for each kernel: survived if it ran and no line of the tool names it."""
    lines, before = said.splitlines(), outcome.survived
    reports = [line for line in lines if line.startswith(EDGE)]
    named = {name: [i for i, line in enumerate(reports) if re.search(rf"\b{name}\b", line)] for name in names}
    failure = failure_of(said, code, any(named.values()))
    for name, places in named.items():
        why = failure or ("" if name in lines else "not launched")
        if places:
            first = max(0, places[0] - 1)
            why = "\n".join([f"{len(places)} report lines", *reports[first : first + 4]])
        outcome.expect(not why, f"{tool}, {name}: {why}\n(all in {KEPT / tool}.txt)")
    outcome.values[tool] = (outcome.survived - before, "count")


def failure_of(said: str, code: int | None, named: bool) -> str:
    """Return what makes a run worthless for every kernel; empty if it is sound."""
    summary, last = SUMMARY.search(said), "\n".join(said.splitlines()[-6:])
    if code is None:
        return f"ended after {LIMIT_S} s\n{last}"
    if code not in (0, FOUND) or summary is None:
        return f"exit code {code}, {'with' if summary else 'without'} a summary\n{last}"
    if (code == FOUND or int(summary.group(1))) and not named:
        return f"errors that name none of the kernels\n{last}"
    return ""
