"""LoRA over the token embedding: the shrink is a lookup.

``x_t A^T`` of a one-hot row is column ``id_t`` of A ``[r, org_vocab]``. A is stored transposed, a contiguous row of R
per id: row ``slot * org_vocab + id`` of ``lora_a_stacked_2d [L * org_vocab, R]``. A forward gathers one row per token:

    y_t = W[id_t] + B_l A_l[:, id_t]        l = slot of token t

Ids behind the original vocabulary (added by a fine-tune) have no row in A and get no LoRA term. The base layer is
split over ranks by ids and reduced; A and B are whole on every rank, and the term is added to the reduced output.
"""

from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers.base import UnsplitLayer
from punica.layers.utils import has_no_lora, has_vocabulary_work, is_kind_of
from punica.parallel.embedding import ParallelLMHead, VocabParallelEmbedding


class VocabParallelEmbeddingWithLoRA(UnsplitLayer):
    """``VocabParallelEmbedding`` plus LoRA; A is given as ``[r, org_vocab]``, B as ``[embedding_dim, r]``.

    Attributes: ``lora_a_stacked [L, org_vocab, R]`` and its view ``lora_a_stacked_2d [L * org_vocab, R]``,
    ``lora_b_stacked [L, 1, embedding_dim, R]``: tensors, as there is one slice.
    """

    a_row_major = False
    lora_a_stacked_2d: Tensor
    weight = property(attrgetter("base_layer.weight"))

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.full_input_size = base_layer.org_vocab_size
        self.full_output_sizes = (base_layer.embedding_dim,)

    def _allocate(self, max_loras: int, lora_config: LoRAConfig) -> None:
        super()._allocate(max_loras, lora_config)
        self.lora_a_stacked = self.lora_a_stacked.mT.squeeze(1)
        self.lora_a_stacked_2d = self.lora_a_stacked.flatten(0, 1)

    def forward(self, input_: Tensor) -> Tensor:
        """Ids of any shape ``[...]`` to ``[..., embedding_dim]``. The first T ids, flattened, are the step's tokens.

        Later ids are padding. A CUDA graph adapts as many rows as the mapping had when it was captured: capture with a
        mapping of the full batch.

        ``RuntimeError``: no slots, wrapper or metadata yet. ``ValueError``: fewer ids than the T of the mapping, or
        metadata that was made for another vocabulary.
        """
        wrapper = self._ready_wrapper()
        slots = wrapper.token_lora_indices  # int64 [T]
        tokens = slots.shape[0]
        if wrapper.vocab_size not in (None, self.full_input_size):
            raise ValueError(
                f"update_metadata was given vocab_size={wrapper.vocab_size}, but this embedding has org_vocab_size="
                f"{self.full_input_size}; pass that"
            )
        if input_.numel() < tokens:
            raise ValueError(f"got {input_.numel()} ids for {tokens} tokens of the mapping; update_metadata for them")
        output = self.base_layer(input_)
        if has_no_lora(wrapper) or not has_vocabulary_work(self.filled_slots, input_):
            return output
        shrunk = self._shrunk(input_.reshape(-1)[:tokens], slots)
        self._inner.add_embedding(output.view(-1, output.shape[-1])[:tokens], shrunk, self.stack_b)
        return output

    def _shrunk(self, ids: Tensor, slots: Tensor) -> Tensor:
        """``x A^T``: the gathered rows ``[T, R]``, zero for ids outside the original vocabulary. A row without adapter
        gets that of some slot, which is not read: the slots of a captured step change on the device.
        """
        known = ids.clamp(0, self.full_input_size - 1)
        rows = torch.add(known, slots, alpha=self.full_input_size).clamp_(min=0)
        if self.lora_a_scale:  # bytes, as FP8 cannot be looked up; lanes beyond a rank are not read by the expand
            stored = F.embedding(rows, self.lora_a_stacked_2d.view(torch.uint8)).view(self.lora_a_stacked.dtype)
            shrunk = stored.float() * F.embedding(slots.clamp(min=0), self.lora_a_scale[0][:, 0])
        else:
            shrunk = F.embedding(rows, self.lora_a_stacked_2d)
        return shrunk.masked_fill_((ids != known).unsqueeze(-1), 0)

    @classmethod
    def can_replace_layer(cls, *, source_layer: Any, lora_config: Any, **_: Any) -> bool:
        """Any vocabulary-parallel embedding that is not a head, sharded configuration or not."""
        return is_kind_of(source_layer, VocabParallelEmbedding) and not is_kind_of(source_layer, ParallelLMHead)
