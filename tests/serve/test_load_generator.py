"""A public load generator from PyPI, guidellm, in an environment of its own, against a server of a tiny checkpoint."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from tests.serve.world import make_world, served

ROOT = Path(__file__).resolve().parents[2]
GUIDELLM = "guidellm==0.8.1"
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
REQUESTS, PROMPT, NEW = 12, 16, 9  # tokens
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def guidellm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program, in an environment that has this one's packages (torch, transformers) where its pins agree.

    It wants click 8.4, constraints.txt has 8.5, and other pins of this project stay as they are.
    """
    home = tmp_path_factory.mktemp("guidellm")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(home / "wheel"), GUIDELLM]
    found = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=300)
    if found.returncode:
        pytest.skip(f"{GUIDELLM} cannot be had: {found.stderr.strip().splitlines()[-1]}")
    subprocess.run([sys.executable, "-m", "venv", str(home / "env")], check=True)
    python = home / "env" / "bin" / "python"
    own = subprocess.run([str(python), "-c", PURELIB], capture_output=True, text=True, check=True).stdout.strip()
    Path(own, "parent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (home / "pins.txt").write_text("\n".join(pin for pin in pins if not pin.startswith("click==")))
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(home / "pins.txt"), GUIDELLM]
    subprocess.run(pip, check=True, timeout=800)
    yield python.with_name("guidellm")
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """World of words, its engine with fewer slots than adapters, and the address of a server."""
    world = make_world(tmp_path_factory.mktemp("load"), 4, words=True)
    engine, app = world.app(4, {"max_loras": 3})
    with served(app) as url:
        yield world, engine, url


def test_guidellm_gets_all_its_answers(guidellm: Path, running: Any, tmp_path: Path) -> None:
    world, engine, url = running
    options = {
        "backend": f"kind=openai_http,target={url},model=tenant-2",
        "profile": "kind=concurrent,streams=3",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={world.checkpoint}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={NEW}",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    command = [str(guidellm), "run", *(f"--{name}={value}" for name, value in options.items()), "--disable-console"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [len(requests[kind]) for kind in ("successful", "errored", "incomplete")] == [REQUESTS, 0, 0], requests
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == NEW
        assert request["input_metrics"]["text_tokens"] >= PROMPT
        assert len(request["output"].split()) == NEW
        assert request["info"]["timings"]["token_iterations"] == NEW, "each token came by itself"
    assert not engine.has_unfinished()
