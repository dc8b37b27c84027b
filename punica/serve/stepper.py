"""`Stepper`: the engine's side of a server, which alone touches the engine: orders, then one step, again.

    orders of all calls --queue--> carried out, then one step --> one message: pieces of all calls, notes, a reply

`backend.py` is the other side, in another process (`process.py`) or thread (`runners.py`).
"""

import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, cast

from punica.adapters import LoRAModel, LoRAModelManager, LoRARequest
from punica.cluster.runner import RunnerDescription, described
from punica.engine import Engine, GenerationResult, Request, RequestState, StepOutput
from punica.engine.residency import FolderReaders
from punica.serve.watch import Watch

_log = logging.getLogger(__name__)
REFUSALS = (ImportError, OSError, RuntimeError, TypeError, ValueError)
"""Errors of a checkpoint, its adapters, sizes or requests: told in one line. Others are logged with a traceback."""


class Outcome(NamedTuple):
    """A result without its prompt and tokens, which the call and its pieces have."""

    text: str | None
    finish_reason: str
    error: str | None
    num_prompt: int
    num_generated: int
    arrival_s: float
    first_token_s: float | None
    last_token_s: float | None

    @classmethod
    def of(cls, result: GenerationResult) -> "Outcome":
        return cls(
            result.text, result.finish_reason, result.error, len(result.prompt_token_ids), len(result.token_ids),
            result.arrival_s, result.first_token_s, result.last_token_s,
        )  # fmt: skip


class Piece(NamedTuple):
    """New tokens of request ``index`` of a call, the first ``num_text`` of them with text; the last has the result, or
    an error where the engine itself failed.
    """

    index: int  # type: ignore[assignment]  # tuple's method has no use here
    token_ids: list[int]
    num_text: int
    logprobs: list[dict[int, float]]
    result: Outcome | None = None
    error: str | None = None


class Order(NamedTuple):
    """Call of ``function(stepper, *arguments)``; ``number`` is the one of its reply."""

    number: int
    function: Callable[..., Any]
    arguments: Sequence[Any]


class Message(NamedTuple):
    """Changes by one step or order: pieces with the numbers of their calls, notes for the metrics, health; of an order
    its number, and its value or error.
    """

    pieces: list[tuple[int, Piece]]
    notes: list[methodcaller]
    health: str
    order: int | None = None
    value: Any = None
    error: Exception | None = None


@dataclass(eq=False)
class _Unfinished:
    """Request ``index`` of a call in the engine, and how many of its tokens were handed over."""

    call: int
    streams: bool
    index: int
    state: RequestState
    num_sent: int = 0

    def piece(self, result: Outcome | None) -> Piece:
        start, state = self.num_sent, self.state
        self.num_sent = state.num_generated
        num_text = max(0, len(state.text_token_ids) - start)
        return Piece(self.index, state.output_token_ids[start:], num_text, state.logprobs[start:], result)


