"""This library's tiny Llama of a Hugging Face folder with the manager of its adapters; without PEFT, for processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from punica.adapters import LoRAModelManager, LoRARequest
from punica.config import LoRAConfig
from punica.metadata import LoRAMapping
from punica.models import LlamaForCausalLM
from punica.ops.backbone import PackedHeads

VOCAB, MAX_RANK = 67, 8


class GrowingAttention:
    """Causal attention of several sequences side by side; `lengths` are their tokens in the next forward pass."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer_index: int, packed: PackedHeads) -> torch.Tensor:
        q, k, v = packed.rotated()
        outputs, start = [], 0
        for sequence, length in enumerate(self.lengths):
            rows = slice(start, start + length)
            key, value = k[rows], v[rows]
            if (layer_index, sequence) in self._cache:
                old_key, old_value = self._cache[layer_index, sequence]
                key, value = torch.cat([old_key, key]), torch.cat([old_value, value])
            self._cache[layer_index, sequence] = key, value
            queries, keys, values = (t.transpose(0, 1) for t in (q[rows], key, value))
            visible = torch.ones(length, len(key), dtype=torch.bool).tril(len(key) - length)
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=True)
            outputs.append(attended.transpose(0, 1))
            start += length
        return torch.cat(outputs)


class Ours:
    """This library's model of a Hugging Face folder, managed, and the requests for adapter folders beside it."""

    def __init__(self, base_folder: Path, adapters: dict[str, Path], **config: Any) -> None:
        self.root = base_folder
        self.model = LlamaForCausalLM(base_folder, dtype=torch.float32)
        self.model.load_weights(base_folder)
        limits = LoRAConfig(**{"max_lora_rank": MAX_RANK, "max_loras": max(1, len(adapters)), **config})
        self.manager = LoRAModelManager(self.model, 16, 256, VOCAB, limits, "cpu")
        self.requests = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(adapters.items(), 1)}

    def logits(
        self, prompts: Sequence[Sequence[int]], names: Sequence[str | None], active: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """As `reference_logits`: all tokens but the last in one prefill, then one step of single decode rows. `active`:
        first token of each prompt that its adapter works on.
        """
        attention, active = GrowingAttention(), active or [0] * len(prompts)
        first = self._step(attention, [prompt[:-1] for prompt in prompts], names, [0] * len(prompts), active)
        last = self._step(attention, [prompt[-1:] for prompt in prompts], names, [len(p) - 1 for p in prompts], active)
        return [torch.cat(both) for both in zip(first, last, strict=True)]

    def _step(
        self, attention: GrowingAttention, tokens: Sequence[Sequence[int]], names: Sequence[str | None],
        starts: Sequence[int], active: Sequence[int],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        requests = [None if name is None else self.requests[name] for name in names]
        own = [0 if request is None else request.lora_int_id for request in requests]
        rows = zip(own, tokens, starts, active, strict=True)
        ids = [i if start + t >= begin else 0 for i, row, start, begin in rows for t in range(len(row))]
        attention.lengths = [len(row) for row in tokens]
        self.manager.set_active_adapters(requests, LoRAMapping(ids, ids, is_prefill=max(attention.lengths) > 1))
        flat = torch.tensor([token for row in tokens for token in row])
        positions = torch.cat([torch.arange(len(row)) + at for row, at in zip(tokens, starts, strict=True)])
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model(flat, positions, attention))
        return logits.split(attention.lengths)
