"""The vocabulary-parallel embedding and its mirror image, the language-model head.

The table ``[vocab, dim]`` is split by rows. A rank's shard is laid out as

    its original ids | padding | its added ids | padding

where *added* ids are those a fine-tune put behind the original vocabulary. Both parts are padded (to multiples of
``padding_size``), so that the split of the original vocabulary does not depend on the added ids. Looking an id up,
every rank contributes its row or zeros, and the sum over ranks is the embedding.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from punica.checks import check_count
from punica.parallel.group import divide, tensor_model_parallel_all_reduce
from punica.parallel.linear import UnquantizedLinearMethod, annotated_parameter, check_checkpoint_shape, resolve_tp


@dataclass(frozen=True)
class VocabShardIndices:
    """Half-open id ranges of one rank: *padded* ones have the shard's width, the others only real ids. Added ids count
    on from ``org_vocab_size``; a padded range may reach past the last real id.
    """

    padded_org_vocab_start_index: int
    padded_org_vocab_end_index: int
    padded_added_vocab_start_index: int
    padded_added_vocab_end_index: int
    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int

    @property
    def num_org_elements(self) -> int:
        return self.org_vocab_end_index - self.org_vocab_start_index

    @property
    def num_org_elements_padded(self) -> int:
        """The row at which added ids begin."""
        return self.padded_org_vocab_end_index - self.padded_org_vocab_start_index

    @property
    def num_added_elements(self) -> int:
        return self.added_vocab_end_index - self.added_vocab_start_index


class VocabParallelEmbedding(nn.Module):
    """Token embedding split over ranks by vocabulary rows.

    Args:
        num_embeddings: number of ids, added ones included; ``org_num_embeddings``: without them (``None``: none added).
        params_dtype: dtype of the table; ``None`` is ``torch.get_default_dtype()``.
        padding_size: the original part, then the whole, are rounded up to multiples of it.
        tp_rank, tp_size: this rank's place; ``None`` asks the current group.

    ``weight`` is ``[num_embeddings_per_partition, embedding_dim]`` and starts as zeros, so that padding rows are zero.
    Raises ``ValueError`` for sizes below 1, ``org_num_embeddings > num_embeddings`` or parts that do not divide by tp.
    """

    weight: nn.Parameter

    def __init__(
        self, num_embeddings: int, embedding_dim: int,
        params_dtype: torch.dtype | None = None, org_num_embeddings: int | None = None, padding_size: int = 64,
        tp_rank: int | None = None, tp_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        org = num_embeddings if org_num_embeddings is None else org_num_embeddings
        self.num_embeddings = check_count("num_embeddings", num_embeddings)
        self.embedding_dim = check_count("embedding_dim", embedding_dim)
        self.org_vocab_size = check_count("org_num_embeddings", org)
        self.padding_size = check_count("padding_size", padding_size)
        if org > num_embeddings:
            raise ValueError(f"org_num_embeddings must be at most num_embeddings={num_embeddings}, got {org}")
        self.tp_rank, self.tp_size = resolve_tp(tp_rank, tp_size)
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.org_vocab_size_padded = -(-org // padding_size) * padding_size
        whole = self.org_vocab_size_padded + num_embeddings - org
        self.num_embeddings_padded = -(-whole // padding_size) * padding_size
        self.num_embeddings_per_partition = divide(self.num_embeddings_padded, self.tp_size)
        self.shard_indices = self._indices_of(self.tp_rank)
        self.num_org_embeddings_per_partition = self.shard_indices.num_org_elements
        self.num_added_embeddings_per_partition = self.shard_indices.num_added_elements
        self.quant_method = UnquantizedLinearMethod()
        self.weight = self._parameter(self.num_embeddings_per_partition, embedding_dim)

    def _parameter(self, *shape: int) -> nn.Parameter:
        return annotated_parameter(torch.zeros(shape, dtype=self.params_dtype), self.weight_loader)

    def _indices_of(self, rank: int) -> VocabShardIndices:
        """Id ranges of any rank: each part is dealt out in equal padded pieces, rank 0 first."""
        org_rows = divide(self.org_vocab_size_padded, self.tp_size)
        added_rows = divide(self.num_embeddings_padded - self.org_vocab_size_padded, self.tp_size)
        org_start, added_start = rank * org_rows, self.org_vocab_size + rank * added_rows
        padded = (org_start, org_start + org_rows, added_start, added_start + added_rows)
        limits = (self.org_vocab_size, self.org_vocab_size, self.num_embeddings, self.num_embeddings)
        return VocabShardIndices(*padded, *map(min, padded, limits))

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard_id: Hashable = None) -> None:
        """Copy this rank's rows of the full checkpoint table or head bias (``num_embeddings`` rows, or the original
        ones); everything else becomes zero. ``ValueError``, and no change: another shape, or a shard id.
        """
        if shard_id is not None:
            raise ValueError(f"shard_id must be None, a vocabulary table is one matrix; got {shard_id!r}")
        has_added = loaded_weight.ndim > 0 and loaded_weight.shape[0] != self.org_vocab_size
        rows = self.num_embeddings if has_added else self.org_vocab_size
        check_checkpoint_shape(loaded_weight, (rows, *param.shape[1:]), type(self).__name__)
        shard = self.shard_indices
        param.data.zero_()
        org = loaded_weight[shard.org_vocab_start_index : shard.org_vocab_end_index]
        param.data[: shard.num_org_elements].copy_(org)
        if has_added:
            added = loaded_weight[shard.added_vocab_start_index : shard.added_vocab_end_index]
            param.data.narrow(0, shard.num_org_elements_padded, shard.num_added_elements).copy_(added)

    def forward(self, input_: Tensor) -> Tensor:
        """Ids of any shape ``[...]`` (int32 or int64) to ``[..., embedding_dim]``.

        An id outside ``[0, num_embeddings)`` is a ``ValueError`` on CPU. On CUDA a check would stall the stream: there
        such an id reads some valid row or zeros. Other dtypes: ``TypeError``.
        """
        self._check_ids(input_)
        if self.tp_size == 1 and self.num_embeddings == self.org_vocab_size:
            return F.embedding(input_.clamp(0, self.num_embeddings - 1) if input_.is_cuda else input_, self.weight)
        shard = self.shard_indices
        org = (input_ >= shard.org_vocab_start_index) & (input_ < shard.org_vocab_end_index)
        added = (input_ >= shard.added_vocab_start_index) & (input_ < shard.added_vocab_end_index)
        added_row = input_ - shard.added_vocab_start_index + shard.num_org_elements_padded
        rows = torch.where(org, input_ - shard.org_vocab_start_index, torch.where(added, added_row, 0))
        output = F.embedding(rows, self.weight)
        if self.tp_size == 1:
            return output
        output.masked_fill_(~(org | added).unsqueeze(-1), 0)
        return tensor_model_parallel_all_reduce(output)

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids must be int32 or int64, got {ids.dtype}")
        if ids.device.type != "cpu" or ids.numel() == 0:
            return
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self.num_embeddings:
            bad = low if low < 0 else high
            raise ValueError(f"ids must be in [0, {self.num_embeddings}), got {bad}; check the tokenizer's vocabulary")

    def column_of_id(self) -> list[int]:
        """Row of each id in the shards of all ranks, ``[num_embeddings_padded]``: original, added, then padding."""
        org: list[int] = []
        added: list[int] = []
        for rank in range(self.tp_size):
            shard = self._indices_of(rank)
            first = rank * self.num_embeddings_per_partition
            org += range(first, first + shard.num_org_elements)
            first_added = first + shard.num_org_elements_padded
            added += range(first_added, first_added + shard.num_added_elements)
        return org + added + sorted({*range(self.num_embeddings_padded)}.difference(org, added))

    def get_sharded_to_full_mapping(self) -> list[int] | None:
        """:meth:`column_of_id` for gathered logits; ``None`` for ``tp_size`` 1. With 4 original and 2 added ids,
        padding 4 and tp 2 the gathered columns hold the ids ``0,1,4,5 | 2,3,-,-``: ``[0, 1, 4, 5, 2, 3, 6, 7]``.
        """
        return None if self.tp_size == 1 else self.column_of_id()


class ParallelLMHead(VocabParallelEmbedding):
    """The output projection onto the vocabulary: same table, same split, used as a matrix.

    ``quant_method.apply(lm_head, hidden [S, dim])`` gives this rank's logits ``[S, num_embeddings_per_partition]``;
    `LogitsProcessor` joins them. ``columns_in_id_order``: int64 ``[num_embeddings_padded]``, where added ids put the
    columns in another order than that of the ids.
    """

    bias: nn.Parameter | None
    columns_in_id_order: Tensor | None

    def __init__(
        self, num_embeddings: int, embedding_dim: int, bias: bool = False, params_dtype: torch.dtype | None = None,
        **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, params_dtype, **common)
        self.register_parameter("bias", self._parameter(self.num_embeddings_per_partition) if bias else None)
        order = torch.tensor(self.column_of_id()) if num_embeddings > self.org_vocab_size else None
        self.register_buffer("columns_in_id_order", order, persistent=False)

    def forward(self, input_: Tensor) -> Tensor:
        raise RuntimeError("ParallelLMHead has no forward; pass it to LogitsProcessor(lm_head, hidden_states)")
