"""Steps as CUDA graphs: what the host says once, the device repeats.

A step of a 7B model launches several hundred kernels, more than the host can in the time that the device needs for
them. A graph replays them all. It is captured for a shape, to which steps are padded:

* rows of prompts: none, or one of `prompt_sizes`; rows that no prompt fills write nothing and are read by nobody;
* decode rows: one of `decode_sizes`; beside a prompt, where a few rows more cost nothing, the largest;
* adapters, for which the LoRA kernels are chosen (`captured_adapters`: one, a quarter of the decode rows, as many as
  rows); a step takes the first that is enough. Steps without any adapter have graphs of their own, with no LoRA kernel;
* whether any of the step's adapters is for the embedding or the head. Few are, and else their LoRA work is left out.

Whatever differs from step to step lies in buffers that are refilled in place.

On several tensor-parallel ranks a graph holds the collectives of its step, so every rank has to capture, and to replay,
the same shapes in the same order. Shapes follow from a step's layout, which is the same on all ranks, and from nothing
that a rank measures for itself; before a capture the ranks compare them all the same.

A step whose graph finds no memory is one that the host launches, from then on.
"""

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from punica.layers import capturing_vocabulary, rehearsal
from punica.metadata import captured_adapters
from punica.parallel import all_ranks_agree, check_in_step, check_same_on_all_ranks, current_group, in_step


class StepResult(NamedTuple):
    """``logits [S, vocab]`` of the rows to sample, and the most probable token of each, int64 ``[S]``."""

    logits: Tensor
    best: Tensor


class GraphShape(NamedTuple):
    """What a graph was captured for: rows of prompts, then rows that decode, and among these distinct adapters (0: no
    row of the step has any); ``vocabulary``: with the LoRA work of embedding and head.
    """

    prompt_rows: int
    decode_rows: int
    adapters: int
    vocabulary: bool = False


@dataclass
class CaptureStatistics:
    """What graphs cost: how many there are, the bytes of device memory that they hold, and the seconds it took to make
    them (kernels that had to be compiled first included); ``refused``: for how many shapes there was no memory.
    """

    graphs: int = 0
    bytes: int = 0
    seconds: float = 0.0
    refused: int = 0


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: StepResult


