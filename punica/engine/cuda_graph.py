"""CUDA graphs of steps: captured once per padded shape, then replayed.

A step of a 7B model has several hundred kernels, which the host launches more slowly than the device runs them. A graph
replays them all. It is captured for a shape, to which steps are padded:

* rows of prompts: none, or one of `prompt_sizes`; padding rows write nothing and their outputs are not read;
* of a step with drafts all rows count as those of prompts; without a prompt they are one of `verify_sizes`;
* decode rows: one of `decode_sizes`; with a prompt the largest, as a few more rows cost nothing there;
* adapters, which select the LoRA kernels: the first of `captured_adapters` that is enough, 0 for no LoRA kernels;
* vocabulary: LoRA kernels of embedding and head, which few adapters need.

All inputs that differ between steps are refilled in place.

On several tensor-parallel ranks a graph contains the collectives of its step, so all ranks capture and replay the same
shapes in the same order. Shapes depend on the step's layout alone, which is the same on all ranks; the ranks compare
them before each capture.

If capture runs out of memory, that shape runs eagerly from then on.
"""

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from punica.capture import capture
from punica.layers import capturing_vocabulary, rehearsal
from punica.metadata import captured_adapters
from punica.parallel import all_ranks_agree, check_in_step, check_same_on_all_ranks, current_group, in_step


class StepResult(NamedTuple):
    """``logits [S, vocab]`` of the rows to sample, and the most probable token of each, int64 ``[S]``."""

    logits: Tensor
    best: Tensor


class GraphShape(NamedTuple):
    """Shape of a captured step; ``adapters``: distinct ones of decode rows, 0 if no row of the step has one; ``mixed``:
    most of one row, 0 without mixtures.

    ``verifies``: a step with drafts and without prompts, all of whose rows are sampled.
    """

    prompt_rows: int
    decode_rows: int
    adapters: int
    vocabulary: bool = False
    mixed: int = 0
    verifies: bool = False

    @property
    def samples_all(self) -> bool:
        return self.verifies or not self.prompt_rows


@dataclass
class CaptureStatistics:
    """Number of graphs, their device memory in bytes, and seconds of their capture (compilation included).

    ``refused``: shapes without memory for a graph.
    """

    graphs: int = 0
    bytes: int = 0
    seconds: float = 0.0
    refused: int = 0


class StepShapes:
    """Shapes that steps are padded to; ``max_loras``: slots, 0 without LoRA; ``drafts``: most of a request.

    ``max_requests``, ``max_sampled``: most requests of a step, and most sampled rows, padding included.
    """

    def __init__(self, max_batch_size: int, max_prompt_rows: int, max_loras: int, drafts: int = 0) -> None:
        self._max_loras, self._verify_sizes = max_loras, verify_sizes(max_batch_size, drafts)[1:]
        self._decode_sizes, self._prompt_sizes = decode_sizes(max_batch_size), prompt_sizes(max_prompt_rows)
        self.max_requests = self._decode_sizes[-1]
        self.max_sampled = max([self.max_requests, *self._verify_sizes])

    def of(
        self, prompt_rows: int, decode_rows: int, adapters: int, *, uses_lora: bool, vocabulary: bool,
        verifies: bool = False,
    ) -> GraphShape:  # fmt: skip
        """Return the smallest shape for a step with ``adapters`` distinct ones in decode rows, or with drafts.

        ``uses_lora``: any row has one; ``vocabulary``: any row has one for embedding or head.
        """
        if verifies:
            prompt_rows = _at_least(prompt_rows, self._verify_sizes)
        elif prompt_rows:
            prompt_rows = _at_least(prompt_rows, self._prompt_sizes)
            decode_rows = self.max_requests if decode_rows else 0
        else:
            decode_rows = _at_least(decode_rows, self._decode_sizes)
        counts = self._counts(prompt_rows if verifies else decode_rows)
        adapters = _at_least(adapters, counts) if uses_lora else 0
        return GraphShape(prompt_rows, decode_rows, adapters, vocabulary and adapters > 0, verifies=verifies)

    def up_to(self, prompt_rows: int, *, vocabulary: bool) -> list[GraphShape]:
        """List the shapes of all steps with up to ``prompt_rows`` rows of prompts, the largest first to share memory.

        ``vocabulary`` adds those for adapters of embedding and head.
        """
        prompts = self._prompt_sizes[: bisect.bisect_left(self._prompt_sizes, prompt_rows) + 1] if prompt_rows else []
        rows = [(size, decodes, False) for size in reversed(prompts) for decodes in (self.max_requests, 0)]
        rows += [(size, 0, True) for size in reversed(self._verify_sizes)]
        rows += [(0, decodes, False) for decodes in reversed(self._decode_sizes)]
        return [
            GraphShape(prompt_rows, decodes, count, ends, verifies=verifies)
            for prompt_rows, decodes, verifies in rows
            for counts in (self._counts(prompt_rows if verifies else decodes),)
            for count in ((*reversed(counts), 0) if self._max_loras else (0,))
            for ends in ((True, False) if vocabulary and count else (False,))
        ]

    def _counts(self, rows: int) -> list[int]:
        return captured_adapters(min(rows, self.max_requests), self._max_loras) or [1]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: StepResult


