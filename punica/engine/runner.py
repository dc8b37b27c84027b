"""Model runner: stages a step's inputs, launches the model, and hands out tokens once the device has them."""

import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from punica.adapters import LoRAModelManager
from punica.engine.attention import INVARIANT_SPLITS, KernelAttention, KVCache, attention_for
from punica.engine.config import EngineConfig
from punica.engine.cuda_graph import GraphShape, StepGraphs, StepResult, StepShapes
from punica.engine.sampler import NO_TOKEN, PendingCopy, PendingLogprobs, choose_tokens, token_logprobs
from punica.engine.speculation import StepTokens, verified
from punica.layers import capturing_vocabulary, rehearsal
from punica.metadata import MixedRows, RowGroups
from punica.metadata.staging import StagedBuffer, send
from punica.models import LlamaForCausalLM
from punica.ops.backbone import argmax
from punica.parallel import collectives_can_be_captured, in_step
from punica.progress import shown
from punica.scheduling import RequestState, StepLayout


class StepRows(NamedTuple):
    """Views of a step's inputs, int64 on the device: three of ``[T]``, padded rows included, and one of ``[S]``."""

    token_ids: Tensor
    positions: Tensor
    kv_rows: Tensor
    sampled_rows: Tensor


class StepInputs:
    """Inputs of up to ``max_tokens`` rows at addresses that never change, as a captured CUDA graph requires.

    One copy per step sends them, asynchronously on CUDA. A step reads the first entries only; the others are stale.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._staged = StagedBuffer((len(StepRows._fields), max_tokens), torch.int64, device)

    def fill(self, layout: StepLayout, num_rows: int = 0, num_sampled: int = 0) -> StepRows:
        """Refill from a layout, padded to ``num_rows`` and ``num_sampled``; the views hold until the next call.

        Padding: token 0, position 0, cache row -1 (none), sampled row 0.
        """
        sampled = [span.start + span.length - 1 for span in layout.spans]  # the last row of every request
        if layout.drafts:
            sampled = [row for _, row in layout.sampled]
        num_rows, num_sampled = max(num_rows, len(layout.token_ids)), max(num_sampled, len(sampled))
        arrays = (layout.token_ids, layout.positions, layout.kv_rows, sampled)
        lengths = (num_rows, num_rows, num_rows, num_sampled)
        for row, values, length, padding in zip(self._staged.begin(), arrays, lengths, (0, 0, -1, 0), strict=True):
            row[: len(values)] = values
            row[len(values) : length] = padding
        self._staged.commit(len(arrays))
        return self.first(num_rows, num_sampled)

    def first(self, num_rows: int, num_sampled: int) -> StepRows:
        lengths = (num_rows, num_rows, num_rows, num_sampled)
        return StepRows(*(row[:length] for row, length in zip(self._staged.tensor, lengths, strict=True)))


class InFlight(NamedTuple):
    """Step launched on the device, whose tokens the host has not read.

    ``device_tokens``: int64 ``[S]``, for the next step to read. ``metadata_ready_s``: when its metadata was sent.
    """

    layout: StepLayout
    device_tokens: Tensor
    token_ids: PendingCopy
    logprobs: PendingLogprobs | None
    metadata_ready_s: float

    def tokens(self) -> StepTokens:
        with in_step():
            found = self.token_ids.tolist(), {} if self.logprobs is None else self.logprobs.read()
        return verified(self.layout, *found) if self.layout.drafts else StepTokens(*found)


class ModelRunner:
    """The model, its attention, inputs of its steps, and their graphs.

    On a GPU steps run as CUDA graphs. Exceptions: ``cuda_graphs=False``, collectives that cannot be captured (gloo),
    attention without a kernel, no memory for the graph.
    """

    def __init__(
        self, model: LlamaForCausalLM, cache: KVCache, manager: LoRAModelManager | None, config: EngineConfig
    ) -> None:
        self.model, self.manager = model, manager
        device, slots = cache.keys[0].device, 0 if manager is None else manager.lora_slots
        self.shapes = StepShapes(config.max_batch_size, config.max_num_batched_tokens, slots, config.speculate)
        splits = INVARIANT_SPLITS if config.batch_invariant else None
        self._most_verified = 1 + config.speculate
        self.attention = attention_for(
            cache, self.shapes.max_requests, -(-config.max_model_len // cache.block_size), splits,
            cached_prompts=config.caches_prompts,
        )  # fmt: skip
        self.inputs = StepInputs(config.max_step_rows, device)
        modules = [] if manager is None else manager.modules.values()
        self._ends = [layer for layer in modules if layer.skips_when_empty]
        self.graphs: StepGraphs | None = None
        self._results: StepResult | None = None
        if config.cuda_graphs and isinstance(self.attention, KernelAttention) and collectives_can_be_captured():
            this = weakref.proxy(self)  # a reference cycle would keep the KV cache of a dropped engine
            self.graphs = StepGraphs(
                lambda shape: this._stage_dummy(shape), lambda shape: this._forward_shape(shape), device
            )

    @property
    def works_ahead(self) -> bool:
        """Staging ahead saves time: steps are graphs. A host that launches each kernel itself has no time to spare."""
        return self.graphs is not None

    @torch.inference_mode()
    def launch(self, layout: StepLayout, before: InFlight | None = None) -> InFlight:
        """Send the inputs of a step and launch it; its graph is captured if it is the first of its shape.

        ``before``: the step in flight, whose tokens the decode rows continue; they stay on the device. A model that
        fails on one of several ranks puts it out of step.
        """
        shape = None if self.graphs is None else self._shape_of(layout)
        tokens = None if before is None else before.device_tokens
        if shape is not None and self.graphs is not None and not self.graphs.has(shape):
            tokens = None if tokens is None else tokens.clone()  # the capture overwrites results
            if not self.graphs.prepare(shape):
                shape = None
        requests: Sequence[RequestState] = layout.requests
        if layout.drafts:
            sampled = [index for index, _ in layout.sampled]
            requests = [layout.requests[index] for index in sampled]
        padded = layout if shape is None else layout.padded(shape.prompt_rows)  # after the capture, which stages too
        rows = self.inputs.fill(padded, *((0, 0) if shape is None else self._rows_of(shape)))
        most_rows = self._most_verified if layout.verifies else None
        self.attention.begin(padded.spans, rows.kv_rows, padded.num_prefill_rows, most_rows)
        if before is not None and tokens is not None:
            self._feed(padded, rows, before.layout, tokens)
        with in_step():
            if self.manager is not None:
                is_prefill, slots = padded.num_prefill_rows > 0, padded.sampled_slots
                if padded.drafts:
                    slots = tuple(slots[index] for index in sampled)
                mixtures = padded.mixtures, 0 if shape is None else shape.mixed
                self.manager.begin_step(padded.segments, slots, *mixtures, is_prefill=is_prefill)
            ready = time.perf_counter()
            if shape is None or self.graphs is None:
                logits, best = self._forward(rows, samples_all=layout.samples_all)
            else:
                logits, best = (of_rows[: len(requests)] for of_rows in self.graphs.replay(shape))
            tokens = choose_tokens(logits, requests, best)
            logprobs = token_logprobs(logits, tokens, requests)
            return InFlight(layout, tokens, PendingCopy(tokens), None if logprobs is None else logprobs.copied(), ready)

    def warm_up_slots(self) -> None:
        """Run the kernel that writes slots; no mark of embedding or head stays."""
        if self.manager is None:
            return
        dummy = self.manager.create_dummy_lora(1, 1, embedding_modules=())
        if dummy.loras:  # LoRA may be on embedding and head alone
            self.manager.add_adapter(dummy)
            self.manager.activate_adapter(1)
            self.manager.remove_adapter(1)

    @torch.inference_mode()
    def warm_up(self, prompt_rows: int, *, progress: bool) -> None:
        """Capture the graphs of all steps with up to ``prompt_rows`` rows of prompts, or run those without one."""
        shapes = self.shapes.up_to(prompt_rows, vocabulary=any(layer.filled_slots for layer in self._ends))
        for shape in shown(shapes, "warm-up: steps of each size", "step") if progress else shapes:
            if not self.capture(shape):
                with in_step(), rehearsal(), capturing_vocabulary(shape.vocabulary):
                    self._stage_dummy(shape)
                    self._forward(self.inputs.first(*self._rows_of(shape)), samples_all=shape.samples_all)

    @torch.inference_mode()
    def capture(self, shape: GraphShape) -> bool:
        """Capture the graph of ``shape`` if steps have graphs; return whether it exists."""
        return self.graphs is not None and self.graphs.prepare(shape)

    def _feed(self, padded: StepLayout, rows: StepRows, before: StepLayout, tokens: Tensor) -> None:
        """Replace the token ids of decode rows by the ``tokens [S]`` of the step before, for the same requests."""
        first = padded.num_prefill_rows
        joining = sum(span.start < first for span in padded.spans)
        places = {request: place for place, request in enumerate(before.requests)}
        order = [places[request] for request in padded.requests[joining:]]
        if order != list(range(len(tokens))):
            tokens = tokens.index_select(0, send(order, torch.int64, tokens.device))
        rows.token_ids[first : first + len(order)].copy_(tokens.clamp(min=0))  # NO_TOKEN: a row that is not read

    def _shape_of(self, layout: StepLayout) -> GraphShape | None:
        first = layout.num_prefill_rows
        slots = [slot for slot, span in zip(layout.sampled_slots, layout.spans, strict=True) if span.start >= first]
        used = {*layout.sampled_slots}.union(slot for mixture in layout.mixtures for slot, _ in mixture) - {-1}
        shape = self.shapes.of(
            first, len(slots), len(used if layout.verifies else {*slots} - {-1}), uses_lora=bool(used),
            vocabulary=any(not used.isdisjoint(layer.filled_slots) for layer in self._ends), verifies=layout.verifies,
        )  # fmt: skip
        if layout.mixtures:
            shape = shape._replace(mixed=1 << (max(map(len, layout.mixtures)) - 1).bit_length())
        return None if self.graphs is None or self.graphs.is_refused(shape) else shape

    def _stage_dummy(self, shape: GraphShape) -> None:
        """Stage a step of ``shape`` that writes no cache row: one prompt, and other rows spread evenly over slots."""
        prompts, decodes, adapters, _, mixed, _ = shape
        num_rows, num_sampled = self._rows_of(shape)
        rows = self.inputs.fill(StepLayout((), (), (), [], [], [], 0), num_rows, num_sampled)
        self.attention.begin((), rows.kv_rows, prompts, self._most_verified if shape.verifies else None)
        if self.manager is None:
            return
        if shape.verifies:
            prompts, decodes = 0, num_rows
        spread = max(1, adapters - (prompts > 0)) if adapters else 0  # the prompt has one of them
        slots = [0, *((i + (prompts > 0)) % self.manager.lora_slots for i in range(spread))] if adapters else [-1]
        shares = [decodes // spread + (i < decodes % spread) for i in range(spread)]
        tokens, sampled = (
            RowGroups.of_runs(slots, [rows - sum(shares), *shares]) for rows in (num_rows, num_sampled)
        )  # fmt: skip
        self.manager.punica_wrapper.begin_step(tokens, sampled, self.manager.vocab_size)
        if mixed:
            lists = np.arange(mixed)[None] % self.manager.lora_slots
            both = [MixedRows.of_runs(lists, np.ones((1, mixed)), [count]) for count in (num_rows, num_sampled)]
            self.manager.punica_wrapper.begin_mixtures(*both)

    def _rows_of(self, shape: GraphShape) -> tuple[int, int]:
        """Return rows and sampled rows of a shape; with a prompt, the most of any step are sampled."""
        rows = shape.prompt_rows + shape.decode_rows
        return rows, rows if shape.samples_all else self.shapes.max_sampled

    def _forward_shape(self, shape: GraphShape) -> StepResult:
        """Run the model for a graph; all shapes share one result buffer, so that graphs share more memory."""
        found = self._forward(self.inputs.first(*self._rows_of(shape)), samples_all=shape.samples_all)
        if self._results is None:
            self._results = StepResult(*(part.new_empty(self.shapes.max_sampled, *part.shape[1:]) for part in found))
        kept = StepResult(*(whole[: len(part)] for whole, part in zip(self._results, found, strict=True)))
        for place, part in zip(kept, found, strict=True):
            place.copy_(part)
        return kept

    def _forward(self, rows: StepRows, *, samples_all: bool) -> StepResult:
        hidden: Tensor = self.model(rows.token_ids, rows.positions, self.attention)
        if not samples_all:
            hidden = hidden[rows.sampled_rows]
        logits = self.model.compute_logits(hidden)
        return StepResult(logits, argmax(logits, NO_TOKEN))
