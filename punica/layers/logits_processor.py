"""LoRA over the language-model head, applied where the logits of the sampled rows are made.

The logits processor multiplies with the head, gathers the shards of the vocabulary and puts their columns in the order
of the ids. Only then the LoRA term of the full vocabulary is added, before the base class's soft cap and scale:

    z_s = order(gather(W h_s + b)) + B_l (A_l h_s)        l = slot of sampled row s
"""

from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers.base import UnsplitLayer
from punica.layers.utils import has_vocabulary_work
from punica.parallel.logits import ordered_logits

MAX_VOCAB_SIZE = 258048
"""Widest vocabulary with LoRA on the head: the limit of vLLM's kernels, kept so that configurations carry over."""


class LogitsProcessorWithLoRA(UnsplitLayer):
    """``LogitsProcessor`` plus LoRA; A is given as ``[r, hidden]``, B as ``[vocab, r]``. Built by
    :func:`punica.layers.from_layer_logits_processor`, never by ``from_layer``.

    ``hidden_size``, ``dtype``, ``device``: of the head's weight. ``sharded_to_full_mapping``: for every id the column
    to take from the gathered logits (``None``: in order, unless the head has ``columns_in_id_order``), on ``device`` as
    ``sharded_to_full_mapping_gpu``. A and B cover all ``vocab_size`` ids (at most ``MAX_VOCAB_SIZE``), so the logits
    have that width even where the base layer cuts to ``org_vocab_size``. The base layer's settings can be read here.
    """

    _takes_mixtures = True
    logits_as_input = property(attrgetter("base_layer.logits_as_input"))
    vocab_size = property(attrgetter("base_layer.vocab_size"))
    org_vocab_size = property(attrgetter("base_layer.org_vocab_size"))
    scale = property(attrgetter("base_layer.scale"))
    soft_cap = property(attrgetter("base_layer.soft_cap"))
    use_all_gather = property(attrgetter("base_layer.use_all_gather"))
    include_gpu_probs_tensor = property(attrgetter("base_layer.include_gpu_probs_tensor"))
    should_modify_greedy_probs_inplace = property(attrgetter("base_layer.should_modify_greedy_probs_inplace"))

    def __init__(
        self, base_layer: Any, hidden_size: int, dtype: torch.dtype, device: torch.device | str,
        sharded_to_full_mapping: list[int] | None,
    ) -> None:  # fmt: skip
        super().__init__(base_layer, torch.device(device))
        self.hidden_size = self.full_input_size = hidden_size
        self.full_output_sizes = (base_layer.vocab_size,)
        self.dtype = dtype
        self.sharded_to_full_mapping = sharded_to_full_mapping
        self.sharded_to_full_mapping_gpu: Tensor | None = None

    def _allocate(self, max_loras: int, lora_config: LoRAConfig) -> None:
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"LoRA needs vocab_size <= {MAX_VOCAB_SIZE} here, got {self.vocab_size}; wrap no lm_head")
        super()._allocate(max_loras, lora_config)
        if self.sharded_to_full_mapping is not None:
            mapping = torch.as_tensor(self.sharded_to_full_mapping, dtype=torch.int64, device=self.device)
            self.sharded_to_full_mapping_gpu = mapping

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The base layer's forward (``lm_head, hidden_states [S, hidden], embedding_bias=None``), with LoRA."""
        return type(self.base_layer).forward(self, *args, **kwargs)

    def _get_logits(self, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None) -> Tensor | None:
        """Logits ``[S, vocab_size]`` with every row's LoRA term; ``None`` on ranks that do not get them. ``lm_head``
        may be wrapped. RuntimeError: no slots or wrapper yet.
        """
        head = getattr(lm_head, "base_layer", lm_head)
        self._ready_wrapper(hidden_states, head.weight)
        order = self.sharded_to_full_mapping_gpu
        logits = ordered_logits(self.base_layer, head, hidden_states, embedding_bias, order)
        if logits is None:
            return None
        if has_vocabulary_work(self.filled_slots, logits):
            rows = hidden_states.to(cast(LoRAConfig, self.lora_config).lora_dtype)
            self._inner.add_logits(logits, rows, self.lora_weights)
        return logits[..., : self.vocab_size]

    @classmethod
    def can_replace_layer(cls, **_: Any) -> bool:
        """Never: the head's sizes are needed, see :func:`punica.layers.from_layer_logits_processor`."""
        return False