class Stepper(ABC):
    """Steps of one engine, or of several with the interface of one, and the requests of all calls in it.

    After ``most_step_errors`` steps in a row that raised, all unfinished requests are aborted and their calls get a
    500. ``send``, set by the `Backend`, takes the messages. ``orders`` come from any thread; ``None`` ends :meth:`run`.
    """

    most_step_errors = 1
    patience: tuple[float, ...] = ()  # arguments of a step
    idle_s: float | None = None  # longest wait for an order at a time
    send: Callable[[Message], None]
    facts: RunnerDescription
    view: Callable[[bool], dict[str, Any]]  # `Watch.view`; of several engines, their numbers of requests

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._unfinished: dict[str, _Unfinished] = {}
        self._retired: set[int] = set()  # ids of adapters that are removed whenever no request uses them
        self._step_errors = 0  # in a row
        self._pieces: list[tuple[int, Piece]] = []
        self._notes: list[methodcaller] = []

    @property
    def health(self) -> str:
        return "failed" if self._step_errors else "ok"

    @abstractmethod
    def remove_adapter(self, adapter_id: int) -> None:
        """Free the memory of an adapter that no request uses."""

    @abstractmethod
    def _note_step(self, output: StepOutput) -> None:
        """Count a step in the metrics."""

    def _has_work(self) -> bool:
        return bool(self._unfinished)

    def add(self, call: int, requests: Sequence[Request], streams: bool) -> None:
        added: list[str] = []
        try:
            for index, request in enumerate(requests):
                state = self.engine.add_request(request)
                added.append(request.request_id)
                self._unfinished[request.request_id] = _Unfinished(call, streams, index, state)
        except BaseException:
            self.abort(added)
            raise

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self._unfinished.pop(request_id, None)
            if request is None:
                continue
            with suppress(ValueError):  # it failed in a step that raised: the engine has let it go
                self._notes.append(methodcaller("note_result", Outcome.of(self.engine.abort_request(request_id))))
            self._remove_retired(request.state.adapter_ids)
        if not self._unfinished:
            self._notes.append(methodcaller("note_idle"))

    def retire(self, adapter_id: int) -> None:
        self._retired.add(adapter_id)
        self._remove_retired({adapter_id})

    def run(self) -> None:
        """Carry out orders and make steps, until the orders end or something raises what is no `Exception`."""
        try:
            while self._carry_out_all():
                if self._has_work():
                    self._step()
        except BaseException:
            _log.exception("the engine's loop ends")
        finally:
            self._give_up("the server is stopping")
            self._flush()

    def _carry_out_all(self) -> bool:
        """Carry out all orders that have come, waiting for one where there is no step to make; False at their end."""
        wait = not self._has_work()
        with suppress(queue.Empty):
            while (order := self.orders.get(wait, self.idle_s)) is not None:
                wait = False
                self._carry_out(order)
            return False
        return True

    def _carry_out(self, order: Order) -> None:
        """Call an order's function and reply; where it began to read an adapter, once that is kept."""
        try:
            value = order.function(self, *order.arguments)
        except Exception as error:
            if not isinstance(error, REFUSALS):
                _log.exception("an order failed")
            self._flush(order.number, error=error)
            return
        if isinstance(value, Future):
            keep = partial(order._replace, function=EngineStepper._keep)
            value.add_done_callback(lambda read: self.orders.put(keep(arguments=(*order.arguments, read))))
        else:
            self._flush(order.number, value)

    def _step(self) -> None:
        try:
            output = self.engine.step(*self.patience)
        except Exception as error:
            _log.exception("a step failed")
            self._step_errors += 1
            if self._step_errors % self.most_step_errors == 0:
                self._give_up(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._step_errors = 0
            self._deliver(output)
        self._flush()

    def _deliver(self, output: StepOutput) -> None:
        results = {result.request_id: Outcome.of(result) for result in (*output.finished, *output.failed)}
        left: set[int] = set()
        for request_id in {**output.tokens, **results}:
            request, result = self._unfinished.get(request_id), results.get(request_id)
            if request is None or (result is None and not request.streams):
                continue
            self._pieces.append((request.call, request.piece(result)))
            if result is not None:
                del self._unfinished[request_id]
                left |= request.state.adapter_ids
                self._notes.append(methodcaller("note_result", result))
        self._note_step(output)
        self._remove_retired(left)

    def _give_up(self, error: str) -> None:
        for request_id, request in [*self._unfinished.items()]:
            try:
                self.abort([request_id])
            except Exception:  # an engine that failed may fail again
                _log.exception("a request could not be taken out")
            self._pieces.append((request.call, Piece(request.index, [], 0, [], error=error)))

    def _remove_retired(self, adapter_ids: set[int]) -> None:
        leaving = adapter_ids & self._retired
        if leaving:
            for adapter_id in leaving.difference(*(one.state.adapter_ids for one in self._unfinished.values())):
                self.remove_adapter(adapter_id)

    def _flush(self, order: int | None = None, value: Any = None, error: Exception | None = None) -> None:
        message = Message(self._pieces, self._notes, self.health, order, value, error)
        self._pieces, self._notes = [], []
        self.send(message)


class EngineStepper(Stepper):
    """Steps of one engine. One that raises is repeated once."""

    most_step_errors = 2
    engine: Engine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._manager = cast(LoRAModelManager, engine.manager)
        self._readers = FolderReaders(self._manager, digests=engine.config.prefix_cache)
        self.view = Watch(engine).view
        self.facts = replace(described(engine), has_lora=engine.manager is not None)  # not one that ignores adapters

    def read(self, adapter: LoRARequest) -> "Future[LoRAModel]":
        """Begin to read and check all of an adapter, beside the steps."""
        return self._readers.read(adapter)

    def _keep(self, adapter: LoRARequest, reading: "Future[LoRAModel]") -> None:
        """Serve an adapter that was read, in this version. Raises what the reading did."""
        self._manager.note_read_adapter(adapter, reading.result())

    def remove_adapter(self, adapter_id: int) -> None:
        if self.engine.manager is not None:
            self._manager.remove_adapter(adapter_id)

    def _note_step(self, output: StepOutput) -> None:
        self._notes.append(methodcaller("note_step", output.statistics, len(self._unfinished)))
