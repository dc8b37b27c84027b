"""Servers of right tokens with one fault each, behind OpenAI's API; tokens are the merged models'."""

import asyncio
import itertools
import json
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from experiments.conformance.world import BASE, COUNT, PREFIX, Tokens, World, leaked, loaded
from tests.serve.world import served


class Ask(NamedTuple):
    """One request, by the name that it came under."""

    model: str
    ids: Tokens
    stream: bool


class RightServer:
    """Answers with the right tokens of the prompts that the world knows, and with ``w1`` else; ``fields`` as below."""

    loads = True  # requests may load adapters
    keeps_limit = True  # of tokens
    key: str | None = None

    def __init__(self, world: World, **fields: Any) -> None:
        self.world, self.prompts = world, {prompt.ids: prompt for prompt in world.prompts}
        self.models = {name: name for name in world.models}  # served name -> adapter whose weights it has
        self.asked = Counter[str]()  # requests by name; the first one asks whether the model is there
        self.groups: list[int] = []  # sizes of the next groups of requests that are served beside each other; then 1
        self.waiting: list[tuple[Ask, asyncio.Future[list[Ask]]]] = []
        vars(self).update(fields)

    def tokens(self, name: str, ids: Tokens, beside: list[Ask]) -> Tokens:
        """Tokens of one request; ``beside``: its group, this one included."""
        return self.right(self.models[name], ids)

    def right(self, model: str, ids: Tokens) -> Tokens:
        prompt = self.prompts.get(ids)
        return (1,) * COUNT if prompt is None or model not in prompt.answers else prompt.answers[model]

    def load(self, name: str, folder: str) -> None:
        self.models[name] = folder.rpartition("/")[2]

    def unload(self, name: str) -> None:
        del self.models[name]

    def serve(self) -> AbstractContextManager[str]:
        """A real server; its address."""
        app = FastAPI()
        app.post("/v1/completions")(self._complete)
        if self.loads:
            app.post("/v1/load_lora_adapter")(self._load)
            app.post("/v1/unload_lora_adapter")(self._unload)
        return served(app)

    async def _load(self, body: dict[str, Any]) -> Response:
        if body["lora_name"] in self.models and not body.get("load_inplace"):
            return _error(400, "loaded already")
        self.load(body["lora_name"], body["lora_path"])
        return Response("loaded")

    async def _unload(self, body: dict[str, Any]) -> Response:
        self.unload(body["lora_name"])
        return Response("unloaded")

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        name, prompt = body["model"], body["prompt"]
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "no key")
        if name not in self.models:
            return _error(404, f"no model {name}")
        ids = tuple(int(word[1:]) for word in prompt.split())
        ask = Ask(name, ids, bool(body.get("stream")))
        beside = await self._group(ask) if body["max_tokens"] == COUNT else [ask]
        self.asked[name] += 1
        tokens = self.tokens(name, ids, beside)[: body["max_tokens"] if self.keeps_limit else None]
        words = [f"w{token} " for token in tokens]
        if not ask.stream:
            return JSONResponse({"choices": [{"index": 0, "text": "".join(words), "finish_reason": "length"}]})
        events = [json.dumps({"choices": [{"index": 0, "text": word}]}) for word in words]
        return Response("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]), media_type="text/event-stream")

    async def _group(self, request: Ask) -> list[Ask]:
        """The requests of its group, once all of them are here."""
        here = asyncio.get_running_loop().create_future()
        self.waiting.append((request, here))
        if len(self.waiting) >= (self.groups[0] if self.groups else 1):
            group, self.waiting, self.groups = self.waiting, [], self.groups[1:]
            for _, future in group:
                future.set_result([ask for ask, _ in group])
        return await here


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


class SlotZeroAboveThreshold(RightServer):
    """Serves every adapter with the first one's weights, where more requests run than its fast path has room for."""

    def tokens(self, name: str, ids: Tokens, beside: list[Ask]) -> Tokens:
        crowded = len(beside) > 32 and name != BASE
        return self.right(self.world.models[1] if crowded else self.models[name], ids)


class PrefixCacheWithoutAdapter(RightServer):
    """Takes the keys and values of a prefix that it has seen, whichever adapter made them; computed by the models."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.full, self.owner = {name: loaded(world, name) for name in world.models}, dict[Tokens, str]()

    def tokens(self, name: str, ids: Tokens, beside: list[Ask]) -> Tokens:
        owner = self.owner.setdefault(ids[:PREFIX], name) if len(ids) > PREFIX else name
        if owner == name:
            return self.right(name, ids)
        return tuple(leaked(self.full[name], self.full[owner], torch.tensor([ids]))[0].tolist())


class KeepsOldWeights(RightServer):
    """Remembers the weights of a name also after it was unloaded."""

    def load(self, name: str, folder: str) -> None:
        self.models[name] = vars(self).setdefault("first", {}).setdefault(name, folder.rpartition("/")[2])


class NeverUnloads(RightServer):
    """Says that an adapter is unloaded, and serves it."""

    def unload(self, name: str) -> None:
        pass

    async def _load(self, body: dict[str, Any]) -> Response:
        return await super()._load({**body, "load_inplace": True})


class MixesStreams(RightServer):
    """Gives the second half of a stream to the stream that came before it."""

    def tokens(self, name: str, ids: Tokens, beside: list[Ask]) -> Tokens:
        own, streams = super().tokens(name, ids, beside), [ask for ask in beside if ask.stream]
        place = next((n for n, ask in enumerate(streams) if ask.model == name and ask.ids == ids), None)
        other = streams[place - 1] if place is not None and len(streams) > 1 else Ask(name, ids, False)
        return own[: COUNT // 2] + self.right(self.models[other.model], other.ids)[COUNT // 2 :]


class SpoiledByPoison(RightServer):
    """Gives one token to all while it holds a poisoned adapter."""

    def tokens(self, name: str, ids: Tokens, beside: list[Ask]) -> Tokens:
        spoiled = any(loaded.startswith("poison") for loaded in self.models)
        return (0,) * COUNT if spoiled else super().tokens(name, ids, beside)


class ChangesItsMind(RightServer):
    """Answers a prompt another way each time it is asked."""

    turns = itertools.count()

    def tokens(self, name: str, ids: Tokens, beside: list[Ask]) -> Tokens:
        return (next(self.turns) % 8,) * COUNT
