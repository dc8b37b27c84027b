"""`RayCluster`: section 5.1's scheduler over runners that are Ray actors, with the interface of one large engine.

    with RayCluster(partial(Engine.from_pretrained, folder, max_batch_size=32, max_loras=32), num_runners=4) as cluster:
        results = cluster.generate(prompts, adapters, 64)

    step():   wait for a runner -> Dispatcher.end -> ClusterPolicy.place -> Dispatcher.begin -> the runner's next step

Every step of a runner is ordered, and its tokens come back with it: one round trip, in which only that runner waits.
"""

import itertools
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from punica.adapters import LoRARequest
from punica.adapters.request import check_same_source
from punica.checks import check_count, clip
from punica.cluster import ray_runners
from punica.cluster.adapter_files import StoredFiles
from punica.cluster.dispatcher import Dispatcher
from punica.cluster.policy import ScaleSignal
from punica.cluster.ray_runners import Lost, RunnerProcess, RunnerResources, Timeouts, wait_for
from punica.cluster.runner import LostRunner, RunnerDescription, RunnerStep
from punica.engine import Engine, GenerationResult, Request, RequestState, StepOutput, StepStatistics
from punica.engine.generation import Generation

_ONE_CPU, _TIMEOUTS = RunnerResources(), Timeouts()


@dataclass(frozen=True)
class ClusterOutput(StepOutput):
    """Output of a `RayCluster.step`: ``steps`` of runners that ended, runners ``lost`` (died or not started) and
    ``joined``. ``recomputed``: requests that continued in another runner.
    """

    steps: tuple[RunnerStep, ...] = ()
    lost: tuple[LostRunner, ...] = ()
    joined: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()


@dataclass(eq=False)
class _PendingReply:
    """Reply expected of a runner since ``begin_s``: its description when it starts, or the end of a step. ``end_by_s``:
    deadline of a step, or of a start's reservation, ``None`` once that is made.
    """

    future: Any
    begin_s: float
    end_by_s: float | None
    is_start: bool = False


