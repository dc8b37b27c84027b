"""One generation call as an ASGI response: admitted, tokenized, submitted, streamed or collected, cancelled."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from punica.adapters import LoRARequest
from punica.adapters.request import LOAD_ERROR
from punica.checks import clip
from punica.engine import Mixture, Request, adapters_of, as_sampling_params
from punica.engine.text import TextCodec, growing_text
from punica.serve.backend import Backend, Call
from punica.serve.errors import RETRY_AFTER, ApiError, refused
from punica.serve.forms import ChatForm, ChoiceStrings, CompletionForm, TextEvents, TokenStrings, event, usage
from punica.serve.protocol import AnyBody, ChatBody, params_of, room_for
from punica.serve.stepper import Piece

Adapter = LoRARequest | Mixture | None
_log = logging.getLogger(__name__)
_ENGINE_NAMES = {name: name for name in ("stop_token_ids", "logit_bias", "bad_words", "prompt")}
Prompt = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a prompt, and end tokens that its chat template brings."""


class Generator:
    """State shared by all generation calls: the engine, its tokenizer, and the room for ``limit`` generations."""

    def __init__(self, backend: Backend, codec: TextCodec, limit: int) -> None:
        self.backend, self.codec, self.strings = backend, codec, TokenStrings(codec)
        self.tokenizing = ThreadPoolExecutor(1, "punica-tokenizer")  # long prompts stop neither event loop nor steps
        self._limit, self._taken = limit, 0

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Hold room for ``count`` generations. ApiError 400: more than ever fit; 429 with Retry-After: full now."""
        if count > self._limit:
            raise ApiError(400, f"{count} generations in one call, this server takes {self._limit}; send fewer", "n")
        if self._taken + count > self._limit:
            raise ApiError(
                429, f"{self._taken} generations wait or run, the limit is {self._limit}; retry later",
                code="server_overloaded", headers=RETRY_AFTER,
            )  # fmt: skip
        self._taken += count
        try:
            yield
        finally:
            self._taken -= count

    async def encode(self, body: AnyBody, adapter: Adapter) -> list[Prompt]:
        """Encode all prompts. ApiError 400: the tokenizer or its chat template refuses one."""
        folder = adapter.absolute_path if isinstance(adapter, LoRARequest) else None
        arguments = body.chat_template_kwargs if isinstance(body, ChatBody) else None

        def encode() -> list[Prompt]:
            found: list[Prompt] = []
            for prompt in cast(list[Any], body.prompts):
                is_encoded = not isinstance(prompt, str) and isinstance(prompt[0], int)
                tokens = prompt if is_encoded else self.codec.encode(prompt, folder, arguments)
                found.append((tuple(tokens), self.codec.end_token_ids(prompt, folder)))
            return found

        try:
            return await asyncio.get_running_loop().run_in_executor(self.tokenizing, encode)
        except Exception as error:  # whatever a tokenizer raises
            raise ApiError(400, _told(error, adapter), body.prompt_name) from error

    async def submit(self, call: Call, adapter: Adapter) -> None:
        """Queue the requests of a call. ApiError: refused."""
        try:
            await self.backend.submit(call)
        except FileNotFoundError as error:
            raise ApiError(404, _told(error, adapter), "model", "model_not_found") from error
        except (TypeError, ValueError) as error:
            raise refused(_told(error, adapter), _ENGINE_NAMES) from error


class GenerationResponse(Response):
    """Answer to one completion or chat; aborted in the engine when its client disconnects."""

    def __init__(self, generator: Generator, body: AnyBody, adapter: Adapter) -> None:
        self.background = None
        self._generator, self._body, self._adapter = generator, body, adapter
        form = self._form = ChatForm() if isinstance(body, ChatBody) else CompletionForm()
        self._head = {
            "id": f"{form.prefix}{uuid.uuid4().hex}", "object": form.chunk if body.stream else form.whole,
            "created": int(time.time()), "model": body.model,
        }  # fmt: skip
        self._num_prompt = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._serve(scope, receive, send))
        tasks = [work, asyncio.ensure_future(_disconnected(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not work.cancelled():
            work.result()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._body
        with self._generator.room(len(body.prompts) * (body.n or 1)):
            prompts = await self._generator.encode(body, self._adapter)
            self._num_prompt = sum(len(tokens) for tokens, _ in prompts)
            call = Call(self._requests(prompts), streams=bool(body.stream))
            try:
                await self._generator.submit(call, self._adapter)
                if body.stream:
                    await self._stream(call, send)
                    return
                answer = await self._collect(call)
            finally:
                self._generator.backend.abort(call)  # what has not ended
        await JSONResponse(answer)(scope, receive, send)  # a client that reads slowly takes no room

    def _requests(self, prompts: list[Prompt]) -> list[Request]:
        body, facts = self._body, self._generator.backend.facts
        requests: list[Request] = []
        for tokens, end_tokens in prompts:
            room = room_for(body, len(tokens), facts.defaults.params, facts.max_model_len)
            for choice in params_of(body, facts.defaults.params, room, end_tokens).choices():
                name = f"{self._head['id']}-{len(requests)}"
                try:
                    requests.append(Request(name, tokens, choice, self._adapter, body.cache_salt or ""))
                except (TypeError, ValueError) as error:
                    raise ApiError(400, str(error), body.prompt_name) from error
        return requests

    async def _collect(self, call: Call) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [{}] * len(call.requests)
        strings = self._strings(call)
        num_generated = 0
        async for pieces in call.batches():
            for piece in pieces:
                reason = _reason(piece, self._adapter)
                num_generated += len(piece.token_ids)
                text = "" if piece.result is None else piece.result.text or ""
                logprobs = self._logprobs(strings, piece)
                choices[piece.index] = self._form.choice(piece.index, text, logprobs, reason)
        return {**self._head, "choices": choices, "usage": usage(self._num_prompt, num_generated)}

    async def _stream(self, call: Call, send: Send) -> None:
        async def put(chunk: bytes, more_body: bool = True) -> None:
            await send({"type": "http.response.body", "body": chunk, "more_body": more_body})

        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._chunks(call):
                await put(chunk)
        except ApiError as error:  # the status is sent already
            await put(event(error.body))
        await put(b"data: [DONE]\n\n", more_body=False)

    async def _chunks(self, call: Call) -> AsyncIterator[bytes]:
        """Yield server-sent events, those of one step together."""
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        continuous = options is not None and with_usage and options.continuous_usage_stats
        head = self._head
        if with_usage:
            head = {**head, "usage": usage(self._num_prompt, 0) if continuous else None}
        openings = filter(None, map(self._form.opening, range(len(call.requests))))
        chunk = b"".join(event({**head, "choices": [choice]}) for choice in openings)  # sent with the first token
        codec = self._generator.codec
        texts = [growing_text(codec, as_sampling_params(one.params), one.prompt_token_ids) for one in call.requests]
        events, strings, num_generated = TextEvents(self._form, head), self._strings(call), 0
        async for pieces in call.batches():
            for piece in pieces:
                num_generated += len(piece.token_ids)
                if continuous:
                    events.set_usage(usage(self._num_prompt, num_generated))
                is_last, reason = piece.result is not None, _reason(piece, self._adapter)
                text = texts[piece.index].take(piece.token_ids[: piece.num_text], is_last=is_last)
                logprobs = self._logprobs(strings, piece)
                if text or logprobs is not None or reason is not None:
                    chunk += events.of(piece.index, text, logprobs, reason)
            if chunk:
                yield chunk
                chunk = b""
        if with_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._num_prompt, num_generated)})

    def _strings(self, call: Call) -> list[ChoiceStrings]:
        asked, strings = call.requests if self._body.num_logprobs is not None else (), self._generator.strings
        return [ChoiceStrings(strings, as_sampling_params(one.params), one.prompt_token_ids) for one in asked]

    def _logprobs(self, strings: list[ChoiceStrings], piece: Piece) -> Any:
        if not strings or not piece.logprobs:
            return None
        return self._form.logprobs(strings[piece.index].add(piece.logprobs), self._body.num_logprobs or 0)


def _reason(piece: Piece, adapter: Adapter) -> str | None:
    """Return OpenAI's finish reason. ApiError 500 for a request that failed, e.g. for a damaged adapter."""
    if piece.result is None:
        return None
    if piece.result.error is not None:
        raise ApiError(500, _told(piece.result.error, adapter), code="generation_failed")
    return piece.result.finish_reason


def _told(error: object, adapter: Adapter) -> str:
    """Return an error's text for a client, to whom the place of the adapter's folder is not told."""
    text = str(error)
    adapters = adapters_of(adapter)
    if not any(LOAD_ERROR in text or (one.tensors is None and one.absolute_path in text) for one in adapters):
        return text
    _log.warning("an adapter cannot be served: %s", text)
    name = clip(getattr(adapter, "lora_name", None))
    return f"the files of adapter {name} cannot be served as they are now; load it again"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
