"""A tiny checkpoint with text and adapters on disk, and servers of it."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from punica.adapters import LoRARequest, write_random_adapter
from punica.engine import Engine, Request
from punica.serve.app import Settings, make_app
from punica.serve.backend import Backend, Call, Metrics, SteppingThread
from punica.serve.errors import ApiError
from punica.serve.server import Server, listen
from punica.serve.stepper import EngineStepper
from tests.world import CHAT, END, VOCAB, byte_tokenizer, write_backbone

ROOT = Path(__file__).resolve().parents[2]
LONG = {"model": "tenant-0", "prompt": "a", "ignore_eos": True, "max_tokens": 120}
"""The body of a completion that takes the whole context."""
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "initializer_range": 0.2, "eos_token_id": END, "bos_token_id": None,
}  # fmt: skip


class EngineThread(SteppingThread):
    """An engine in a thread of the test's process, which reads its state."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(EngineStepper(engine), Metrics())
        self.engine = engine


@dataclass(frozen=True)
class World:
    """Checkpoint folder and adapters of different ranks, ``tenant-0`` and so on."""

    checkpoint: Path
    adapters: list[LoRARequest]

    def engine(self, count: int = 3, **sizes: Any) -> Engine:
        """An engine with the first ``count`` adapters."""
        sizes = {"max_batch_size": 8, "max_model_len": 128, "max_lora_rank": 8, **sizes}
        return Engine.from_pretrained(self.checkpoint, self.adapters[:count], device="cpu", **sizes)

    def app(self, count: int = 3, sizes: dict[str, Any] | None = None, **fields: Any) -> tuple[Engine, FastAPI]:
        """An engine and an application that serves it; ``fields``: of its settings."""
        engine = self.engine(count, **(sizes or {}))
        return engine, make_app(EngineThread(engine), Settings("tiny", self.adapters[:count], **fields))


def make_world(home: Path, count: int, words: bool = False) -> World:
    """Write the checkpoint and ``count`` adapters; with ``words`` its text tells every token."""
    tokenizer = word_tokenizer() if words else byte_tokenizer()
    made, adapters = write_backbone(home / "tiny", {}, tokenizer, seed=3, **SIZES), []
    for number in range(count):
        folder = home / "adapters" / f"tenant-{number}"
        write_random_adapter(folder, made.config, rank=1 + number % 8, seed=number)
        adapters.append(LoRARequest(folder.name, number + 1, str(folder)))
    return World(made.folder, adapters)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Token ``n`` is the word ``wn``; the last one ends a text."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(END)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    made.chat_template = CHAT
    return made


async def check_stop(backend: Backend) -> None:
    """Start and stop a backend: what has ended stays, what has not ends with an error, as does what comes later."""
    backend.start()
    ended, unfinished = (Call([Request(name, [1], count)], False) for name, count in (("a", 1), ("b", 120)))
    await backend.submit(ended)
    await backend.submit(unfinished)
    while ended.num_unfinished:
        await asyncio.sleep(0.01)
    await backend.stop()
    assert [len(piece.token_ids) async for batch in ended.batches() for piece in batch] == [1]
    with pytest.raises(ApiError, match="the server is stopping"):
        await anext(unfinished.batches())
    with pytest.raises(ApiError, match="the server is stopping") as caught:
        await backend.submit(Call([Request("c", [1], 1)], False))
    backend.abort(unfinished)
    assert (caught.value.status, backend.health) == (503, "failed")


def state_of(engine: Engine) -> dict[str, Any]:
    """What requests take of an engine: blocks, places in batch and queue, pins, versions of adapters."""
    assert engine.manager is not None
    return {
        "free blocks": engine.blocks.num_free,
        "unfinished": engine.has_unfinished(),
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "pinned": set(engine.manager.pinned_adapters),
        "adapters": {number for number in engine.manager.list_adapters()},
    }


def text_of(engine: Engine, prompt: Any, adapter: LoRARequest | None, new: int) -> str | None:
    """Greedy text of one prompt, served alone."""
    return engine.generate([prompt], adapter, new)[0].text


@contextmanager
def served(app: FastAPI, **fields: Any) -> Iterator[str]:
    """A real server on a free port of this machine; its address. ``fields``: of the server."""
    with serving(app, **fields) as (_, address):
        yield address


@contextmanager
def serving(app: FastAPI, **fields: Any) -> Iterator[tuple[Server, str]]:
    """A real server likewise: itself and its address."""
    if not hasattr(app.state, "backend"):  # an application around ours
        app.state.backend = SimpleNamespace(cut=lambda: None)
    server = Server(app, log_level="warning", **{"drain_s": 0, "grace_s": 30, **fields})
    sockets = listen("127.0.0.1", 0)
    address = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server, address
    finally:
        server.should_exit = True
        thread.join()


def post(url: str, path: str = "completions", **body: Any) -> Any:
    return httpx2.post(f"{url}/v1/{path}", json=body, trust_env=False, timeout=300)


def load(client: Any, name: str, path: Path | str, **fields: Any) -> Any:
    """Answer to a request that loads an adapter; ``client``: of the test, or of a real server."""
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


def text(client: Any, name: str, new: int = 8) -> str:
    """Text of a completion by a model."""
    answer = client.post("/v1/completions", json={"model": name, "prompt": "hello", "max_tokens": new})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def get(url: str, path: str) -> Any:
    return httpx2.get(f"{url}{path}", trust_env=False, timeout=300)


def metric(url: str, name: str) -> float:
    (found,) = re.findall(rf"^{name} (\S+)$", get(url, "/metrics").text, re.MULTILINE)
    return float(found)


def events(text: str) -> list[dict[str, Any]]:
    """Data of server-sent events, without the end mark."""
    *data, last = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert last == "[DONE]"
    return [json.loads(one) for one in data]


def python(*words: Any, **fields: Any) -> "subprocess.Popen[Any]":
    """Start a program that imports this repository, without a GPU."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, *map(str, words)], env=environment, **fields)


def wait_until(condition: Any, seconds: float = 600.0) -> None:
    """Poll until a condition holds; on a busy machine a server takes minutes to start."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
