"""`Stepper`: the engine's side of a server, which alone touches the engine: commands, then one step, again.

    commands --queue--> commands of all calls, then one step --> pieces of all calls, sent once per step

The engine is single-threaded: whatever touches it is a command, run between two steps. Where the pieces go is a matter
of the subclasses: the event loop of the same process (`engine_thread.py`), or that of another (`engine_child.py`).
"""

import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

from punica.adapters import LoRAModel, LoRAModelManager, LoRARequest
from punica.engine import Engine, GenerationResult, Request, RequestState, StepOutput
from punica.engine.readers import FolderReaders
from punica.serve.backend import EngineFacts
from punica.serve.calls import Call, Outcome, Piece
from punica.serve.metrics import StepNotes

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Unfinished:
    """Request in the engine, and how many of its tokens were handed over."""

    call: Call
    index: int
    state: RequestState
    num_sent: int = 0

    def piece(self, result: Outcome | None) -> Piece:
        """Build the piece with the tokens since the last one."""
        start, state = self.num_sent, self.state
        self.num_sent = state.num_generated
        num_text = max(0, len(state.text_token_ids) - start)
        return Piece(self.index, state.output_token_ids[start:], num_text, state.logprobs[start:], result)


class ServedEngine(EngineFacts, Protocol):
    """One engine, or several with the interface of one."""

    def add_request(self, request: Request) -> RequestState:
        """Queue a request; return its state, updated by the steps."""

    def abort_request(self, request_id: str) -> GenerationResult:
        """Remove an unfinished request. ValueError: an unknown id."""

    def step(self) -> StepOutput:
        """Run one model invocation, or wait for one."""


class Stepper(ABC):
    """Steps of a `ServedEngine`, and the requests of all calls in it.

    After ``most_step_errors`` steps in a row that raised, all unfinished requests are aborted and their calls get a
    500. Later requests are served again.
    """

    most_step_errors = 1

    def __init__(self, engine: ServedEngine, notes: StepNotes) -> None:
        self.engine, self._notes = engine, notes
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unfinished: dict[str, _Unfinished] = {}
        self._retired: set[int] = set()  # ids of adapters that are removed whenever no request uses them
        self._step_errors = 0  # in a row
        self._is_failing = False
        self._is_stopping = False

    @abstractmethod
    def _send(self, pieces: Sequence[tuple[Call, Piece]]) -> None:
        """Hand pieces to their calls, all of a step at once."""

    @abstractmethod
    def _remove_adapter(self, adapter_id: int) -> None:
        """Free the memory of an adapter that no request uses."""

    def _has_work(self) -> bool:
        """Return True while steps are to be made."""
        return bool(self._unfinished)

    def _advance(self) -> StepOutput:
        """Make one step."""
        return self.engine.step()

    def _note_step(self, output: StepOutput) -> None:
        """Count a step in the metrics."""
        self._notes.note_step(output.statistics, len(self._unfinished))

    def _run(self) -> None:
        """Run commands and steps until it is stopped, or one of them raises what is no `Exception`."""
        try:
            while not self._is_stopping:
                self._run_commands(wait=not self._has_work())
                if self._has_work():
                    self._step()
        except BaseException:
            _log.exception("the engine's thread ends")
        finally:
            self._is_stopping = True
            self._run_commands(wait=False)
            self._give_up("the server is stopping")

    def _run_commands(self, *, wait: bool) -> None:
        """Run all queued commands; with ``wait``, at least one."""
        with suppress(queue.Empty):
            while True:
                command = self._commands.get(block=wait)
                wait = False
                command()

    def _step(self) -> None:
        try:
            output = self._advance()
        except Exception as error:
            _log.exception("a step failed")
            self._is_failing = True
            self._step_errors += 1
            if self._step_errors == self.most_step_errors:
                self._step_errors = 0
                self._give_up(f"the engine failed: {type(error).__name__}: {error}")
            return
        self._step_errors, self._is_failing = 0, False
        self._deliver(output)

    def _deliver(self, output: StepOutput) -> None:
        """Send new tokens and results."""
        results = {result.request_id: Outcome.of(result) for result in (*output.finished, *output.failed)}
        pieces: list[tuple[Call, Piece]] = []
        left: set[int] = set()
        for request_id in {**output.tokens, **results}:
            request, result = self._unfinished.get(request_id), results.get(request_id)
            if request is None or (result is None and not request.call.streams):
                continue
            pieces.append((request.call, request.piece(result)))
            if result is not None:
                del self._unfinished[request_id]
                left.add(request.state.adapter_id)
                self._notes.note_result(result)
        self._note_step(output)
        self._remove_retired(left)
        self._send(pieces)

    def _add(self, call: Call) -> None:
        """Queue all requests of a call, or none; raises what ``Engine.add_request`` raises."""
        added: list[str] = []
        try:
            for index, request in enumerate(call.requests):
                state = self.engine.add_request(request)
                added.append(request.request_id)
                self._unfinished[request.request_id] = _Unfinished(call, index, state)
        except BaseException:
            self._take_out(added)
            raise

    def _take_out(self, request_ids: Iterable[str]) -> None:
        """Abort those of the requests that have not ended."""
        for request_id in request_ids:
            request = self._unfinished.pop(request_id, None)
            if request is None:
                continue
            with suppress(ValueError):  # it failed in a step that raised: the engine has let it go
                self._notes.note_result(Outcome.of(self.engine.abort_request(request_id)))
            self._remove_retired({request.state.adapter_id})
        if not self._unfinished:
            self._notes.note_idle()

    def _give_up(self, error: str) -> None:
        """Abort every request; their calls get the error."""
        unfinished = list(self._unfinished.items())
        for request_id, _ in unfinished:
            try:
                self._take_out([request_id])
            except Exception:  # an engine that failed may fail again
                _log.exception("a request could not be taken out")
        self._send([(request.call, Piece(request.index, [], 0, [], error=error)) for _, request in unfinished])

    def _retire(self, adapter_id: int) -> None:
        """Remove an adapter as soon as no request uses it."""
        self._retired.add(adapter_id)
        self._remove_retired({adapter_id})

    def _remove_retired(self, adapter_ids: set[int]) -> None:
        """Remove those of the adapters that are retired and that no request uses."""
        leaving = adapter_ids & self._retired
        if leaving:
            for adapter_id in leaving - {request.state.adapter_id for request in self._unfinished.values()}:
                self._remove_adapter(adapter_id)


class EngineStepper(Stepper):
    """Steps of one engine. One that raises is repeated once, as the engine allows."""

    most_step_errors = 2
    engine: Engine

    def __init__(self, engine: Engine, notes: StepNotes) -> None:
        super().__init__(engine, notes)
        self._readers = FolderReaders(self._manager)

    def _read(self, adapter: LoRARequest) -> Future[LoRAModel]:
        """Begin to read and check all of an adapter, beside the steps; for :meth:`_keep`."""
        return self._readers.read(adapter)

    def _keep(self, adapter: LoRARequest, reading: Future[LoRAModel]) -> None:
        """Serve an adapter that was read, in this version. Raises what the reading did."""
        self._manager.note_read_adapter(adapter, reading.result())

    def _remove_adapter(self, adapter_id: int) -> None:
        if self.engine.manager is not None:
            self._manager.remove_adapter(adapter_id)

    @property
    def _manager(self) -> LoRAModelManager:
        return cast(LoRAModelManager, self.engine.manager)
