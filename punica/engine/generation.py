"""`Generation`: prompts in, results out, all at once or as they come; on top of requests and steps."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from punica.adapters import LoRARequest
from punica.checks import clip
from punica.engine.outputs import GenerationChunk, GenerationResult, StepOutput, result_of
from punica.engine.pretrained import GenerationDefaults
from punica.engine.text import GrowingText, TextCodec
from punica.scheduling import Request, RequestState, SamplingParams, as_sampling_params

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
Params = SamplingParams | int | Sequence[SamplingParams | int | None] | None


class Generation(ABC):
    """What users call; the engine below it takes requests and makes steps.

    A prompt is a text, a chat (a list of messages with role and content) or a list of token ids; the first two need a
    tokenizer.

    Whose steps these are does not matter: a call of :meth:`generate` or :meth:`stream` makes steps for all requests of
    the engine, and its own go on in whatever steps others make. Results of requests that were added one by one and end
    in steps of such a call, or in a step that raises, are kept for the next :meth:`step` that somebody makes himself.
    """

    codec: TextCodec | None
    defaults: GenerationDefaults

    def __init__(self) -> None:
        self._names = itertools.count()
        self._own: dict[str, GenerationResult | None] = {}  # requests of open calls; their results, once made
        self._kept: list[GenerationResult] = []  # of requests added one by one, for the next step() to return

    @abstractmethod
    def add_or_fail(self, request: Request) -> RequestState:
        """Queue a request; one whose adapter's folder is refused has failed."""

    @abstractmethod
    def is_in_use(self, request_id: str) -> bool:
        """Whether a request of this name has not left yet."""

    @abstractmethod
    def step(self) -> StepOutput:
        """One model invocation."""

    @abstractmethod
    def abort_request(self, request_id: str) -> GenerationResult:
        """Take an unfinished request out."""

    def result_of(self, state: RequestState) -> GenerationResult:
        """Return the result of a request that has ended. RuntimeError for one that has not."""
        result = self._own.get(state.request_id)
        if result is None:
            result = result_of(state, self.codec)
            if state.request_id in self._own:
                self._own[state.request_id] = result
        return result

    def generate(
        self, prompts: Any, adapters: Adapters = None, params: Params = None, *, progress: bool = False
    ) -> list[GenerationResult]:
        """Continue every prompt with its adapter; the results, in the order of the prompts.

        Args:
            prompts: a list of them, or one text or chat.
            adapters: one for all prompts, or a list with one each; ``None`` is the plain backbone.
            params: one for all prompts, or a list with one each; an integer is greedy decoding of so many tokens,
                ``None`` the engine's defaults (the folder's, for :meth:`Engine.from_pretrained`).
            progress: show a bar on standard error, with finished prompts and generated tokens.

        Other requests of the engine go on meanwhile. A request that fails has a result that says so; the others of the
        call end as they would without it. That includes one whose adapter's folder is refused on arrival. Raises what
        else :meth:`add_request` and :meth:`step` raise, and ValueError when the lengths differ; none of these requests
        is left behind then.
        """
        requests = self._requests_of(prompts, adapters, params)
        states: list[RequestState] = []
        with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
            try:
                for request in requests:
                    states.append(self._take(request))
                tokens, ended = 0, 0
                while ended < len(states):  # in their order, so that a step costs no look at each of them
                    if states[ended].has_ended:
                        ended += 1
                        tokens += states[ended - 1].num_generated
                        bar.set_postfix(tokens=tokens, refresh=False)
                        bar.update()
                    else:
                        self._step_for_all()
                return [self.result_of(state) for state in states]
            finally:
                self._let_go(states)

    def stream(self, prompts: Any, adapters: Adapters = None, params: Params = None) -> Iterator[GenerationChunk]:
        """As :meth:`generate`, but what comes as it comes: after every step a chunk for each prompt that has something
        new. Steps are made while you iterate; whoever stops early aborts the rest. A request whose tokens cannot be
        decoded fails, and nobody else.
        """
        states: list[RequestState] = []
        try:
            for request in self._requests_of(prompts, adapters, params):
                states.append(self._take(request))
            tails = [_Tail(index, state, self.codec) for index, state in enumerate(states)]
            while tails:
                self._step_for_all()
                for tail in tails:  # also of what somebody else's steps have added
                    if tail.has_news:
                        yield self._chunk_of(tail)
                tails = [tail for tail in tails if not tail.is_complete]
        finally:
            self._let_go(states)

    def _take(self, request: Request) -> RequestState:
        """A request of a call."""
        state = self.add_or_fail(request)
        self._own[state.request_id] = None
        return state

    def _let_go(self, states: Sequence[RequestState]) -> None:
        """A call is over; what it left unfinished is aborted."""
        for state in states:
            if not state.has_ended:
                self.abort_request(state.request_id)
            self._own.pop(state.request_id, None)

    def _step_for_all(self) -> None:
        """A step for a call, which finds its own results in its requests' states."""
        kept, self._kept = self._kept, []  # not for this step to bring
        try:
            output = self.step()
            self._keep((*output.finished, *output.failed))
        finally:
            kept += self._kept
            self._kept = kept

    def _keep(self, results: Iterable[GenerationResult]) -> None:
        """Let the next step bring results that nobody would see otherwise."""
        self._kept += [result for result in results if result.request_id not in self._own]

    def _with_kept(self, output: StepOutput) -> StepOutput:
        """What a step brings, after what was kept for it."""
        if not self._kept:
            return output
        kept, self._kept = self._kept, []
        finished = [result for result in kept if result.error is None]
        failed = [result for result in kept if result.error is not None]
        return replace(output, finished=(*finished, *output.finished), failed=(*failed, *output.failed))

    def _chunk_of(self, tail: "_Tail") -> GenerationChunk:
        """What is new of a request; if that is no text, the request has failed."""
        state = tail.state
        try:
            return tail.chunk(self.result_of(state) if state.has_ended else None)
        except Exception as error:  # whatever a tokenizer raises
            if not state.has_ended:
                self.abort_request(state.request_id)
            state.fail(f"{type(error).__name__}: {error}")
            self._own[state.request_id] = None  # made again, as failed
            return tail.last_chunk(self.result_of(state))

    def _requests_of(self, prompts: Any, adapters: Any, params: Any) -> list[Request]:
        prompts = [prompts] if isinstance(prompts, str) or _is_chat(prompts) else _listed("prompts", prompts)
        count = len(prompts)
        if count and hasattr(prompts[0], "__index__") and getattr(prompts[0], "ndim", 0) == 0:
            raise TypeError(f"prompts[0] is {clip(prompts[0])}, a token id; pass a list of prompts, [[...]] for one")
        adapters = _per_prompt("adapters", adapters, count, LoRARequest)
        params = _per_prompt("params", params, count, SamplingParams, int)
        if not count == len(adapters) == len(params):
            raise ValueError(
                f"one adapter and one params per prompt, or one for all: got {count} prompts, {len(adapters)} "
                f"adapters, {len(params)} params"
            )
        return [
            Request(
                self._free_name(),
                self._token_ids(prompt),
                self.defaults.params if one is None else as_sampling_params(one),
                adapter,
            )
            for prompt, adapter, one in zip(prompts, adapters, params, strict=True)
        ]

    def _free_name(self) -> str:
        """Not one that somebody has given to a request of his own."""
        names = (f"generate-{number}" for number in self._names)
        return next(name for name in names if not self.is_in_use(name))

    def _token_ids(self, prompt: Any) -> Any:
        """Of a text or a chat; whatever else it is, the request checks it."""
        if not isinstance(prompt, str) and not _is_chat(prompt):
            return prompt
        if self.codec is None:
            raise ValueError(
                f"prompt {clip(prompt)} is text, but this engine has no tokenizer; pass token ids, or build the engine "
                "with Engine.from_pretrained on a folder with tokenizer files"
            )
        return self.codec.encode(prompt)