class StepGraphs:
    """Graphs of steps of up to ``max_batch_size`` requests, each captured when the first step needs it.

    Args:
        begin: fills the step's buffers with any step of a shape.
        forward: runs the model on the buffers' rows of a shape, and leaves the result where it leaves that of every
            shape: what a graph kept for itself, no other could use. Neither may own the graphs, else both stay until
            somebody collects cycles.
        max_prompt_rows: most rows of prompts in one step; 0: only steps without prompts are captured.
        max_loras: slots; 0 without LoRA.

    A result holds until the next replay of any graph: they share their memory. Built on several ranks, the graphs end
    with the group at the latest.
    """

    def __init__(
        self, begin: Callable[[GraphShape], None], forward: Callable[[GraphShape], StepResult], max_batch_size: int,
        max_prompt_rows: int, max_loras: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._begin, self._forward, self._max_loras, self._device = begin, forward, max_loras, device
        self._decode_sizes, self._prompt_sizes = decode_sizes(max_batch_size), prompt_sizes(max_prompt_rows)
        self.statistics = CaptureStatistics()
        self._captured: dict[GraphShape, _Captured] = {}
        self._refused: set[GraphShape] = set()
        self._pool = torch.cuda.graph_pool_handle()
        if (group := current_group()).world_size > 1:
            group.before_close(self.release)  # type: ignore[attr-defined]  # who can be captured has it

    def shape(
        self, prompt_rows: int, decode_rows: int, adapters: int, *, uses_lora: bool, vocabulary: bool
    ) -> GraphShape | None:
        """The smallest shape for a step; ``None``: there is none, or no memory for its graph. ``adapters``: of the
        decode rows; ``uses_lora``: whether any row has one; ``vocabulary``: whether any row has one for embedding or
        head.
        """
        if prompt_rows > (self._prompt_sizes or [0])[-1]:
            return None
        if prompt_rows:
            prompt_rows = _at_least(prompt_rows, self._prompt_sizes)
            decode_rows = self._decode_sizes[-1] if decode_rows else 0
        else:
            decode_rows = _at_least(decode_rows, self._decode_sizes)
        adapters = _at_least(adapters, self._counts(decode_rows)) if uses_lora else 0
        shape = GraphShape(prompt_rows, decode_rows, adapters, vocabulary and adapters > 0)
        return None if shape in self._refused else shape

    def has(self, shape: GraphShape) -> bool:
        """Whether the graph of ``shape`` is captured."""
        return shape in self._captured

    def prepare(self, shape: GraphShape) -> bool:
        """Capture the graph of ``shape`` unless that is done; whether it is there. The step's buffers are overwritten.

        It is not there, and not tried again before :meth:`release`, when memory ends on this rank, or on any rank once
        all have rehearsed. RuntimeError, on every rank, for whatever else ends a capture. A rehearsal that fails on one
        of several ranks puts them out of step (:func:`~punica.parallel.in_step`).
        """
        if shape in self._captured or shape in self._refused:
            return shape in self._captured
        what = "the shape of a captured step (prompt rows, decode rows, adapters, vocabulary)"
        check_same_on_all_ranks(what, shape)
        try:
            self._captured[shape] = self._capture(shape)
        except torch.OutOfMemoryError:
            check_in_step()
            self._refused.add(shape)
            self.statistics.refused += 1
        return shape in self._captured

    def shapes(self, prompt_rows: int, *, vocabulary: bool) -> list[GraphShape]:
        """Of all steps of up to that many rows of prompts, the largest first, whose memory the others share: decodes,
        and prompts, beside decodes and alone; each with adapters and without, and with ``vocabulary`` also with those
        of embedding and head.
        """
        prompts = self._prompt_sizes[: bisect.bisect_left(self._prompt_sizes, prompt_rows) + 1] if prompt_rows else []
        rows = [(size, decodes) for size in reversed(prompts) for decodes in (self._decode_sizes[-1], 0)]
        rows += [(0, decodes) for decodes in reversed(self._decode_sizes)]
        return [
            GraphShape(*pair, count, ends)
            for pair in rows
            for count in ((*reversed(self._counts(pair[1])), 0) if self._max_loras else (0,))
            for ends in ((True, False) if vocabulary and count else (False,))
        ]

    def replay(self, shape: GraphShape) -> StepResult:
        """Run the graph of ``shape`` on what the buffers hold."""
        captured = self._captured[shape]
        captured.graph.replay()
        return captured.result

    def _counts(self, rows: int) -> list[int]:
        return captured_adapters(rows, self._max_loras) or [1]

    def release(self) -> None:
        """Forget all graphs, and which found no memory; the next step that needs one captures it again. Waits for the
        device, which may be at one.
        """
        torch.cuda.synchronize(self._device)
        self._captured.clear()
        self._refused.clear()
        self.statistics = CaptureStatistics()

    def _capture(self, shape: GraphShape) -> _Captured:
        start, stream = time.perf_counter(), torch.cuda.Stream(self._device)
        with capturing_vocabulary(shape.vocabulary):
            with in_step():
                self._rehearse(shape, stream)
            torch.cuda.empty_cache()  # the capture does so too; what it gives back is no graph's
            free = torch.cuda.mem_get_info(self._device)[0]
            with all_ranks_agree():  # a graph that one rank has not can be replayed by none; none has sent anything yet
                captured = self._record(shape, stream)
        torch.cuda.synchronize(self._device)
        self.statistics.graphs += 1
        self.statistics.bytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        self.statistics.seconds += time.perf_counter() - start
        return captured

    def _rehearse(self, shape: GraphShape, stream: torch.cuda.Stream) -> None:
        """Run the step once: compiles and loads what is needed, and connects the ranks, which a capture cannot."""
        self._begin(shape)
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), rehearsal():
                self._forward(shape)
        finally:
            current.wait_stream(stream)

    def _record(self, shape: GraphShape, stream: torch.cuda.Stream) -> _Captured:
        """Thread-local, as NCCL's watchdog asks for events of earlier collectives meanwhile, in a thread of its own.

        torch.OutOfMemoryError also where CUDA, not torch, had none: for the graph itself.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # the stream outside, too: a capture that ends with an error does not leave it
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                result = self._forward(shape)
        except RuntimeError as error:
            if "out of memory" in f"{error} {error.__context__}":
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return _Captured(graph, result)


def decode_sizes(max_rows: int) -> list[int]:
    """Numbers of decode rows for which graphs are captured, ascending: powers of two up to 8, then multiples of 8; the
    last is at least ``max_rows``.
    """
    return [rows for rows in (1, 2, 4, 8) if rows < 2 * max_rows] + list(range(16, max_rows + 8, 8))


def prompt_sizes(max_rows: int) -> list[int]:
    """Numbers of prompt rows for which graphs are captured, ascending: multiples of 64, from 1024 on every eighth of a
    power of two; the last is at least ``max_rows``. What padding adds is at most 63 rows, or an eighth.
    """
    sizes = [0]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (1 << max(6, sizes[-1].bit_length() - 4)))
    return sizes[1:]


def _at_least(wanted: int, sizes: list[int]) -> int:
    """The first of ascending ``sizes`` that is enough, else the last."""
    return sizes[min(bisect.bisect_left(sizes, wanted), len(sizes) - 1)]
