"""The program of the docs on one and on two ranks that torchrun starts (ranks as threads: `test_llama`)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def torchrun(ranks: int, program: Path) -> str:
    """Standard output of ranks that are started the way a user does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--log-dir", str(program.parent / "logs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, env=environment, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_program_of_the_docs_gives_the_same_tokens_on_one_and_two_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    match = re.search(r"cat > two_ranks\.py <<'EOF'\n(.*?)\nEOF\n\$ (.*?)\n", page, flags=re.DOTALL)
    assert match, "docs/distributed.md has no two_ranks.py"
    assert match.group(2) == "torchrun --nproc-per-node 2 two_ranks.py"
    program = tmp_path / "two_ranks.py"
    program.write_text(match.group(1))
    tokens = json.loads(torchrun(2, program))
    assert [len(generated) for generated in tokens] == [8, 8]
    assert tokens == json.loads(torchrun(1, program))
