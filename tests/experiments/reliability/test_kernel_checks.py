"""Kernels under compute-sanitizer: every kernel is called, and what a tool says is judged, by a fake of it."""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

import torch

from experiments.reliability import kernel_calls, kernels
from experiments.reliability.kernels import FOUND, TOOLS
from experiments.reliability.trial import Outcome, Setting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = sorted(kernel_calls.kernels())
HEAD = "========= COMPUTE-SANITIZER\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
NO_RACE = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
OUT_OF_BOUNDS = """\
========= Invalid __global__ write of size 2 bytes
=========     at _swiglu_kernel+0x2f0 in swiglu.py:38
=========     by thread (31,0,0) in block (2,1,0)
=========     Access at 0x7f2b4de01a00 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2b4de00000 of size 6,656 bytes
=========
========= ERROR SUMMARY: 1 error
"""
RACE = """\
========= Warning: Race reported between Write access at _combine_kernel+0x90 in decode_attention.py:188
=========     and Read access at _combine_kernel+0x100 in decode_attention.py:190 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""
ELSEWHERE = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4>(int)+0x60
=========     by thread (122,0,0) in block (0,0,0)
=========     Address 0x7f936fa001e8
=========
========= ERROR SUMMARY: 1 error
"""
DIED = """\
Traceback (most recent call last):
RuntimeError: CUDA error: unspecified launch failure
========= Target application returned an error
========= ERROR SUMMARY: 0 errors
"""
REFUSED = """\
========= Error: Device not supported. Please refer to the "Supported Devices" section of the sanitizer documentation
=========
RuntimeError: CUDA error: unknown error (999)
========= ERROR SUMMARY: 1 error
"""


def names(*without: str) -> str:
    return "".join(f"{name}\n" for name in ALL if name not in without)


def judged(tool: str, said: str, code: int | None) -> Outcome:
    outcome = Outcome()
    kernels.judge(outcome, tool, ALL, HEAD + said, code)
    assert outcome.tried == len(ALL)
    assert outcome.values[tool] == (outcome.survived, "count")
    return outcome


@pytest.mark.parametrize(("tool", "said"), [("memcheck", names() + CLEAN), ("racecheck", names() + NO_RACE)])
def test_a_clean_run_loses_nothing(tool: str, said: str) -> None:
    outcome = judged(tool, said, 0)
    assert (outcome.lost, outcome.notes) == (0, [])


@pytest.mark.parametrize(
    ("said", "code", "lost"),
    [
        (OUT_OF_BOUNDS + names(), FOUND, "_swiglu_kernel: 1 report lines\n========= Invalid __global__ write"),
        (names() + RACE, 0, "_combine_kernel: 2 report lines\n========= COMPUTE-SANITIZER\n========= Warning: Race"),
        (names("_argmax_kernel") + CLEAN, 0, "_argmax_kernel: not launched"),
        (names() + "========= Internal Sanitizer Error: The Sanitizer encountered an error while launching "
         "_argmax_kernel and didn't track the launch.\n" + CLEAN, 0, "_argmax_kernel: 1 report lines"),
    ],
)  # fmt: skip
def test_a_kernel_that_is_named_or_did_not_run_is_lost_alone(said: str, code: int, lost: str) -> None:
    outcome = judged("memcheck", said, code)
    assert outcome.lost == 1
    assert f"memcheck, {lost}" in outcome.notes[0]
    assert "memcheck.txt" in outcome.notes[0]


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        (names() + DIED, 1, "exit code 1, with a summary\n.*unspecified launch failure"),
        (names(), 0, "exit code 0, without a summary\n"),
        (names() + CLEAN, None, f"ended after {kernels.LIMIT_S} s"),
        (names() + ELSEWHERE, FOUND, "errors that name none of the kernels"),
        (names() + CLEAN, FOUND, "errors that name none of the kernels"),
    ],
)
def test_a_run_that_is_not_sound_loses_every_kernel(said: str, code: int | None, why: str) -> None:
    outcome = judged("initcheck", said, code)
    assert outcome.survived == 0
    assert re.search(why, outcome.notes[0], re.DOTALL)


@pytest.fixture
def tool_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Put a compute-sanitizer that says a text and ends with a code in front of the PATH."""
    monkeypatch.setattr(kernels, "KEPT", tmp_path / "kept")

    def say(text: str, code: int = 0, before: str = "") -> None:
        script, said = tmp_path / kernels.SANITIZER, tmp_path / "said"
        said.write_text(text)
        script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n{before}\ncat {said}\nexit {code}\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return say


def run(folder: Path, count: int = len(TOOLS)) -> Outcome:
    return kernels.kernel_checks(Setting(count, 0, "cuda", folder))


def test_each_tool_runs_once_over_all_kernels(tool_says, tmp_path: Path) -> None:
    tool_says(HEAD + names() + CLEAN)
    outcome = run(tmp_path)
    assert (outcome.tried, outcome.lost) == (len(TOOLS) * len(ALL), 0)
    commands = (tmp_path / "words").read_text().splitlines()
    assert [words.split()[1] for words in commands] == list(TOOLS)
    filtered = [words.count("--kernel-name kernel_name=") for words in commands]
    assert filtered == [len(ALL)] * 3 + [0]
    assert all(words.endswith("-m experiments.reliability.kernel_calls cuda") for words in commands)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted(f"{tool}.txt" for tool in TOOLS)


def test_a_device_that_is_refused_is_one_loss(tool_says, tmp_path: Path) -> None:
    tool_says(HEAD + REFUSED, 1)
    outcome = run(tmp_path)
    assert (outcome.tried, outcome.survived) == (1, 0)
    assert outcome.notes == ["memcheck checked no kernel: Device not supported (a GPU behind gVisor is not)"]


def test_a_tool_that_takes_too_long_ends_with_its_children(tool_says, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "LIMIT_S", 2.0)
    tool_says("", before=f"sleep 900 & echo $! > {tmp_path}/child; wait")
    outcome = run(tmp_path, 1)
    assert (outcome.tried, outcome.survived) == (len(ALL), 0)
    child = (tmp_path / "child").read_text().strip()
    assert not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text()


def test_every_kernel_is_called_in_the_interpreter(capsys) -> None:
    kernel_calls.main(DEVICE)
    assert capsys.readouterr().out.split() == ALL
    assert len(ALL) >= 19


def test_a_kernel_that_is_forgotten_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "CALLS", (kernel_calls.slot,))
    with pytest.raises(SystemExit, match=r"not launched: \['_add_rms_norm_kernel'"):
        kernel_calls.main(DEVICE)
