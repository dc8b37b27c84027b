"""Running a laid-out step: buffers and metadata once, the model once, one token for each request."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from punica.adapters import LoRAModelManager
from punica.engine.attention import PagedAttention
from punica.engine.buffers import StepBuffers
from punica.engine.sampler import choose_tokens, token_logprobs
from punica.models import LlamaForCausalLM
from punica.scheduling import StepLayout


class StepTokens(NamedTuple):
    """Next token of each of the S requests, ``{row: {token id: logprob}}`` of those that ask for it, and the seconds
    spent on metadata and on the model (host clock).
    """

    token_ids: list[int]
    logprobs: dict[int, dict[int, float]]
    metadata_s: float
    model_s: float


class ModelRunner:
    """The model, its attention and (with LoRA) the manager whose wrapper the LoRA layers share.

    Steps have at most ``max_tokens`` rows.
    """

    def __init__(
        self, model: LlamaForCausalLM, attention: PagedAttention, manager: LoRAModelManager | None, max_tokens: int
    ) -> None:
        self.model = model
        self.attention = attention
        self.manager = manager
        self.buffers = StepBuffers(max_tokens, attention.cache.keys[0].device)

    @torch.inference_mode()
    def run(self, layout: StepLayout, meanwhile: Callable[[], None]) -> StepTokens:
        """Tokens of a step; how they are chosen is the matter of ``sampler.py``. ``meanwhile`` is called when all
        has been given to the device and before the tokens are read, which waits for it.
        """
        start = time.perf_counter()
        rows = self.buffers.fill(layout)
        self.attention.begin(layout.spans, rows.kv_rows)
        if self.manager is not None:
            is_prefill = layout.num_prefill_rows > 0
            self.manager.begin_step(layout.segments, layout.sampled_slots, is_prefill=is_prefill)
        ready = time.perf_counter()
        hidden = self.model(rows.token_ids, rows.positions, self.attention)
        if layout.num_prefill_rows:
            hidden = hidden[rows.sampled_rows]
        logits = self.model.compute_logits(hidden)
        tokens = choose_tokens(logits, layout.requests)
        meanwhile()
        logprobs = token_logprobs(logits, tokens, layout.requests)
        return StepTokens(tokens.tolist(), logprobs, ready - start, time.perf_counter() - ready)
