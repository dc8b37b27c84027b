"""Trials of a server in a process of its own: load, signals, and random requests to its application."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica-lora[serve]'")
pytest.importorskip("hypothesis", reason="needs the hypothesis package (extra dev)")

import httpx2

from punica.serve.app import Settings, make_app
from punica.serve.server import listen
from tests.reliability.trial import Trial, sized, use_of
from tests.reliability.world import BATCH, MAX_LEN, MAX_RANK, World, expect_nothing_kept, make_world
from tests.serve.random_requests import send, started
from tests.serve.world import EngineThread, wait_until

BASE, SLOTS, ADAPTERS, KINDS = "tiny", 4, 40, 160
CLIENTS = 24
POOL = min(32, (os.cpu_count() or 1) + 4)
"""Most threads of asyncio's pool, which it starts when calls meet."""


@dataclass(frozen=True)
class Served:
    """A running server: its address, its process, and the file of what it prints."""

    url: str
    process: subprocess.Popen[bytes]
    output: Path

    def is_idle(self) -> bool:
        text = httpx2.get(f"{self.url}/metrics", trust_env=False).text
        found = re.findall(r"^punica_requests_(?:running|waiting)(?:{.*})? (\S+)$", text, re.MULTILINE)
        return bool(found) and not any(map(float, found))

    def answers(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health", trust_env=False).status_code == 200
        except httpx2.HTTPError:
            return False


@contextmanager
def serving(world: World, *options: str) -> Iterator[Served]:
    """Start a server of the world's checkpoint and adapters; it is ended with the block."""
    (probe,) = listen("127.0.0.1", 0)
    with probe:
        port = probe.getsockname()[1]
    output = world.trial.folder / f"server-{time.monotonic_ns()}.txt"
    words = [
        sys.executable, "-m", "punica.serve", str(world.backbone.folder), "--port", str(port), "--dtype", "float32",
        "--served-model-name", BASE, "--max-batch-size", str(BATCH), "--max-model-len", str(MAX_LEN),
        "--max-lora-rank", str(MAX_RANK), "--allow-folder", str(world.trial.folder), *options,
    ]  # fmt: skip
    for adapter in world.adapters:
        words += ["--adapter", f"{adapter.lora_name}={adapter.lora_path}"]
    with output.open("wb") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream)
    served = Served(f"http://127.0.0.1:{port}", process, output)
    try:
        wait_until(lambda: process.poll() is not None or served.answers(), 120)
        assert served.answers(), output.read_text()
        yield served
    finally:
        process.kill()
        process.wait()


@sized("load", 300, 1_500, 20_000, seconds=90)
def test_server_soak(trial: Trial) -> None:
    """Requests to a server over ten times more adapters than slots, with clients that vanish and reloads."""
    world = make_world(trial, ADAPTERS)
    expected, choose = world.undisturbed(KINDS), trial.choose

    async def ask(http: httpx2.AsyncClient) -> None:
        """Send a request whose client leaves during its stream, or checks the text; before one in fifty, reload."""
        wish = choose.choice(list(expected))
        adapter = world.adapter(wish)
        if adapter is not None and choose.random() < 0.02:
            trial.injected += 1
            body = {"lora_name": adapter.lora_name, "lora_path": adapter.lora_path, "load_inplace": True}
            answer = await http.post("/v1/load_lora_adapter", json=body)
            trial.expect(answer.status_code == 200, f"reload: {answer.status_code} {answer.text}")
        body = {
            "model": BASE if adapter is None else adapter.lora_name, "prompt": list(wish.prompt),
            "max_tokens": wish.new, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        if choose.random() < 0.1:
            trial.injected += 1
            async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                if choose.random() < 0.5:
                    await anext(response.aiter_lines())
            return
        answer = await http.post("/v1/completions", json=body)
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        trial.expect(text == expected[wish].text, f"{answer.status_code} {text}")

    async def run(http: httpx2.AsyncClient, numbers: range) -> float:
        """Send requests of many clients, each one after the other; return request/s, abandoned ones too."""
        begun, left = time.perf_counter(), iter(numbers)

        async def client() -> None:
            for _ in left:
                await ask(http)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return len(numbers) / (time.perf_counter() - begun)

    async def soak(served: Served) -> None:
        warm, rest = trial.parts()
        async with httpx2.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            for part in warm:
                await run(http, part)
            before = use_of(served.process.pid)
            trial.note_rates([await run(http, part) for part in rest], "request/s")
            await asyncio.to_thread(wait_until, served.is_idle, 60)  # its clients have gone
        trial.note_growth(before, use_of(served.process.pid), POOL)

    with serving(world, "--max-loras", str(SLOTS)) as served:
        asyncio.run(soak(served))


@sized("input", 20, 1_000, 100_000, seconds=60, tiny=20)
def test_api_bodies(trial: Trial) -> None:
    """Random bodies, headers and paths to all routes; each call is served, or refused in OpenAI's form."""
    world = make_world(trial, 3)
    engine = world.engine(max_model_len=32)
    settings = Settings(BASE, world.adapters, roots=[world.backbone.folder.resolve()])
    with started(make_app(EngineThread(engine), settings)) as server:
        statuses = send(server, trial.count, trial.seed, trial.expect)
    trial.injected = sum(number for status, number in statuses.items() if status >= 400)
    trial.values["served"] = (statuses.total() - trial.injected, "count")
    expect_nothing_kept(trial, engine)
