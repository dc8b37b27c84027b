"""The `openai` client against a real server, and the commands of the README."""

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs the openai package (extra dev)")

import httpx2
import openai

from tests.serve.world import ROOT, make_world, python, served, text_of, wait_until

ADAPTERS, NEW = 12, 12
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """World of words, and the address of a server with fewer slots than adapters."""
    world = make_world(tmp_path_factory.mktemp("clients"), ADAPTERS, words=True)
    with served(world.app(ADAPTERS, {"max_batch_size": 4, "max_loras": 5})[1]) as url:
        yield world, f"{url}/v1"


def test_sync_client(running: Any) -> None:
    world, url = running
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    assert {model.id for model in client.models.list()} == {"tiny", *(f"tenant-{n}" for n in range(ADAPTERS))}
    answer = client.completions.create(model="tenant-3", prompt="w1 w2 w3", max_tokens=NEW)
    assert answer.choices[0].text == text_of(world.engine(ADAPTERS), "w1 w2 w3", world.adapters[3], NEW)
    assert answer._request_id
    messages = [{"role": "user", "content": "w1"}]
    options: Any = {"model": "tenant-4", "messages": messages, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    chat = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage == chat.usage
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [2] * 9
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="w1")
    with pytest.raises(openai.BadRequestError, match="best_of") as caught:
        client.completions.create(model="tiny", prompt="w1", best_of=2)
    assert caught.value.param == "best_of"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    world = make_world(tmp_path, 2)
    (tmp_path / "tiny").rename(tmp_path / "checkpoint")
    for adapter, name in zip(world.adapters, ("sql", "poet"), strict=True):
        Path(adapter.absolute_path).rename(tmp_path / "adapters" / name)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (serve,) = re.findall(r"^\$ python (-m punica\.serve checkpoint --adapter .*)$", readme, flags=re.MULTILINE)
    (curl,) = re.findall(r"^\$ (curl localhost.*)$", readme, flags=re.MULTILINE)
    (client,) = re.findall(r'^\$ python (-c "import openai.*)$', readme, flags=re.MULTILINE)
    with python(*shlex.split(serve), "--port", port, cwd=tmp_path) as server:
        try:
            wait_until(lambda: health_of(port) == 200)
            request = shlex.split(curl.replace("localhost:8000", f"127.0.0.1:{port}"))
            answer = json.loads(subprocess.run(request, capture_output=True, check=True, timeout=60).stdout)
            assert answer["model"] == "sql"
            assert answer["usage"]["completion_tokens"] == 16
            program = shlex.split(client.replace("localhost:8000", f"127.0.0.1:{port}"))
            printed = subprocess.run([sys.executable, *program], capture_output=True, check=True, timeout=60, text=True)
            assert printed.stdout.strip()
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(60) in (0, -signal.SIGINT, 130)


def health_of(port: str) -> int | None:
    """Status of ``/health``, ``None`` while there is no server."""
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/health").status_code
    except httpx2.TransportError:
        return None
