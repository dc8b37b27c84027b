"""One streamed completion of OpenAI's API, and the kind of its error."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import httpx2

from experiments.http_load.about import Server
from experiments.http_load.protocol import BrokenStream, ErrorInStream, chunks, headers_of

CONNECT_S = 10.0
"""Longest wait for a connection; for answers, a run has a deadline."""
KEEP_ALIVE_S = 2.0
"""Time until an idle connection is closed: shorter than at servers (uvicorn: 5 s), else requests meet closed ones."""
CONNECTION, BROKEN, IN_STREAM = "no connection", "broken stream", "error in stream"
NO_USAGE, WRONG_COUNT, UNFINISHED = "no usage", "wrong token count", "unfinished"
IGNORE_EOS, MIN_TOKENS = "ignore_eos", "min_tokens"
"""Fields of vLLM, SGLang and this server that keep an answer from ending early."""


@dataclass(frozen=True)
class Job:
    """One request: its model, prompt (text or token ids) and number of new tokens."""

    model: str
    prompt: str | list[int]
    new_tokens: int


@dataclass
class Answer:
    """Answer to one request, in seconds from the start of a run.

    `at`: due time of an arrival, or the time of sending. `tokens`, `prompt_tokens`: the usage that the stream ends
    with. `pieces`: arrivals of events with a choice. `error`: empty after success; "http 429" and the like, or a
    constant of this module.
    """

    at: float
    job: Job
    pieces: list[float] = field(default_factory=list)
    tokens: int | None = None
    prompt_tokens: int | None = None
    end: float | None = None
    error: str = UNFINISHED
    detail: str = ""

    @property
    def first(self) -> float | None:
        """Arrival of the first event with a choice."""
        return self.pieces[0] if self.pieces else None

    @property
    def ended_early(self) -> bool:
        """Check for a right answer with fewer tokens than asked for: only where nothing forbids that."""
        return not self.error and (self.tokens or 0) < self.job.new_tokens


class Client:
    """Client of one server, with as many connections as there are requests.

    `fields`: those of `IGNORE_EOS` and `MIN_TOKENS` that the server takes. With one of them, an answer of fewer tokens
    than asked for is an error.
    """

    def __init__(self, server: Server, key: str, fields: Collection[str]) -> None:
        self.fields = frozenset(fields)
        self._http = httpx2.AsyncClient(
            base_url=server.url, headers=headers_of(key), trust_env=False,
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
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
        """Return the seconds since the start of the run."""
        return time.perf_counter() - self.start

    async def send(self, answer: Answer) -> None:
        """Send the job of `answer` and fill it in; no error of the server is raised."""
        begun = False
        try:
            async with self._http.stream("POST", "/v1/completions", json=self._body(answer.job)) as response:
                begun = True
                if response.status_code == 200:
                    answer.error = await self._read(response, answer)
                else:
                    answer.detail = (await response.aread()).decode(errors="replace")
                    answer.error = f"http {response.status_code}"
        except (httpx2.HTTPError, httpx2.SSEError, OSError) as error:
            answer.error, answer.detail = BROKEN if begun else CONNECTION, repr(error)
        answer.end = self.now()

    def _body(self, job: Job) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": job.model, "prompt": job.prompt, "max_tokens": job.new_tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if IGNORE_EOS in self.fields:
            body[IGNORE_EOS] = True
        if MIN_TOKENS in self.fields:
            body[MIN_TOKENS] = job.new_tokens
        return body

    async def _read(self, response: httpx2.Response, answer: Answer) -> str:
        """Read a stream to its end; return the kind of its error."""
        texts = 0
        try:
            async for chunk in chunks(response):
                if chunk.get("choices"):
                    answer.pieces.append(self.now())
                    texts += bool(chunk["choices"][0].get("text"))
                if usage := chunk.get("usage"):
                    answer.tokens, answer.prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
        except ErrorInStream as error:
            answer.detail = str(error)
            return IN_STREAM
        except (BrokenStream, ValueError, TypeError, KeyError, AttributeError) as error:
            answer.detail = str(error) or type(error).__name__
            return BROKEN
        return self._judged(answer, texts)

    def _judged(self, answer: Answer, texts: int) -> str:
        """Compare usage with what was asked for, and with the pieces of text, of which each has a token or more."""
        job, tokens = answer.job, answer.tokens
        if tokens is None:
            return NO_USAGE
        is_short = bool(self.fields) and tokens < job.new_tokens
        asked = len(job.prompt) if isinstance(job.prompt, list) else answer.prompt_tokens
        if is_short or not texts <= tokens <= job.new_tokens or answer.prompt_tokens != asked or not answer.pieces:
            answer.detail = f"usage says {answer.prompt_tokens} and {tokens} tokens"
            return WRONG_COUNT
        return ""
