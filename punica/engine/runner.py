"""Running a laid-out step: metadata once, the model once, greedy tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from punica.adapters import LoRAModelManager
from punica.engine.attention import PagedAttention
from punica.engine.batch import StepBatch
from punica.metadata import LoRAMapping
from punica.models import LlamaForCausalLM


class ModelRunner:
    """The model, its attention and (with LoRA) the manager whose wrapper the LoRA layers share."""

    def __init__(self, model: LlamaForCausalLM, attention: PagedAttention, manager: LoRAModelManager | None) -> None:
        self.model = model
        self.attention = attention
        self.manager = manager
        self.device = attention.cache.keys[0].device

    @torch.inference_mode()
    def run(self, batch: StepBatch, meanwhile: Callable[[], None]) -> tuple[list[int], float, float]:
        """Next token of each of the S requests, and the seconds spent on metadata and on the model (host clock).

        ``argmax`` over the logits; of equal maxima the lowest id. ``meanwhile`` is called when everything has been
        given to the device and before the tokens are read, which waits for it.
        """
        start = time.perf_counter()
        rows = torch.tensor([batch.token_ids, batch.positions, batch.kv_rows]).to(self.device)
        token_ids, positions, kv_rows = rows.unbind(0)
        self.attention.begin(batch, kv_rows)
        if self.manager is not None:
            is_prefill = batch.num_prefill_rows > 0
            self.manager.set_adapter_mapping(LoRAMapping(batch.index_mapping, batch.adapter_ids, is_prefill))
        ready = time.perf_counter()
        hidden = self.model(token_ids, positions, self.attention)
        if batch.num_prefill_rows:
            hidden = hidden[torch.tensor(batch.sampled_rows, device=self.device)]
        tokens = self.model.compute_logits(hidden).argmax(dim=-1)
        meanwhile()
        return tokens.tolist(), ready - start, time.perf_counter() - ready
