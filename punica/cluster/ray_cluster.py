"""`RayCluster`: the scheduler of section 5.1 over runners that are Ray actors; to its users, one large engine.

    with RayCluster(partial(Engine.from_pretrained, folder, max_batch_size=32, max_loras=32), num_runners=4) as cluster:
        results = cluster.generate(prompts, adapters, 64)

Every runner takes one step after the other, each on the scheduler's order, and its tokens come back with the step:

    step():   wait for a runner -> Dispatcher.end -> ClusterPolicy.place -> Dispatcher.begin -> the runner's next step

The order for the next step costs one message there and back, in which that runner (and no other) waits.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from punica.adapters import LoRARequest
from punica.adapters.peft_config import CONFIG_FILE
from punica.adapters.read import WEIGHTS_FILE
from punica.adapters.request import check_same_source, resolve_adapter_path
from punica.checks import check_count, check_number, clip
from punica.cluster.dispatch import Dispatcher, EndedStep
from punica.cluster.folders import StoredFiles, digest_of
from punica.cluster.output import ClusterOutput, LostRunner, RunnerStep, cluster_output
from punica.cluster.policy import ScaleSignal
from punica.cluster.ray_runners import Lost, RunnerProcesses, connect, import_ray, result_of, store, wait_for
from punica.cluster.runner import RunnerDescription, StepReply
from punica.engine import Engine, GenerationResult, Request, RequestState
from punica.engine.generation import Generation
from punica.engine.results import result_of as generation_result


@dataclass(eq=False)
class _Awaited:
    """What a runner owes since ``begin_s``: futures of all its ranks, for its description when it starts or for a step;
    and the answer of rank 0 once it is there. One that starts waits for its place until ``place_by_s``, which is
    ``None`` once it has it.
    """

    futures: list[Any]
    begin_s: float
    place_by_s: float | None = None
    answer: Any = None


class RayCluster(Generation):
    """Requests to runners, tokens back; runners that die are replaced and nobody notices.

    Args:
        build: makes a runner's engine, in the runner's process (or in each of its ranks); it travels by pickle. Of a
            checkpoint folder ``partial(Engine.from_pretrained, folder, ..., max_loras=max_batch_size)``, of a random
            backbone ``partial(punica.cluster.runner.random_engine, ...)``.
        num_runners: to begin with, named ``runner-0000`` and so on: the UUIDs that settle ties.
        tp_size: ranks of each runner, one actor each in a placement group.
        rule: name of a scheduling rule, see `punica.cluster.SCHEDULING_RULES`.
        max_queued: most requests that may wait for a GPU; then `add_request` refuses, while ``generate`` and ``stream``
            wait.
        address: of a Ray cluster (``"auto"``, ``"host:6379"``); ``None``: the one that this process has joined, else a
            new one on this machine, which ends with this object.
        num_cpus, num_gpus: reserved for each rank; Ray hides no GPU from ranks that reserve none, so ``build`` says
            which device is meant. ``num_threads``: of torch in each.
        place_timeout_s: seconds that a runner waits for its reservation where others have theirs.

    One thread uses it, and its :meth:`step` must be called for anything to go on. Use it in a ``with`` block, or call
    :meth:`close`. A greedy request, or one that samples with a seed, gets the tokens that a single engine would give
    it, whichever runners it comes to; requests without a seed get theirs from the engines' seed and their number.

    Raises what `connect` and the engine's factory raise, ValueError for runners of different kinds, RuntimeError where
    one finds no place or cannot be started.
    """

    def __init__(
        self, build: Callable[[], Engine], num_runners: int = 1, *, tp_size: int = 1, rule: str = "punica",
        max_queued: int = 1024, address: str | None = None, num_cpus: float = 1, num_gpus: float = 0,
        num_threads: int = 1, place_timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        super().__init__()
        count, ranks = check_count("num_runners", num_runners), check_count("tp_size", tp_size)
        cpus, gpus = check_number("num_cpus", num_cpus), check_number("num_gpus", num_gpus)
        threads = check_count("num_threads", num_threads)
        self._place_timeout_s = check_number("place_timeout_s", place_timeout_s)
        self._last_loss = ""
        self._settings = (build, ranks, cpus, gpus, threads)
        self._numbers = itertools.count()
        self._stored: dict[int, tuple[LoRARequest, StoredFiles]] = {}  # by adapter id: files in the object store
        self._awaited: dict[str, _Awaited] = {}
        self.runners: dict[str, RunnerProcesses] = {}
        self._dispatcher: Dispatcher | None = None
        self._owns_ray = connect(address, count * ranks * cpus, count * ranks * gpus)
        try:
            for _ in range(count):
                self.add_runner()
            descriptions = {uuid: self._await_start(uuid) for uuid in sorted(self.runners)}
            first = next(iter(descriptions.values()))
            self._dispatcher = Dispatcher(first, rule, max_queued, self._files_of)
            for uuid, description in descriptions.items():
                self._dispatcher.join(uuid, description)
        except BaseException:
            self.close()
            raise
        self.codec, self.defaults = self._dispatcher.codec, first.defaults

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all runners, and Ray if it was started here. Unfinished requests are lost."""
        for runner in self.runners.values():
            runner.close()
        self.runners, self._awaited, self._dispatcher = {}, {}, None
        if self._owns_ray:
            import_ray().shutdown()
            self._owns_ray = False

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> RequestState:
        """Queue a request; what is known of it from now on. What is wrong with its adapter shows when it joins a
        runner, and fails it and nobody else.

        Raises `ClusterFull` where ``max_queued`` wait; TypeError and ValueError as :meth:`Engine.add_request`.
        """
        return self._desk.add(request)

    def add_or_fail(self, request: Request) -> RequestState:
        """As :meth:`add_request`, but waits for its place in the queue: for ``generate`` and ``stream``."""
        while self._desk.is_full:
            self._step_for_all()
        return self._desk.add(request)

    def abort_request(self, request_id: str) -> GenerationResult:
        """Take an unfinished request out; its result, with the output it has so far. ValueError for an unknown id."""
        return self.result_of(self._desk.abort(request_id))

    def is_in_use(self, request_id: str) -> bool:
        """Whether a request of this name has not ended, or belongs to a call that is not over."""
        return self._desk.is_in_use(request_id) or request_id in self._own

    def has_unfinished(self) -> bool:
        """True while :meth:`step` has something to bring."""
        return bool(self._desk.num_unfinished or self._kept)

    def put_adapter(self, adapter: LoRARequest) -> None:
        """Serve the adapter from Ray's object store, for runners on machines that do not see its folder: its files are
        read here, once, and each runner fetches them when it first needs them.

        FileNotFoundError: no such folder, or files missing in it. ValueError: its id stands for another adapter.
        """
        known, _ = self._stored.get(adapter.lora_int_id, (None, None))
        check_same_source(known, adapter)
        folder = resolve_adapter_path(adapter.absolute_path)
        files = {name: Path(folder, name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
        self._stored[adapter.lora_int_id] = adapter, StoredFiles(digest_of(files), store(files))

    def drop_adapter(self, adapter: LoRARequest) -> None:
        """Serve it from its folder again, and forget its files: here now, in the object store when the requests that
        wait for it have ended, in the runners when their place is needed. Its id may then stand for another adapter.

        ValueError: it was not put, or its id stands for another adapter.
        """
        known, _ = self._stored.get(adapter.lora_int_id, (None, None))
        if known is None:
            raise ValueError(
                f"adapter {clip(adapter.lora_name)} (id {adapter.lora_int_id}) is not in the object store; there are "
                f"ids {clip(sorted(self._stored))}"
            )
        check_same_source(known, adapter)
        del self._stored[adapter.lora_int_id]

    def step(self, timeout_s: float | None = None) -> ClusterOutput:
        """Wait for the end of a runner's step (at most ``timeout_s`` seconds), take in what came, order what is next.

        Empty when nothing is under way. RuntimeError when requests wait and there is no runner that could serve them.
        """
        joined: list[str] = []
        ended: list[tuple[RunnerStep, EndedStep]] = []
        failed: list[RequestState] = []
        lost = self._without_place()
        self._order()
        self._check_alive()
        owners = {future: uuid for uuid, awaited in self._awaited.items() for future in awaited.futures}
        for future in wait_for(list(owners), self._patience(timeout_s)) if owners else ():
            uuid = owners[future]
            awaited = self._awaited.get(uuid)
            if awaited is None or future not in awaited.futures:
                continue  # another of its ranks has died
            try:
                answer = self._collect(uuid, future)
            except Lost as error:
                lost.append(self._note_loss(uuid, str(error)))
                failed += self._replace(uuid, str(error))
                continue
            if isinstance(answer, RunnerDescription):
                self._desk.join(uuid, answer)
                joined.append(uuid)
            elif answer is not None:
                arrived, done = time.perf_counter(), self._desk.end(uuid, answer)
                ended.append((RunnerStep(uuid, done.work, awaited.begin_s, arrived, answer.seconds), done))
        self._order()
        decisions, self._desk.decisions_s = tuple(self._desk.decisions_s), []
        output = cluster_output(ended, failed, decisions, lost, joined, self.result_of)
        return cast(ClusterOutput, self._with_kept(output))

    def result_of(self, state: RequestState) -> GenerationResult:
        """The result of a request that has ended. RuntimeError for one that has not."""
        return generation_result(state, self.codec)

    # --- runners -----------------------------------------------------------------------------------------------------

    @property
    def scale_signal(self) -> ScaleSignal:
        """Section 5.1: whether to :meth:`add_runner`, and which ones to :meth:`remove_runner`."""
        return self._desk.policy.scale_signal()

    @property
    def working_sets(self) -> dict[str, int]:
        """Requests on every runner that is ready."""
        return {uuid: gpu.working_set for uuid, gpu in sorted(self._desk.policy.gpus.items())}

    @property
    def num_queued(self) -> int:
        """Requests that wait for a GPU."""
        return self._desk.policy.num_queued

    @property
    def num_pages(self) -> int:
        """KV pages of a runner that the scheduler gives out."""
        return self._desk.description.num_pages

    def add_runner(self) -> str:
        """Start one more; its name. It joins in the :meth:`step` in which it is ready, and is ``lost`` in one, with the
        reason, if it finds no place or cannot be started.
        """
        uuid = f"runner-{next(self._numbers):04}"
        self.runners[uuid] = RunnerProcesses(*self._settings)
        self._start(uuid)
        return uuid

    def remove_runner(self, uuid: str) -> None:
        """Give one back; its requests go on elsewhere. ValueError for an unknown one."""
        if uuid not in self.runners:
            raise ValueError(f"no runner {clip(uuid)}; there are {', '.join(sorted(self.runners))}")
        if uuid in self._desk.policy.gpus:
            self._desk.leave(uuid)
        self._give_up(uuid)

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _desk(self) -> Dispatcher:
        if self._dispatcher is None:
            raise RuntimeError("the cluster is closed; build another one")
        return self._dispatcher

    def _files_of(self, adapter: LoRARequest) -> StoredFiles | None:
        known, files = self._stored.get(adapter.lora_int_id, (None, None))
        check_same_source(known, adapter)
        return files

    def _start(self, uuid: str) -> None:
        begin_s = time.perf_counter()
        self._awaited[uuid] = _Awaited(self.runners[uuid].start(), begin_s, begin_s + self._place_timeout_s)

    def _await_start(self, uuid: str) -> RunnerDescription:
        while True:
            for lost in self._without_place():
                raise RuntimeError(f"{lost.runner} could not be started: {lost.reason}")
            for future in wait_for(self._awaited[uuid].futures, self._patience(None)):
                try:
                    found = self._collect(uuid, future)
                except Lost as error:
                    raise RuntimeError(f"{uuid} could not be started: {error}") from error.__cause__
                if isinstance(found, RunnerDescription):
                    return found

    def _without_place(self) -> list[LostRunner]:
        """Give up the runners that have waited for a place as long as they may."""
        lost = []
        for uuid, awaited in list(self._awaited.items()):
            if awaited.place_by_s is None:
                continue
            runner = self.runners[uuid]
            if runner.is_placed:
                awaited.place_by_s = None
            elif time.perf_counter() >= awaited.place_by_s:
                lost.append(self._note_loss(uuid, runner.no_place(self._place_timeout_s)))
                self._give_up(uuid)
        return lost

    def _patience(self, timeout_s: float | None) -> float | None:
        """Seconds to wait for whatever comes first, at most ``timeout_s``: until a runner has to have its place."""
        now = time.perf_counter()
        places = [max(0.0, one.place_by_s - now) for one in self._awaited.values() if one.place_by_s is not None]
        return min([*places, *([] if timeout_s is None else [timeout_s])], default=None)

    def _note_loss(self, uuid: str, reason: str) -> LostRunner:
        self._last_loss = f"; the last one was lost: {uuid}: {reason}"
        return LostRunner(uuid, reason)

    def _collect(self, uuid: str, future: Any) -> RunnerDescription | StepReply | None:
        """Take in the answer of a rank; that of rank 0 once all ranks have answered. `Lost`."""
        awaited = self._awaited[uuid]
        answer = result_of(future)
        awaited.futures.remove(future)
        awaited.answer = answer if awaited.answer is None else awaited.answer
        if awaited.futures:
            return None
        del self._awaited[uuid]
        return cast("RunnerDescription | StepReply", awaited.answer)

    def _order(self) -> None:
        """The next step for every runner that has something to do and no step under way."""
        while self._desk.startable:
            uuid = min(self._desk.startable)
            command = self._desk.begin(uuid)
            if command is not None:
                begin_s = time.perf_counter()  # before the runner has it: it can be done before we are called again
                self._awaited[uuid] = _Awaited(self.runners[uuid].step(command), begin_s)

    def _replace(self, uuid: str, reason: str) -> tuple[RequestState, ...]:
        """A runner died: its requests wait again, another one is started in its place. One that dies while it starts is
        given up. Requests that have failed with it.
        """
        if uuid not in self._desk.policy.gpus:
            self._give_up(uuid)
            return ()
        failed = self._desk.died(uuid, reason)
        self.runners[uuid].kill()
        self._start(uuid)
        return failed

    def _give_up(self, uuid: str) -> None:
        self._awaited.pop(uuid, None)
        self.runners.pop(uuid).close()

    def _check_alive(self) -> None:
        if self._awaited or not self._desk.num_unfinished:
            return
        raise RuntimeError(
            f"{self._desk.num_unfinished} requests wait, and none of the {len(self._desk.policy.gpus)} runners can "
            f"serve the first of them; call add_runner, or abort_request{self._last_loss}"
        )
