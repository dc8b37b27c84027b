"""Running a laid-out step: buffers and metadata once, the model once, one token for each request."""

import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from punica.adapters import LoRAModelManager
from punica.engine.buffers import StepBuffers, StepRows
from punica.engine.config import EngineConfig
from punica.engine.cuda_graph import GraphShape, StepGraphs, StepResult, decode_sizes, prompt_sizes
from punica.engine.kernel_attention import INVARIANT_SPLITS, KernelAttention, attention_for
from punica.engine.kv_cache import KVCache
from punica.engine.sampler import PendingLogprobs, PendingTokens, choose_tokens, greedy_tokens, token_logprobs
from punica.metadata import RowGroups
from punica.models import LlamaForCausalLM
from punica.parallel import collectives_can_be_captured, in_step
from punica.scheduling import Span, StepLayout


class StepTokens(NamedTuple):
    """Next token of each of the S requests, ``{row: {token id: logprob}}`` of those that ask for it, and the seconds
    spent on metadata and on the model (host clock).
    """

    token_ids: list[int]
    logprobs: dict[int, dict[int, float]]
    metadata_s: float
    model_s: float


def max_step_rows(config: EngineConfig) -> int:
    """Most rows of a step: the longest prompt beside a full batch, padded as its graphs are."""
    return prompt_sizes(config.max_num_batched_tokens)[-1] + decode_sizes(config.max_batch_size)[-1]


class _StagedStep(NamedTuple):
    """A step whose buffers are filled: its spans as laid out (which identify it), as padded for the graph of ``shape``
    (``None``: no graph, no padding), and its rows.
    """

    spans: tuple[Span, ...]
    padded: StepLayout
    shape: GraphShape | None
    rows: StepRows


class _BegunStep(NamedTuple):
    """A step that the device was given: its spans as laid out, its tokens where the next step may read them, and what
    the host will get.
    """

    spans: tuple[Span, ...]
    tokens: Tensor
    token_ids: PendingTokens
    logprobs: PendingLogprobs


