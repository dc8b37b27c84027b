"""Client of any server that has OpenAI's API and serves adapters by model name: streams, their errors, and loads."""

import asyncio
import json
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
from pydantic import HttpUrl

from experiments.harness.schema import ConfigError
from experiments.servers.stream import Job
from experiments.workload.arrivals import Span

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it reports every request

PATIENCE_S = 10.0
"""Longest wait for a connection, and for an answer that needs no model; for other answers, a run has a deadline."""
KEEP_ALIVE_S = 2.0
"""Time until an idle connection is closed: shorter than at servers (uvicorn: 5 s), else requests meet closed ones."""
TICK_S = 0.005  # time between two looks at the event loop's lag
BACK_OFF_S = 0.1
"""Pause of one place of a closed loop after an error, so that a dead server is not asked without end."""
CONNECTION, BROKEN, IN_STREAM = "no connection", "broken stream", "error in stream"
NO_USAGE, WRONG_COUNT, UNFINISHED = "no usage", "wrong token count", "unfinished"
FIELDS = IGNORE_EOS, MIN_TOKENS = "ignore_eos", "min_tokens"
"""Fields of vLLM, SGLang and this server that keep an answer from ending early."""
KEY = "SERVER_API_KEY"  # environment variable with the API key


@dataclass(frozen=True)
class Server:
    """A server; `base` is empty where all listed models are named as adapters."""

    url: str
    label: str
    base: str
    adapters: tuple[str, ...]


def address(url: str, option: str) -> str:
    """Return `url` without a final slash and /v1. `ConfigError`: not http, or with a password (it would be kept)."""
    try:
        parts = HttpUrl(url)
    except ValueError:
        raise ConfigError(f"{option}={url!r} must be an address like http://127.0.0.1:8000") from None
    if parts.username or parts.password:
        raise ConfigError(f"{option} has a user or a password in it: give the key by the environment instead")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def look_up(url: str, key: str, adapters: Sequence[str] = ()) -> Server:
    """Ask the server at `url` for its models; `adapters`: which are adapters, where it does not say. `ConfigError`: no
    list of models, or no word on which of them are adapters.
    """
    url = address(url, "figure.url")
    try:
        with httpx2.Client(base_url=url, headers=_headers(key), timeout=PATIENCE_S, trust_env=False) as client:
            models = client.get("/v1/models").raise_for_status().json()["data"]
            version = client.get("/version")
        found = tuple(adapters) or tuple(one["id"] for one in models if one.get("parent"))
        base = next((one["id"] for one in models if not one.get("parent") and one["id"] not in found), "")
        told = str(version.json().get("version", "")) if version.status_code == 200 else ""
        name = f"{models[0].get('owned_by') or 'server'} {told}".strip()
    except (httpx2.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"figure.url={url} does not list its models ({error}): start the server first, or give its API key by {KEY}"
        ) from None
    if not found:
        raise ConfigError(
            f"{url} lists no adapters (models with a parent), but {', '.join(one['id'] for one in models)}: load some "
            "there, or name models with figure.url_adapters=[...]"
        )
    return Server(url, name, base, found)


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass
class Answer:
    """Answer to one request, in seconds from the start of a run. `at`: due time of an arrival, or the time of sending.
    `tokens`, `prompt_tokens`: the usage that the stream ends with. `pieces`: arrivals of events with a choice. `error`:
    empty after success; "http 429" and the like, or a constant of this module. `text`: of all pieces.
    """

    at: float
    job: Job
    pieces: list[float] = field(default_factory=list)
    tokens: int | None = None
    prompt_tokens: int | None = None
    end: float | None = None
    error: str = UNFINISHED
    detail: str = ""
    text: str = ""


