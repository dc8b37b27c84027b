"""`Generation`: the user interface, prompts in and results out, on top of requests and steps; threads take turns in it.

    thread A, generate:  add | step | step | step .................... | done, resigns
    thread B, generate:          add | waits for news of its requests .. | leads: step | step | done

A step serves the requests of all open calls, so one call makes the steps and the others wait. Threads enter in about
the order in which they came: one that makes steps cannot keep out another that brings requests.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from tqdm import tqdm

from punica.adapters import LoRARequest
from punica.checks import clip
from punica.engine.pretrained import GenerationDefaults
from punica.engine.prompts import is_chat, listed, listed_prompts
from punica.engine.requests import GenerationChunk, GenerationResult, StepOutput, result_of
from punica.engine.text import TextCodec, ending_at, growing_text
from punica.scheduling import Mixture, Request, RequestState, SamplingParams, as_sampling_params

Adapter = LoRARequest | Mapping[LoRARequest, float] | Mixture | None
Adapters = Adapter | Sequence[Adapter]
Params = SamplingParams | int | Sequence[SamplingParams | int | None] | None
_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S", bound="Generation")


class Turns:
    """Reentrant lock of one engine, fair to threads that wait, and the lead in making steps.

    ``one_thread``: only the thread that made this object may enter; others get a RuntimeError.
    """

    def __init__(self, *, one_thread: bool = False) -> None:
        self._only = threading.get_ident() if one_thread else None
        self._door, self._room = threading.Lock(), threading.Lock()  # the next thread waits at the door, for the room
        self._owner: int | None = None
        self._depth = 0
        self._leader: int | None = None
        self._news = threading.Condition()
        self._num_steps = 0

    def __enter__(self) -> None:
        this = threading.get_ident()
        if self._only not in (None, this):
            raise RuntimeError(
                "this engine is one of several tensor-parallel ranks, which take the same calls in the same order; "
                "call it from the thread that built it, or give each thread a queue into that one"
            )
        if self._owner != this:
            with self._door:
                self._room.acquire()
            self._owner = this
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._room.release()

    def advance(self, is_done: Callable[[], bool], step: Callable[[], None]) -> None:
        """Make one step, or wait for one of the leading thread; nothing if ``is_done`` already.

        The thread leads from its first step on, until :meth:`resign`. Where it is alone in the engine, the leading
        thread cannot step, and it makes the step itself.
        """
        this = threading.get_ident()
        with self:
            if is_done():
                return
            if self._leader is None:
                self._leader = this
            if self._leader == this or self._depth > 1:
                step()
                self._tell(1)
                return
            seen = self._num_steps
        with self._news:
            self._news.wait_for(lambda: self._leader is None or self._num_steps != seen)

    def resign(self) -> None:
        """Leave the lead, if this thread has it, to one of those that wait."""
        with self:
            if self._leader == threading.get_ident():
                self._leader = None
                self._tell(0)

    def _tell(self, num_steps: int) -> None:
        with self._news:
            self._num_steps += num_steps
            self._news.notify_all()


def exclusive(method: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Decorate a method that one thread at a time may be in, and ``torch.autocast`` not: it would change tokens."""

    @wraps(method)
    def alone(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._turns:
            enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
            if not enabled:
                return method(self, *args, **kwargs)
            with ExitStack() as stack:
                for device in enabled:
                    stack.enter_context(torch.autocast(device, enabled=False))
                return method(self, *args, **kwargs)

    return alone


class Generation(ABC):
    """``generate`` and ``stream`` for a subclass that queues requests and makes steps.

    A prompt is a text, a chat (a list of messages with role and content) or a list of token ids; the first two need a
    tokenizer. vLLM's ``{"prompt": text}`` and ``{"prompt_token_ids": ids}`` are prompts, too.

    Steps serve all requests of the engine, of every open call and added one by one. Results of the latter that end in a
    step of ``generate`` or ``stream``, or in one that raises, are kept for the caller's next :meth:`step`. Threads that
    use the adapter manager beside calls of others do so inside :meth:`alone`.
    """

    codec: TextCodec | None
    defaults: GenerationDefaults
    max_model_len: int

    def __init__(self, *, one_thread: bool = False) -> None:
        self._turns = Turns(one_thread=one_thread)
        self._names = map("generate-{}".format, itertools.count())
        self._own: set[str] = set()  # names of the requests of open calls
        self._results: dict[RequestState, GenerationResult | None] = {}  # of the same, once they have ended
        self._kept: dict[tuple[str, float], GenerationResult] = {}  # of other requests, for the next step()

    @abstractmethod
    def add_or_fail(self, request: Request) -> RequestState: ...

    @abstractmethod
    def is_in_use(self, request_id: str) -> bool: ...

    @abstractmethod
    def step(self) -> StepOutput: ...

    @abstractmethod
    def abort_request(self, request_id: str) -> GenerationResult: ...

    def _mend(self) -> None:  # noqa: B027 (only an engine's steps can be torn)
        """Mend what an error left, before requests are looked at."""

    def alone(self) -> AbstractContextManager[None]:
        """Keep other threads out in a ``with`` block: between two steps, e.g. for ``engine.manager.add_adapter``."""
        return self._turns

    @exclusive
    def result_of(self, state: RequestState) -> GenerationResult:
        """Return the result of a request that has ended. RuntimeError for one that has not."""
        result = self._results.get(state) or result_of(state, self.codec)
        if state in self._results:
            self._results[state] = result
        return result

    def generate(
        self, prompts: Any, adapters: Adapters = None, params: Params = None, *, progress: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None, cache_salt: str = "",
    ) -> list[GenerationResult]:  # fmt: skip
        """Continue every prompt with its adapter; return the results in the order of the prompts.

        Args:
            prompts: a list of prompts, or one text or chat.
            adapters: one for all prompts, or a list with one each; ``None`` is the plain backbone, and
                ``{adapter: weight}`` a mixture.
            params: one for all prompts, or a list with one each; an integer is greedy decoding of so many tokens,
                ``None`` the engine's defaults (the folder's, for :meth:`Engine.from_pretrained`), with fewer tokens
                where the prompt leaves less room. A prompt whose ``n`` is not 1 has so many results, one after another.
            progress: show a bar on standard error, with finished results and generated tokens.
            chat_template_kwargs: further variables of the chat template, e.g. ``{"enable_thinking": False}``.
            cache_salt: as of a :class:`Request`, for all prompts.

        Other requests of the engine run in the same steps. A request that fails, also by its adapter's folder, has a
        result with the error, without effect on the others. Raises all other errors of :meth:`add_request` and
        :meth:`step`, and ValueError for different lengths; the requests of the call are removed then.
        """
        requests = self._requests_of(prompts, adapters, params, chat_template_kwargs, cache_salt)
        states: list[RequestState] = []
        with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
            try:
                self._take(requests, states)
                tokens = 0
                for state in states:  # in their order: no scan of all requests per step
                    while not state.has_ended:
                        self._turns.advance(partial(getattr, state, "has_ended"), self._step_for_all)
                    tokens += state.num_generated
                    bar.set_postfix(tokens=tokens, refresh=False)
                    bar.update()
                return [self.result_of(state) for state in states]
            finally:
                self._let_go(states)

    def stream(
        self, prompts: Any, adapters: Adapters = None, params: Params = None, *,
        chat_template_kwargs: Mapping[str, Any] | None = None, cache_salt: str = "",
    ) -> Iterator[GenerationChunk]:  # fmt: skip
        """Generate as :meth:`generate` does, but yield after every step a chunk for each prompt with new output.

        Iterating makes the steps; closing the iterator aborts the rest. A request whose tokens cannot be decoded fails
        alone.
        """
        states: list[RequestState] = []
        try:
            self._take(self._requests_of(prompts, adapters, params, chat_template_kwargs, cache_salt), states)
            tails = [_Tail(index, state, self.codec) for index, state in enumerate(states)]
            while tails:
                self._turns.advance(lambda: any(tail.has_news for tail in tails), self._step_for_all)
                with self._turns:
                    self._turns.resign()  # the caller may pause after it for any time
                    chunks = [self._chunk_of(tail) for tail in tails if tail.has_news]
                yield from chunks
                tails[:] = [tail for tail in tails if not tail.is_complete]
        finally:
            self._let_go(states)

    @exclusive
    def _take(self, requests: Iterable[Request], states: list[RequestState]) -> None:
        for request in requests:
            state = self.add_or_fail(request)
            states.append(state)
            self._own.add(state.request_id)
            self._results[state] = None

    @exclusive
    def _let_go(self, states: Sequence[RequestState]) -> None:
        self._turns.resign()
        self._mend()
        for state in states:
            if not state.has_ended:
                self.abort_request(state.request_id)
            self._own.discard(state.request_id)
            self._results.pop(state, None)

    def _step_for_all(self) -> None:
        kept, self._kept = self._kept, {}  # not for this step to return
        try:
            output = self.step()
            self._keep((*output.finished, *output.failed))
        finally:
            self._kept = kept | self._kept

    def _keep(self, results: Iterable[GenerationResult]) -> None:
        self._kept |= {(one.request_id, one.arrival_s): one for one in results if one.request_id not in self._own}

    def _with_results(self, output: StepOutput, ended: Iterable[GenerationResult]) -> StepOutput:
        results = (self._kept | {(one.request_id, one.arrival_s): one for one in ended}).values()
        finished, failed = (tuple(one for one in results if (one.error is None) is well) for well in (True, False))
        return replace(output, finished=finished, failed=failed)

    def _chunk_of(self, tail: "_Tail") -> GenerationChunk:
        state = tail.state
        try:
            return tail.chunk(self.result_of(state) if state.has_ended else None)
        except Exception as error:  # any exception of a tokenizer
            if not state.has_ended:
                self.abort_request(state.request_id)
            state.fail(f"{type(error).__name__}: {error}")
            self._results[state] = None  # to be made again, as failed
            return tail.chunk(self.result_of(state), decodes=False)

    def _requests_of(
        self, prompts: Any, adapters: Any, params: Any, template_arguments: Mapping[str, Any] | None, cache_salt: str
    ) -> list[Request]:
        prompts = listed_prompts(prompts)
        count = len(prompts)
        adapters = _per_prompt("adapters", adapters, count, LoRARequest, Mapping, Mixture)
        params = _per_prompt("params", params, count, SamplingParams, int)
        if not count == len(adapters) == len(params):
            raise ValueError(
                f"one adapter and one params per prompt, or one for all: got {count} prompts, {len(adapters)} "
                f"adapters, {len(params)} params"
            )
        if template_arguments and not any(map(is_chat, prompts)):
            raise ValueError(
                f"chat_template_kwargs are {clip(template_arguments)}, but no prompt is a chat; leave them out, or "
                "pass a list of messages with role and content"
            )
        encoded = [
            self._encoded(f"prompts[{place}]", prompt, adapter, template_arguments)
            for place, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
        ]
        names = (name for name in self._names if not self.is_in_use(name))
        return [
            Request(next(names), ids, choice, adapter, cache_salt)
            for (ids, ends), adapter, one in zip(encoded, adapters, params, strict=True)
            for choice in ending_at(self._defaults_for(ids) if one is None else as_sampling_params(one), ends).choices()
        ]

    def _defaults_for(self, token_ids: Any) -> SamplingParams:
        """Return the default parameters, with as many new tokens as a prompt leaves room for."""
        params = self.defaults.params
        room = self.max_model_len - len(token_ids) if hasattr(token_ids, "__len__") else params.max_new_tokens
        if not 0 < room < params.max_new_tokens:
            return params
        return replace(params, max_new_tokens=room, min_tokens=min(params.min_tokens, room))

    def _encoded(
        self, name: str, prompt: Any, adapter: Any, arguments: Mapping[str, Any] | None
    ) -> tuple[Any, tuple[int, ...]]:
        """Encode a text or a chat, with the end tokens of its template; the request checks anything else."""
        if not isinstance(prompt, str) and not is_chat(prompt):
            return prompt, ()
        if self.codec is None:
            raise ValueError(
                f"prompt {clip(prompt)} is text, but this engine has no tokenizer; pass token ids, or build the engine "
                "with Engine.from_pretrained on a folder with tokenizer files"
            )
        try:
            folder = getattr(adapter, "absolute_path", None)
            return self.codec.encode(prompt, folder, arguments), self.codec.end_token_ids(prompt, folder)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


class _Tail:
    """Position in the output of a request up to which it was streamed."""

    def __init__(self, index: int, state: RequestState, codec: TextCodec | None) -> None:
        self.state, self.is_complete = state, False
        self._index = index
        self._text = None if codec is None else growing_text(codec, state.params, state.prompt_token_ids)
        self._tokens = 0

    @property
    def has_news(self) -> bool:
        return self.state.num_generated > self._tokens or self.state.has_ended

    def chunk(self, result: GenerationResult | None, *, decodes: bool = True) -> GenerationChunk:
        """Return the new output; the last chunk has the result. A tokenizer's error leaves the position unchanged."""
        start, text = self._tokens, None
        if self._text is not None and decodes:
            text = self._text.take(self.state.text_token_ids[start:], is_last=result is not None)
        self.is_complete = result is not None
        self._tokens = self.state.num_generated
        return GenerationChunk(self._index, self.state.output_token_ids[start:], text, result)


def _per_prompt(name: str, values: Any, count: int, *kinds: type) -> list[Any]:
    """Repeat a single value (of one of ``kinds``, or ``None``) for all prompts, or list one each."""
    if values is None or isinstance(values, kinds) or (int in kinds and hasattr(values, "__index__")):
        return [values] * count
    return listed(name, values)
