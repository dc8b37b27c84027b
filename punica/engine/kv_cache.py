"""Paged KV cache: the tensors of the blocks that :class:`~punica.scheduling.BlockManager` hands out.

Per layer, keys and values are ``[num_blocks * block_size, Hkv, D]``: with B = ``block_size``, block ``b`` is rows
``[b * B, (b + 1) * B)``. A token is one contiguous row, and consecutive blocks are one strided view, read in place. (In
the paper all layers share a page; one tensor per layer needs no stride arithmetic.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.models import LlamaForCausalLM
from punica.ops.quant import E4M3, saturated
from punica.parallel import check_free


class KVCache:
    """Keys and values of all layers of ``model`` for ``num_blocks`` blocks, in its weights' dtype and on their device.

    ``fp8``: in float8_e4m3fn instead, half the bytes of 16 bits, without scales. Projected heads are well inside its
    range (448, saturating). The relative error is at most 1/16 from 2**-6 on; below, the spacing is 2**-9. A prompt
    attends to its own keys and values before they are rounded.

    Memory: ``2 * num_layers * num_blocks * block_size * num_kv_heads * head_size`` elements, not initialised; a CPU
    backs them when first written. ValueError, before allocation, for more than is free.
    """

    def __init__(self, model: LlamaForCausalLM, num_blocks: int, block_size: int, *, fp8: bool = False) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        weight, shape = model.lm_head.weight, (num_blocks * block_size, model.num_kv_heads, model.head_size)
        self.dtype, self.model_dtype = (E4M3 if fp8 else weight.dtype), weight.dtype
        check_free(
            f"a KV cache of {num_blocks} blocks of {block_size} tokens",
            num_blocks * block_size * token_bytes(model, fp8=fp8),
            weight.device, "lower EngineConfig.num_blocks, max_batch_size or max_model_len",
        )  # fmt: skip
        self.keys = [weight.new_empty(shape, dtype=self.dtype) for _ in range(model.num_layers)]
        self.values = [weight.new_empty(shape, dtype=self.dtype) for _ in range(model.num_layers)]
        self._head_first = [
            tuple(rows.transpose(0, 1).unsqueeze(0) for rows in pair)
            for pair in zip(self.keys, self.values, strict=True)
        ]

    def write(self, layer_index: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` ``[T, Hkv, D]`` at ``rows [T]`` (int64: ``block * block_size + offset``)."""
        for cached, new in ((self.keys[layer_index], keys), (self.values[layer_index], values)):
            if self.dtype == E4M3:  # torch copies rows of FP8 as bytes only
                cached.view(torch.uint8).index_copy_(0, rows, saturated(new, E4M3).view(torch.uint8))
            else:
                cached.index_copy_(0, rows, new)

    def read(self, layer_index: int, block_table: Sequence[int], num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first ``num_tokens`` tokens, each ``[1, Hkv, num_tokens, D]``.

        In the model's dtype: a view if the blocks are consecutive and of that dtype, else a copy.
        """
        keys, values = self._head_first[layer_index]
        first = block_table[0]
        if tuple(block_table) == tuple(range(first, first + len(block_table))):
            start = first * self.block_size
            keys, values = keys.narrow(2, start, num_tokens), values.narrow(2, start, num_tokens)
            return keys.to(self.model_dtype), values.to(self.model_dtype)
        rows = torch.tensor(block_table, device=keys.device).mul_(self.block_size).unsqueeze(1)
        rows = (rows + torch.arange(self.block_size, device=keys.device)).flatten()[:num_tokens]
        return keys.index_select(2, rows).to(self.model_dtype), values.index_select(2, rows).to(self.model_dtype)


def token_bytes(model: LlamaForCausalLM, *, fp8: bool = False) -> int:
    """Return the bytes of the keys and values of one token in all layers of this rank."""
    itemsize = 1 if fp8 else model.lm_head.weight.element_size()
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * itemsize