class Client:
    """Client of one server, with as many connections as there are requests. `fields`: those of `FIELDS` that the server
    takes. With one of them, an answer of fewer tokens than asked for is an error.
    """

    def __init__(self, server: Server, key: str, fields: Collection[str]) -> None:
        self.fields = fields
        self._http = httpx2.AsyncClient(
            base_url=server.url, headers=_headers(key), trust_env=False,
            timeout=httpx2.Timeout(None, connect=PATIENCE_S),
            limits=httpx2.Limits(keepalive_expiry=KEEP_ALIVE_S),
        )  # fmt: skip
        self.start = time.perf_counter()

    async def __aenter__(self) -> "Client":
        await self._http.__aenter__()
        self.start = time.perf_counter()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(*error)

    def now(self) -> float:
        return time.perf_counter() - self.start

    async def send(self, answer: Answer) -> None:
        """Send the job of `answer` and fill it in; no error of the server is raised."""
        job, begun = answer.job, False
        given = {IGNORE_EOS: True, MIN_TOKENS: job.new_tokens}
        body = {
            "model": job.model, "prompt": job.prompt, "max_tokens": job.new_tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, **{name: given[name] for name in self.fields},
        }  # fmt: skip
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                begun = True
                if response.status_code == 200:
                    answer.error = await self._read(response, answer)
                else:
                    answer.detail = (await response.aread()).decode(errors="replace")
                    answer.error = f"http {response.status_code}"
        except (httpx2.HTTPError, httpx2.SSEError, OSError) as error:
            answer.error, answer.detail = BROKEN if begun else CONNECTION, repr(error)
        answer.end = self.now()

    async def _read(self, response: httpx2.Response, answer: Answer) -> str:
        texts = 0
        async for event in httpx2.EventSource(response):
            answer.detail = event.data
            if event.data == "[DONE]":
                return self._judged(answer, texts)
            try:
                chunk = json.loads(event.data)
                if chunk.get("error"):
                    return IN_STREAM
                if chunk.get("choices"):
                    answer.pieces.append(self.now())
                    text = chunk["choices"][0].get("text")
                    texts, answer.text = texts + bool(text), answer.text + (text or "")
                if usage := chunk.get("usage"):
                    answer.tokens, answer.prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
            except (ValueError, TypeError, KeyError, AttributeError):
                return BROKEN
        return BROKEN

    def _judged(self, answer: Answer, texts: int) -> str:
        """Compare usage with what was asked for, and with the pieces of text, of which each has a token or more."""
        job, tokens = answer.job, answer.tokens
        answer.detail = f"usage says {answer.prompt_tokens} and {tokens} tokens"
        if tokens is None:
            return NO_USAGE
        is_short = bool(self.fields) and tokens < job.new_tokens
        is_wrong = is_short or not texts <= tokens <= job.new_tokens or answer.prompt_tokens != len(job.prompt)
        return WRONG_COUNT if is_wrong or not answer.pieces else ""


@dataclass
class Run:
    """Answers in order of their beginning, and lags of the event loop in the measured time, in seconds."""

    span: Span
    answers: list[Answer] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)


async def run(client: Client, jobs: Iterator[Job], span: Span, load: int | Sequence[float]) -> Run:
    """Keep `load` requests in flight, each followed by the next job, or send one at each of these seconds, in any case.
    Measured are requests that begin within the measured time of `span`. Others begin until those are done, or until the
    deadline, which cancels the rest.
    """
    found, tasks, end = Run(span), list[asyncio.Task[None]](), span.measured[1]

    def begin(at: float) -> asyncio.Task[None]:
        found.answers.append(Answer(at, next(jobs)))
        tasks.append(group.create_task(client.send(found.answers[-1])))
        return tasks[-1]

    async def place() -> None:
        while True:
            task = begin(client.now())
            answer = found.answers[-1]
            await task
            if answer.error:
                await asyncio.sleep(BACK_OFF_S)

    async def arrive(times: Sequence[float]) -> None:
        for at in times:
            if (wait := at - client.now()) > 0:  # late arrivals begin at once, before `end` is looked at
                await asyncio.sleep(wait)
            begin(at)

    sources = [place() for _ in range(load)] if isinstance(load, int) else [arrive(load)]
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(one) for one in (_watch(client, found), *sources)]
        await asyncio.sleep(end - client.now())
        if counted := [task for task in tasks if not task.done()]:
            await asyncio.wait(counted, timeout=max(0.0, span.deadline - client.now()))
        for task in (*others, *tasks):
            task.cancel()
    return found


async def _watch(client: Client, run: Run) -> None:
    """Note by how much a sleep of `TICK_S` is late, over the measured time."""
    begin, end = run.span.measured
    await asyncio.sleep(begin - client.now())
    while (before := client.now()) < end:
        await asyncio.sleep(TICK_S)
        run.lags.append(max(0.0, client.now() - before - TICK_S))