class _Tail:
    """How much of a request has been streamed."""

    def __init__(self, index: int, state: RequestState, codec: TextCodec | None) -> None:
        self.state, self.is_complete = state, False
        self._index = index
        self._text = None if codec is None else GrowingText(codec, state.params.stop)
        self._tokens, self._characters = 0, 0

    @property
    def has_news(self) -> bool:
        """There are new tokens, or it has ended."""
        return self.state.num_generated > self._tokens or self.state.has_ended

    def chunk(self, result: GenerationResult | None) -> GenerationChunk:
        """What is new; the last one has the result. Raises what the tokenizer raises, and is none the wiser then."""
        start, text = self._tokens, None
        if self._text is not None:
            for token in self.state.text_token_ids[start:]:
                self._text.append(token)
            whole = self._text.settled if result is None else self._text.finish()
            text, self._characters = whole[self._characters :], len(whole)
        self.is_complete = result is not None
        self._tokens = self.state.num_generated
        return GenerationChunk(self._index, self.state.output_token_ids[start:], text, result)

    def last_chunk(self, result: GenerationResult) -> GenerationChunk:
        """What is new when it cannot be decoded: tokens and the result, without text."""
        self.is_complete = True
        return GenerationChunk(self._index, self.state.output_token_ids[self._tokens :], None, result)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(message, Mapping) for message in prompt)


def _listed(name: str, values: Any) -> list[Any]:
    """``values`` as a list; TypeError when there is nothing to iterate over."""
    if not isinstance(values, (bytes, Mapping)):
        try:
            return list(values)
        except TypeError:
            pass
    raise TypeError(f"{name} must be a list with one entry per prompt, got {type(values).__name__} {clip(values)}")


def _per_prompt(name: str, values: Any, count: int, *kinds: type) -> list[Any]:
    """One value for all prompts, if it is of such a kind or ``None``, or a list of them."""
    if values is None or isinstance(values, kinds) or (int in kinds and hasattr(values, "__index__")):
        return [values] * count
    return _listed(name, values)
