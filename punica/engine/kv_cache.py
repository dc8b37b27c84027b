"""The tensors behind the blocks: keys and values of every token that a running request still attends to.

Per layer, keys and values are ``[num_blocks * block_size, Hkv, D]``, token after token: with B = ``block_size``, block
``b`` is rows ``[b * B, (b + 1) * B)``. A token is written with one contiguous row, and a run of consecutive
blocks is one strided area that attention reads in place. (The paper puts the page index outermost too, with all layers
inside a page; one tensor per layer needs no stride arithmetic here.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.models import LlamaForCausalLM
from punica.ops.quant import E4M3, saturated
from punica.parallel import check_free


class KVCache:
    """Keys and values of all layers of ``model`` for ``num_blocks`` blocks, in the dtype and on the device of its
    weights; who owns which block is :class:`~punica.scheduling.BlockManager`'s matter.

    ``fp8``: in float8_e4m3fn instead, half the bytes of 16 bits, without scales: what heads are after the projections
    lies well inside of the format's range (up to 448; beyond, the largest value stands). From 2**-6 on the relative
    error is at most 1/16, whatever the scale; below, values lie 2**-9 apart. A prompt attends to its own keys and
    values as they were before.

    Memory: ``2 * num_layers * num_blocks * block_size * num_kv_heads * head_size`` elements, not initialised; on a CPU
    the operating system backs memory only when it is first written. ValueError, before any of it: more than is free.
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
        """Keys and values of the first ``num_tokens`` tokens of a block table, each ``[1, Hkv, num_tokens, D]`` in the
        model's dtype.

        A view when the blocks follow one another and hold that dtype, else a copy.
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
    """Bytes of the keys and values of one token in all layers of this rank."""
    itemsize = 1 if fp8 else model.lm_head.weight.element_size()
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * itemsize
