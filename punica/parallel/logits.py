"""From hidden states to logits: head matmul, gather over ranks, cut to the real vocabulary, soft cap, scale."""

from typing import Any

import torch
from torch import Tensor, nn

from punica.parallel.embedding import VocabParallelEmbedding
from punica.parallel.group import tensor_model_parallel_all_gather, tensor_model_parallel_gather


def ordered_logits(
    processor: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None, order: Tensor | None = None
) -> Tensor | None:
    """Multiply with the shards of the head and gather by ``processor``, a column per id: original, added, padding.

    ``embedding_bias`` replaces the head's bias, ``order`` (int64, the column of every id) its ``columns_in_id_order``.
    ``None`` on ranks that do not get the logits.
    """
    bias = getattr(lm_head, "bias", None) if embedding_bias is None else embedding_bias  # a tied embedding has none
    logits = processor._gather_logits(lm_head.quant_method.apply(lm_head, hidden_states, bias))
    order = getattr(lm_head, "columns_in_id_order", None) if order is None else order
    return logits if logits is None or order is None else logits.index_select(-1, order)


class LogitsProcessor(nn.Module):
    """``logits = scale * cap(hidden W^T + b)`` with ``cap(z) = soft_cap * tanh(z / soft_cap)`` where a cap is set.

    ``vocab_size`` counts added ids too; ``org_vocab_size`` (``None``: all) columns are kept. ``logits_as_input``:
    hidden states are logits already. ``use_all_gather``: every rank gets the logits, else rank 0 (others ``None``).
    ``include_gpu_probs_tensor`` and ``should_modify_greedy_probs_inplace`` are plain flags that a sampler may read.
    """

    def __init__(
        self, vocab_size: int, org_vocab_size: int | None = None, scale: float = 1.0, logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = vocab_size if org_vocab_size is None else org_vocab_size
        self.scale, self.logits_as_input, self.soft_cap = scale, logits_as_input, soft_cap
        self.use_all_gather = True
        self.include_gpu_probs_tensor = self.should_modify_greedy_probs_inplace = False

    def forward(
        self, lm_head: VocabParallelEmbedding, hidden_states: Tensor, embedding_bias: Tensor | None = None
    ) -> Tensor | None:
        """``hidden_states [S, hidden]`` to logits ``[S, org_vocab_size]``, or ``None`` on ranks that do not get them.
        Calls ``self._get_logits``, so that a LoRA layer can lend its own version and keep the rest.
        """
        logits: Tensor | None = hidden_states
        if not self.logits_as_input:
            logits = self._get_logits(hidden_states, lm_head, embedding_bias)
        if logits is None:
            return None
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits if self.scale == 1.0 else logits * self.scale

    def _get_logits(
        self, hidden_states: Tensor, lm_head: VocabParallelEmbedding, embedding_bias: Tensor | None = None
    ) -> Tensor | None:
        logits = ordered_logits(self, lm_head, hidden_states, embedding_bias)
        return None if logits is None else logits[..., : self.org_vocab_size]

    def _gather_logits(self, logits: Tensor) -> Tensor | None:
        if self.use_all_gather:
            return tensor_model_parallel_all_gather(logits)
        return tensor_model_parallel_gather(logits)