class StepGraphs:
    """Graphs of steps, each captured when the first step needs it.

    ``begin`` stages a dummy step of a shape; ``forward`` runs the model on its rows, and returns a result in memory
    shared by all shapes. Neither may hold the graphs: a reference cycle would delay their release.

    A result is valid until the next replay of any graph. On several ranks the graphs are released with the group.
    """

    def __init__(
        self, begin: Callable[[GraphShape], None], forward: Callable[[GraphShape], StepResult], device: torch.device
    ) -> None:
        self._begin, self._forward, self._device = begin, forward, device
        self.statistics = CaptureStatistics()
        self._captured: dict[GraphShape, _Captured] = {}
        self._refused: set[GraphShape] = set()
        self._pool = torch.cuda.graph_pool_handle()
        if (group := current_group()).world_size > 1:
            group.before_close(self.release)  # type: ignore[attr-defined]  # of groups that can be captured

    def has(self, shape: GraphShape) -> bool:
        return shape in self._captured

    def is_refused(self, shape: GraphShape) -> bool:
        return shape in self._refused

    def prepare(self, shape: GraphShape) -> bool:
        """Capture the graph of ``shape`` if it is missing, and return whether it exists; overwrites staged inputs.

        Out of memory, on this rank or after the warm-up on any, the shape is refused until :meth:`release`. Other
        errors of a capture are a RuntimeError on every rank. A warm-up that fails on one of several ranks puts them out
        of step (:func:`~punica.parallel.in_step`).
        """
        if shape in self._captured or shape in self._refused:
            return shape in self._captured
        what = "the shape of a captured step (prompt rows, decode rows, adapters, vocabulary, mixed, verifies)"
        check_same_on_all_ranks(what, shape)
        try:
            self._captured[shape] = self._capture(shape)
        except torch.OutOfMemoryError:
            check_in_step()
            self._refused.add(shape)
            self.statistics.refused += 1
        return shape in self._captured

    def replay(self, shape: GraphShape) -> StepResult:
        captured = self._captured[shape]
        captured.graph.replay()
        return captured.result

    def release(self) -> None:
        """Wait for the device, and release all graphs and refusals; later steps capture theirs again."""
        torch.cuda.synchronize(self._device)
        self._captured.clear()
        self._refused.clear()
        self.statistics = CaptureStatistics()

    def _capture(self, shape: GraphShape) -> _Captured:
        start, stream = time.perf_counter(), torch.cuda.Stream(self._device)
        with capturing_vocabulary(shape.vocabulary):
            with in_step():
                self._warm_up(shape, stream)
            torch.cuda.empty_cache()  # as the capture does: freed memory is not counted for the graph
            free = torch.cuda.mem_get_info(self._device)[0]
            with all_ranks_agree():  # all or none; no collective has been sent yet
                captured = self._record(shape, stream)
        torch.cuda.synchronize(self._device)
        self.statistics.graphs += 1
        self.statistics.bytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        self.statistics.seconds += time.perf_counter() - start
        return captured

    def _warm_up(self, shape: GraphShape, stream: torch.cuda.Stream) -> None:
        """Warm up: compile and load kernels, and connect the ranks, which a capture cannot."""
        self._begin(shape)
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), rehearsal():
                self._forward(shape)
        finally:
            current.wait_stream(stream)

    def _record(self, shape: GraphShape, stream: torch.cuda.Stream) -> _Captured:
        """Capture in thread-local mode, as NCCL's watchdog thread queries events of earlier collectives.

        torch.OutOfMemoryError also if CUDA, not torch, lacks memory for the graph itself.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # the stream outside, too: a failed capture does not restore it
            with (
                torch.cuda.stream(stream),
                capture(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                result = self._forward(shape)
        except RuntimeError as error:
            if "out of memory" in f"{error} {error.__context__}":
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return _Captured(graph, result)


def decode_sizes(max_rows: int) -> list[int]:
    """List the captured numbers of decode rows: powers of two to 8, then multiples of 8, to at least ``max_rows``."""
    return [rows for rows in (1, 2, 4, 8) if rows < 2 * max_rows] + list(range(16, max_rows + 8, 8))


def prompt_sizes(max_rows: int) -> list[int]:
    """List the captured numbers of prompt rows: 32, multiples of 64, from 1024 on eighths of a power of two.

    The last is at least ``max_rows``. Padding adds at most 63 rows, or an eighth.
    """
    sizes = [0]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (32 if sizes[-1] < 64 else 1 << max(6, sizes[-1].bit_length() - 4)))
    return sizes[1:]


def verify_sizes(max_batch_size: int, drafts: int) -> list[int]:
    """List the captured numbers of rows of steps with drafts, after a 0: as of decode rows to 64, then multiples of 32.

    ``drafts``: most of a request; 0: no such steps.
    """
    rows = max_batch_size * (1 + drafts)
    return [0, *decode_sizes(min(rows, 64))[1:], *range(96, rows + 32, 32)] if drafts else [0]


def _at_least(wanted: int, sizes: list[int]) -> int:
    """Return the first of ascending ``sizes`` that is enough, else the last."""
    return sizes[min(bisect.bisect_left(sizes, wanted), len(sizes) - 1)]