class RayCluster(Generation, AbstractContextManager["RayCluster"]):
    """Engines on Ray runner actors that serve as one; failed runners are restarted transparently.

    Args:
        build: makes a runner's engine, in the runner's process; it travels by pickle. For a random backbone
            ``partial(punica.cluster.runner.random_engine, ...)``.
        num_runners: initial count, named ``runner-0000`` and so on: the UUIDs that settle ties.
        resources: of each runner.
        rule: name of a scheduling rule, see `punica.cluster.SCHEDULING_RULES`.
        address: of a Ray cluster (``"auto"``, ``"host:6379"``); ``None``: the one that this process has joined, else a
            new one on this machine, which ends with this object.
        timeouts: of runners; one whose step takes longer is killed and counts as dead.

    Attributes:
        runners: actors by name. ``description``: sizes of each runner.

    Not thread-safe; work proceeds only in :meth:`step`. Use it in a ``with`` block, or call :meth:`close`. Requests get
    the tokens of a single engine on whichever runners serve them. Raises the errors of `connect` and ``build``,
    ValueError for runners of different kinds, RuntimeError where one finds no place or cannot be started.
    """

    def __init__(
        self, build: Callable[[], Engine], num_runners: int = 1, *,
        resources: RunnerResources = _ONE_CPU, rule: str = "punica", address: str | None = None,
        timeouts: Timeouts = _TIMEOUTS,
    ) -> None:  # fmt: skip
        super().__init__()
        count = check_count("num_runners", num_runners)
        self._timeouts = timeouts
        self._last_loss = ""
        self._lost: list[LostRunner] = []  # since the last output, and the requests that failed with them:
        self._failed: list[RequestState] = []
        self._new_runner = partial(RunnerProcess, build, resources)
        self._numbers = itertools.count()
        self._stored: dict[int, tuple[LoRARequest, StoredFiles]] = {}  # by adapter id: files in the object store
        self._pending: dict[str, _PendingReply] = {}
        self.runners: dict[str, RunnerProcess] = {}
        self._open_dispatcher: Dispatcher | None = None
        self._owns_ray = ray_runners.connect(address, count * resources.num_cpus, count * resources.num_gpus)
        try:
            for _ in range(count):
                self.add_runner()
            descriptions = {uuid: self._await_start(uuid) for uuid in sorted(self.runners)}
            first = next(iter(descriptions.values()))
            self._open_dispatcher, self.description = Dispatcher(first, rule, self._files_of), first
            for uuid, description in descriptions.items():
                self._open_dispatcher.join(uuid, description)
        except BaseException:
            self.close()
            raise
        self.codec, self.defaults, self.max_model_len = first.codec, first.defaults, first.max_model_len

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all runners, and Ray if it was started here. Unfinished requests are lost."""
        for runner in self.runners.values():
            runner.close()
        self.runners, self._pending, self._open_dispatcher = {}, {}, None
        if self._owns_ray:
            ray_runners.import_ray().shutdown()
            self._owns_ray = False

    def add_request(self, request: Request) -> RequestState:
        """Queue a request; return its state. A bad adapter fails its own request, when it joins a runner. TypeError,
        ValueError: as :meth:`Engine.add_request`.
        """
        return self._dispatcher.add(request)

    add_or_fail = add_request

    def abort_request(self, request_id: str) -> GenerationResult:
        """Abort an unfinished request; return its result so far. ValueError for an unknown id."""
        return self.result_of(self._dispatcher.abort(request_id))

    def is_in_use(self, request_id: str) -> bool:
        return self._dispatcher.is_in_use(request_id) or request_id in self._own

    def has_unfinished(self) -> bool:
        return bool(self._dispatcher.num_unfinished or self._kept)

    def put_adapter(self, adapter: LoRARequest, files: StoredFiles | None = None) -> None:
        """Serve an adapter from Ray's object store, for runners on machines that do not see its folder. Its files are
        read here, once, unless ``files`` come from `ray_runners.store_adapter`, which any thread may call. Errors of
        `read_adapter_files`; ValueError: another adapter has its id.
        """
        self._files_of(adapter)
        self._stored[adapter.lora_int_id] = adapter, files or ray_runners.store_adapter(adapter)

    def drop_adapter(self, adapter: LoRARequest) -> None:
        """Serve an adapter from its folder again, and free its files: in the object store with the last request that
        waits for it, in runners by eviction. ValueError: it was not put, or another adapter has its id.
        """
        if self._files_of(adapter) is None:
            raise ValueError(
                f"adapter {clip(adapter.lora_name)} (id {adapter.lora_int_id}) is not in the object store; there are "
                f"ids {clip(sorted(self._stored))}"
            )
        del self._stored[adapter.lora_int_id]

    def step(self, timeout_s: float | None = None) -> ClusterOutput:
        """Wait for the end of a runner's step (at most ``timeout_s`` seconds), apply it, and order the next ones. Empty
        when no step is under way. RuntimeError: requests wait and no runner can serve them.
        """
        joined, steps, tokens, states = list[str](), list[RunnerStep](), dict[str, int](), list[RequestState]()
        self._order()
        waiting, runners = self._dispatcher.num_unfinished, len(self._dispatcher.policy.gpus)
        if waiting and not self._pending:
            raise RuntimeError(
                f"{waiting} requests wait, and none of the {runners} runners can serve the first of them; call "
                f"add_runner, or abort_request{self._last_loss}"
            )
        owners = {pending.future: uuid for uuid, pending in self._pending.items()}
        for future in wait_for(list(owners), self._patience(timeout_s)) if owners else ():
            uuid = owners[future]
            try:
                answer = ray_runners.result_of(future)
            except Lost as error:
                self._lose(uuid, str(error))
                continue
            pending = self._pending.pop(uuid)
            if pending.is_start:
                self._dispatcher.join(uuid, answer)
                joined.append(uuid)
            else:
                arrived = time.perf_counter()
                try:
                    done = self._dispatcher.end(uuid, answer)
                except RuntimeError as error:  # the reply contradicts the scheduler
                    self._replace(uuid, str(error))
                    raise
                times = pending.begin_s, arrived, answer.seconds
                steps.append(RunnerStep(uuid, done.work, *times, len(done.tokens)))
                tokens |= done.tokens
                states += (*done.finished, *done.failed)
        for uuid, reason in self._overdue():
            self._lose(uuid, reason)
        self._order()
        (lost, self._lost), (failed, self._failed) = (self._lost, []), (self._failed, [])
        recomputed, self._dispatcher.recomputed = tuple(self._dispatcher.recomputed), []
        statistics = StepStatistics(
            batch_size=sum(step.num_tokens for step in steps),
            num_prefill_tokens=sum(step.work.prefill_tokens for step in steps),
        )
        output = ClusterOutput(tokens, (), statistics, (), tuple(steps), tuple(lost), tuple(joined), recomputed)
        found, self._kept = self._with_results(output, map(self.result_of, states + failed)), {}
        return cast(ClusterOutput, found)

    def use_rule(self, rule: str) -> None:
        """Schedule by another rule from now on. ValueError for an unknown one, and while runners have work."""
        self._dispatcher.use_rule(rule)

    @property
    def is_busy(self) -> bool:
        """True while :meth:`step` has an order to give or a reply to await, be it of a runner that starts."""
        return bool(self._pending or self._dispatcher.startable)

    def probe(self) -> None:
        """Have idle runners make an empty step, so that :meth:`step` reports those that have died meanwhile."""
        self._dispatcher.probe()

    def order_check(self, adapter: LoRARequest, tried: Collection[str] = ()) -> tuple[str, Callable[[], None]]:
        """Have a runner that is not among ``tried`` read and check an adapter; return its name and a function for any
        thread, which waits for the result as that of `RunnerProcess.order_check`. RuntimeError: no runner is ready.
        """
        files, gpus = self._files_of(adapter), self._dispatcher.policy.gpus.values()
        ready = [(gpu.in_flight, gpu.uuid) for gpu in gpus if gpu.uuid not in tried]
        if not ready:
            name = clip(adapter.lora_name)
            raise RuntimeError(f"adapter {name} was not checked: no runner is ready; try again later")
        _, uuid = min(ready)
        return uuid, self.runners[uuid].order_check(adapter, files)

    @property
    def scale_signal(self) -> ScaleSignal:
        """Autoscaling advice of section 5.1, for :meth:`add_runner` and :meth:`remove_runner`."""
        return self._dispatcher.policy.scale_signal()

    @property
    def working_sets(self) -> dict[str, int]:
        """Requests on every runner that is ready."""
        return {uuid: gpu.working_set for uuid, gpu in sorted(self._dispatcher.policy.gpus.items())}

    @property
    def num_queued(self) -> int:
        return self._dispatcher.policy.num_queued

    @property
    def num_evicted(self) -> int:
        """Requests that runners without KV pages sent back to the queue, so far."""
        return self._dispatcher.num_evicted

    def add_runner(self) -> str:
        """Start a runner; return its name. A later :meth:`step` reports it as ``joined`` or ``lost``."""
        uuid = f"runner-{next(self._numbers):04}"
        self.runners[uuid] = self._new_runner()
        self._start(uuid)
        return uuid

    def remove_runner(self, uuid: str) -> None:
        """Release a runner; its requests continue on others. ValueError for an unknown one."""
        if uuid not in self.runners:
            raise ValueError(f"no runner {clip(uuid)}; there are {', '.join(sorted(self.runners))}")
        if uuid in self._dispatcher.policy.gpus:
            self._dispatcher.leave(uuid)
        self._give_up(uuid)

    @property
    def _dispatcher(self) -> Dispatcher:
        if self._open_dispatcher is None:
            raise RuntimeError("the cluster is closed; build another one")
        return self._open_dispatcher

    def _files_of(self, adapter: LoRARequest) -> StoredFiles | None:
        known, files = self._stored.get(adapter.lora_int_id, (None, None))
        check_same_source(known, adapter)
        return files

    def _start(self, uuid: str) -> None:
        begin_s = time.perf_counter()
        end_by_s = begin_s + self._timeouts.place_s
        self._pending[uuid] = _PendingReply(self.runners[uuid].start(), begin_s, end_by_s, is_start=True)

    def _await_start(self, uuid: str) -> RunnerDescription:
        while True:
            for late, reason in self._overdue():
                raise RuntimeError(f"{late} could not be started: {reason}")
            for future in wait_for([self._pending[uuid].future], self._patience(None)):
                try:
                    found: RunnerDescription = ray_runners.result_of(future)
                except Lost as error:
                    raise RuntimeError(f"{uuid} could not be started: {error}") from error.__cause__
                del self._pending[uuid]
                return found

    def _overdue(self) -> list[tuple[str, str]]:
        """Return the runners whose step or reservation takes too long, each with the reason."""
        overdue, now = [], time.perf_counter()
        for uuid, one in self._pending.items():
            if one.is_start and one.end_by_s is not None and self.runners[uuid].is_placed:
                one.end_by_s = None
            if one.end_by_s is not None and now >= one.end_by_s:
                late = f"its step has not ended within {self._timeouts.step_s:g} s"
                overdue.append((uuid, self.runners[uuid].no_place(self._timeouts.place_s) if one.is_start else late))
        return overdue

    def _patience(self, timeout_s: float | None) -> float | None:
        """Return the seconds to wait: until the next deadline of a runner, at most ``timeout_s``."""
        now = time.perf_counter()
        waits = [max(0.0, one.end_by_s - now) for one in self._pending.values() if one.end_by_s is not None]
        return min([*waits, *([] if timeout_s is None else [timeout_s])], default=None)

    def _lose(self, uuid: str, reason: str) -> None:
        self._last_loss = f"; the last one was lost: {uuid}: {reason}"
        self._lost.append(LostRunner(uuid, reason))
        self._failed += self._replace(uuid, reason)

    def _order(self) -> None:
        while due := self._dispatcher.startable:
            uuid = min(due)
            command = self._dispatcher.begin(uuid)
            if command is not None:
                begin_s = time.perf_counter()  # before the order: the step may end while it is sent
                end_by_s = begin_s + self._timeouts.step_s
                self._pending[uuid] = _PendingReply(self.runners[uuid].step(command), begin_s, end_by_s)

    def _replace(self, uuid: str, reason: str) -> tuple[RequestState, ...]:
        """Replace a runner, or give up one that died while starting; return the requests that failed with it."""
        if uuid not in self._dispatcher.policy.gpus:
            self._give_up(uuid)
            return ()
        failed = self._dispatcher.died(uuid, reason)
        self.runners[uuid].kill()
        self._start(uuid)
        return failed

    def _give_up(self, uuid: str) -> None:
        self._pending.pop(uuid, None)
        self.runners.pop(uuid).close()
