"""The README's quickstart runs as written, and every make target it names exists."""

import ast
import re
import subprocess
import sys
from pathlib import Path

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