class ModelRunner:
    """The model, its attention and (with LoRA) the manager whose wrapper the LoRA layers share.

    On a GPU steps run as CUDA graphs, unless the config says otherwise, a group's collectives cannot be part of one
    (gloo's), attention has no kernel there, or memory for a graph is lacking; steps with prompts where the library's
    attention can be captured (16-bit elements).
    """

    def __init__(
        self, model: LlamaForCausalLM, cache: KVCache, manager: LoRAModelManager | None, config: EngineConfig
    ) -> None:
        self.model, self.manager = model, manager
        device, self._max_requests = cache.keys[0].device, decode_sizes(config.max_batch_size)[-1]
        splits = INVARIANT_SPLITS if config.batch_invariant else None
        self.attention = attention_for(cache, self._max_requests, -(-config.max_model_len // cache.block_size), splits)
        self.buffers = StepBuffers(max_step_rows(config), device)
        modules = [] if manager is None else manager.modules.values()
        self._ends = [layer for layer in modules if layer.skips_when_empty]
        self.graphs: StepGraphs | None = None
        self._staged: _StagedStep | None = None
        self._begun: _BegunStep | None = None
        self._results: StepResult | None = None
        if config.cuda_graphs and isinstance(self.attention, KernelAttention) and collectives_can_be_captured():
            slots = 0 if manager is None else manager.lora_slots
            prompt_rows = config.max_num_batched_tokens if self.attention.takes_prompts_in_graphs else 0
            this = weakref.proxy(self)  # a cycle would keep the KV cache of a dropped engine
            self.graphs = StepGraphs(
                lambda shape: this._begin_any(shape), lambda shape: this._forward_shape(shape),
                config.max_batch_size, prompt_rows, slots, device,
            )  # fmt: skip

    @torch.inference_mode()
    def run(self, layout: StepLayout, meanwhile: Callable[[Tensor], None]) -> StepTokens:
        """Tokens of a step; how they are chosen is the matter of ``sampler.py``. ``meanwhile`` is called with them when
        all has been given to the device, and before the host reads them, which waits for it. What fails on one of
        several ranks, ``meanwhile`` aside, puts them out of step (:func:`~punica.parallel.in_step`). What was sent
        ahead of a step that fails is forgotten.
        """
        start = ready = time.perf_counter()
        begun = self._begun if self.has_begun(layout) else None
        self._begun = None
        try:
            if begun is None:
                staged = self._take_staged(layout)
                with in_step():
                    self._announce(staged)
                    ready = time.perf_counter()
                    begun = self._launch(staged, layout)
            meanwhile(begun.tokens)
            with in_step():
                token_ids, logprobs = begun.token_ids.read(), begun.logprobs.read()
            return StepTokens(token_ids, logprobs, ready - start, time.perf_counter() - ready)
        except BaseException:
            self.forget_ahead()
            raise

    @property
    def works_ahead(self) -> bool:
        """Whether :meth:`stage_ahead` saves time: steps are graphs, which leave the host idle while the device runs. A
        host that launches every kernel itself, on a CPU or with ``cuda_graphs=False``, has no time to spare.
        """
        return self.graphs is not None

    @torch.inference_mode()
    def stage_ahead(self, layout: StepLayout, tokens: Tensor) -> None:
        """Send what the next step needs while the device is busy with this one. ``layout``: one decode row for each of
        the requests of this step, in their order; ``tokens [S]``: those that it continues with, on the device, where
        this step leaves them. A next step that is another one is staged anew.
        """
        shape = self._shape_of(layout)
        if self._has(shape):
            self._staged = self._stage(layout, shape)
            self._staged.rows.token_ids[: len(tokens)].copy_(tokens.clamp(min=0))  # NO_TOKEN: an idle row

    @torch.inference_mode()
    def begin_ahead(self, layout: StepLayout) -> None:
        """Give the device the step that was staged ahead, behind the one that it is at, so that it goes on at once
        while the host reads that one's tokens. Not where a choice of tokens needs what the host has yet to read: all
        must be greedy, and want no log-probabilities.
        """
        staged = self._staged
        if staged is None or staged.spans is not layout.spans:
            return
        if all(request.params.is_greedy and request.params.logprobs is None for request in layout.requests):
            self._staged = None
            with in_step():
                self._announce(staged)
                self._begun = self._launch(staged, layout)

    @property
    def is_ahead(self) -> bool:
        """Whether the device was given a step whose tokens nobody has read yet."""
        return self._begun is not None

    def has_begun(self, layout: StepLayout) -> bool:
        """Whether the device was given this step by :meth:`begin_ahead`, and it was not forgotten since."""
        return self._begun is not None and self._begun.spans is layout.spans

    def forget_ahead(self) -> None:
        """Nothing was sent or begun ahead; what the device is at ends all the same."""
        self._staged = self._begun = None

    @torch.inference_mode()
    def capture_graphs(self, prompt_rows: int) -> None:
        """Capture the graphs of all steps with up to that many rows of prompts now, instead of when a first step needs
        each; nothing where there are none.
        """
        self.forget_ahead()
        if self.graphs is not None:
            for shape in self.graphs.shapes(prompt_rows, vocabulary=any(layer.filled_slots for layer in self._ends)):
                self.graphs.prepare(shape)

    @torch.inference_mode()
    def capture_step(self, prompt_rows: int, decode_rows: int, adapters: int, *, uses_lora: bool) -> None:
        """Capture now the graph of a step of that many rows of prompts and rows that decode, the latter with so many
        different adapters (``uses_lora``: any row of the step has one), none of them for the embedding or the head;
        nothing where the host launches such a step.
        """
        self.forget_ahead()
        if self.graphs is not None:
            shape = self.graphs.shape(prompt_rows, decode_rows, adapters, uses_lora=uses_lora, vocabulary=False)
            if shape is not None:
                self.graphs.prepare(shape)

    def _announce(self, staged: _StagedStep) -> None:
        """Tell the adapters' manager which step the device is given next."""
        if self.manager is not None:
            padded = staged.padded
            is_prefill = padded.num_prefill_rows > 0
            self.manager.begin_step(padded.segments, padded.sampled_slots, is_prefill=is_prefill)

    def _launch(self, staged: _StagedStep, layout: StepLayout) -> _BegunStep:
        """Give the device all of a step that was announced."""
        if staged.shape is None or self.graphs is None:
            logits, best = self._forward(staged.rows, samples_all=not layout.num_prefill_rows)
        else:
            logits, best = (of_rows[: len(layout.spans)] for of_rows in self.graphs.replay(staged.shape))
        tokens = choose_tokens(logits, layout.requests, best)
        logprobs = token_logprobs(logits, tokens, layout.requests)
        return _BegunStep(layout.spans, tokens, PendingTokens(tokens), logprobs)

    def _take_staged(self, layout: StepLayout) -> _StagedStep:
        """The step as sent ahead, if it is this one and its graph has not been released since; else sent now."""
        staged, self._staged = self._staged, None
        if staged is not None and staged.spans is layout.spans and self._has(staged.shape):
            return staged
        shape = self._shape_of(layout)
        if shape is not None and self.graphs is not None and not self.graphs.prepare(shape):
            shape = None
        return self._stage(layout, shape)

    def _has(self, shape: GraphShape | None) -> bool:
        """Whether a step of that shape can run: its graph is there, or the host launches it."""
        return shape is None or (self.graphs is not None and self.graphs.has(shape))

    def _stage(self, layout: StepLayout, shape: GraphShape | None) -> _StagedStep:
        """Fill the buffers, as the graph of ``shape`` wants them (captured before: that overwrites them)."""
        padded = layout if shape is None else layout.padded(shape.prompt_rows)
        rows = self.buffers.fill(padded, *((0, 0) if shape is None else self._rows_of(shape)))
        self.attention.begin(padded.spans, rows.kv_rows, padded.num_prefill_rows)
        return _StagedStep(layout.spans, padded, shape, rows)

    def _shape_of(self, layout: StepLayout) -> GraphShape | None:
        """Of the graph that runs the step; ``None``: the host launches it."""
        if self.graphs is None:
            return None
        slots = [slot for slot, span in zip(layout.sampled_slots, layout.spans, strict=True)
                 if span.start >= layout.num_prefill_rows]  # fmt: skip
        used = {*layout.sampled_slots} - {-1}
        return self.graphs.shape(
            layout.num_prefill_rows, len(slots), len({*slots} - {-1}),
            uses_lora=bool(used), vocabulary=any(not used.isdisjoint(layer.filled_slots) for layer in self._ends),
        )  # fmt: skip

    def _begin_any(self, shape: GraphShape) -> None:
        """Fill the buffers with a step of this shape that writes nothing: one prompt, and decode rows among which slots
        are shared out evenly.
        """
        prompts, decodes, adapters, _ = shape
        num_rows, num_sampled = self._rows_of(shape)
        rows = self.buffers.fill(StepLayout((), (), (), [], [], [], 0), num_rows, num_sampled)
        self.attention.begin((), rows.kv_rows, prompts)
        if self.manager is None:
            return
        slots = [0, *((i + (prompts > 0)) % self.manager.lora_slots for i in range(adapters))] if adapters else [-1]
        shares = [decodes // adapters + (i < decodes % adapters) for i in range(adapters)]
        tokens, sampled = (
            RowGroups.of_runs(slots, [rows - sum(shares), *shares]) for rows in (num_rows, num_sampled)
        )  # fmt: skip
        self.manager.punica_wrapper.begin_step(tokens, sampled, self.manager.vocab_size)

    def _rows_of(self, shape: GraphShape) -> tuple[int, int]:
        """Rows of a shape, and how many of them are sampled: beside a prompt, as many as there may be requests."""
        sampled = self._max_requests if shape.prompt_rows else shape.decode_rows
        return shape.prompt_rows + shape.decode_rows, sampled

    def _forward_shape(self, shape: GraphShape) -> StepResult:
        """The result of any shape in the same place: graphs that kept theirs would share less memory."""
        found = self._forward(self.buffers.first(*self._rows_of(shape)), samples_all=not shape.prompt_rows)
        if self._results is None:
            self._results = StepResult(*(part.new_empty(self._max_requests, *part.shape[1:]) for part in found))
        kept = StepResult(*(whole[: len(part)] for whole, part in zip(self._results, found, strict=True)))
        for place, part in zip(kept, found, strict=True):
            place.copy_(part)
        return kept

    def _forward(self, rows: StepRows, *, samples_all: bool) -> StepResult:
        hidden: Tensor = self.model(rows.token_ids, rows.positions, self.attention)
        if not samples_all:
            hidden = hidden[rows.sampled_rows]
        logits = self.model.compute_logits(hidden)
        return StepResult(logits, greedy_tokens(logits))
