"""The README's quickstart runs as written, and every make target it names exists."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

from experiments.harness.catalogue import experiments
from experiments.harness.settings import keys_read, refuse_unread

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_quickstart_runs_as_written() -> None:
    code = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert code, "the README has no python block"
    done = subprocess.run([sys.executable, "-c", code.group(1)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert [len(generated) for generated in tokens] == [8, 8, 8, 8]
    assert len({tuple(generated) for generated in tokens}) == 4, "the adapters make no difference"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^\$ )make ([a-z-]+)", README, flags=re.MULTILINE))
    assert named, "the README names no make target"
    assert named <= targets


def command_lines() -> list[tuple[str, list[str]]]:
    """Every `$ make reproduce ARGS=...` and `$ python -m experiments.<figure> ...` of the README: name, overrides."""
    lines = re.findall(r"^\$ (?:make (reproduce) ARGS=|python -m experiments\.)(.*)$", README, flags=re.MULTILINE)
    found = []
    for command, rest in lines:
        words = shlex.split(rest, comments=True)
        given = words[0].split() if command else words[1:]
        found.append((command or words[0], [word for word in given if not word.startswith("--")]))
    return found


def test_no_command_gives_figures_what_they_do_not_read() -> None:
    known = {experiment.name: experiment for experiment in experiments()}
    checked = 0
    for name, given in command_lines():
        if name == "reproduce":
            (chosen,) = (word for word in given if word.startswith("figures="))
            reads = set.union(*map(keys_read, experiments(chosen.removeprefix("figures=[").strip("]").split(","))))
            refuse_unread(given, {"figures", *reads}, "README")
        elif name in known:
            refuse_unread([word for word in given if word != "job"], keys_read(known[name]), "README")
        checked += name == "reproduce" or name in known
    assert checked >= 4
