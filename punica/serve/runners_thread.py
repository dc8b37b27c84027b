"""`RunnersThread`: the thread that steps a cluster of runners, section 5's scheduler behind the server's API.

    event loop <--> RunnersThread --orders--> runners (Ray actors), each with an engine
                                  <--tokens-- as each runner's step ends

Its engine is a `RayCluster`, which places requests by the paper's rule. The requests of a runner that dies are computed
again on others, with the tokens that their clients have (`punica/cluster/dispatcher.py`). A dead runner is replaced.
So is one that hangs in a step, which the cluster kills.
"""

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import cast

from punica.adapters import LoRARequest
from punica.cluster import ray_runners
from punica.cluster.adapter_files import StoredFiles
from punica.cluster.cluster_output import ClusterOutput
from punica.cluster.ray_cluster import RayCluster
from punica.cluster.ray_runners import Lost
from punica.engine import StepOutput
from punica.serve.engine_thread import SteppingThread
from punica.serve.errors import ApiError
from punica.serve.metrics import Metrics
from punica.serve.runner_metrics import RunnerMetrics

_log = logging.getLogger(__name__)
POLL_S = 0.01
"""Longest wait for the end of a runner's step before the thread looks for new requests and cancellations."""
TEND_S = 5.0
"""Time between two looks at idle runners, which may have died, and at runners that are missing."""


class RunnersThread(SteppingThread):
    """Thread that steps the runners of a cluster, and keeps as many as the cluster had at first.

    An error of a step is not one of a runner, so no request can be trusted after it: all get a 500 at once.
    """

    engine: RayCluster

    def __init__(self, cluster: RayCluster, metrics: Metrics) -> None:
        super().__init__(cluster, metrics)
        self._num_wanted = len(cluster.runners)
        self._num_ready = len(cluster.working_sets)
        self._num_evicted = cluster.num_evicted
        self._runner_metrics = RunnerMetrics(metrics.registry, self._num_wanted)
        self._loaded: dict[int, LoRARequest] = {}  # by id: those in the cluster's store
        self._tending: asyncio.Task[None] | None = None

    # --- event loop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to step and to look after the runners."""
        super().start()
        self._tending = asyncio.create_task(self._tend_regularly())

    async def stop(self) -> None:
        """Abort what is unfinished and end the thread; the cluster is its owner's to close."""
        if self._tending is not None:
            self._tending.cancel()
            with suppress(asyncio.CancelledError):
                await self._tending
        await super().stop()

    @property
    def num_places(self) -> int:
        """Requests of one step of every runner."""
        return self._num_wanted * self.engine.max_batch_size

    @property
    def has_lora(self) -> bool:
        """True for runners with adapter slots."""
        return self.engine.has_lora

    @property
    def health(self) -> str:
        """``"failed"`` without any runner, ``"degraded"`` while some are missing."""
        if not (self.is_healthy and self._num_ready):
            return "failed"
        return "ok" if self._num_ready >= self._num_wanted else "degraded"

    async def admit(self, adapter: LoRARequest) -> None:
        """Keep the adapter's files for all runners, and have one check them. ApiError 503: no runner is ready, or it
        does not reply in time. Reading files and waiting for the check leave the cluster's thread free to relay tokens.
        """
        files = await asyncio.to_thread(ray_runners.store_adapter, adapter)
        try:
            await self.call(partial(self._keep, adapter, files))
            await self._check(adapter)
        except BaseException as error:
            await self.call(partial(self._remove_adapter, adapter.lora_int_id))
            if isinstance(error, RuntimeError):
                raise ApiError(503, str(error), code="no_runner") from error
            raise

    async def _check(self, adapter: LoRARequest) -> None:
        """Have a runner check an adapter, the next one where it dies; errors of `RayCluster.order_check`."""
        tried: set[str] = set()
        while True:
            runner, wait = await self.call(partial(self.engine.order_check, adapter, tried))
            tried.add(runner)
            with suppress(Lost):  # a step reports the loss
                return await asyncio.to_thread(wait)

    async def _tend_regularly(self) -> None:
        while True:
            await asyncio.sleep(TEND_S)
            try:
                await self.call(self._tend)
            except ApiError:  # the thread has ended
                return
            except Exception:
                _log.exception("runners cannot be started")

    # --- cluster's thread ---------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        """Return True while requests or replies are awaited; a cluster whose step raised waits for :meth:`_tend`."""
        return bool(self._unfinished) or (self.engine.is_busy and not self._is_failing)

    def _advance(self) -> StepOutput:
        try:
            return self.engine.step(POLL_S)
        finally:
            self._num_ready = len(self.engine.working_sets)

    def _note_step(self, output: StepOutput) -> None:
        found, cluster = cast(ClusterOutput, output), self.engine
        for lost in found.lost:
            _log.warning("%s is lost: %s", lost.runner, lost.reason)
        working_sets, before = cluster.working_sets, self._num_evicted
        self._num_evicted = cluster.num_evicted
        self.metrics.note_steps(sum(not step.is_empty for step in found.steps), self._num_evicted - before)
        self.metrics.note_requests(sum(working_sets.values()), cluster.num_queued)
        self._runner_metrics.note(found, working_sets)

    def _tend(self) -> None:
        """Start missing runners, and have idle ones show that they live."""
        for _ in range(self._num_wanted - len(self.engine.runners)):
            self.engine.add_runner()
        self.engine.probe()
        self._step()

    def _keep(self, adapter: LoRARequest, files: StoredFiles) -> None:
        self.engine.put_adapter(adapter, files)
        self._loaded[adapter.lora_int_id] = adapter

    def _remove_adapter(self, adapter_id: int) -> None:
        """Free the files of an adapter that was loaded; runners evict it, as one that they were started with."""
        adapter = self._loaded.pop(adapter_id, None)
        if adapter is not None:
            self.engine.drop_adapter(adapter)
