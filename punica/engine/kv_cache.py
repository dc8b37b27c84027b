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
from punica.parallel import check_free


class KVCache:
    """Keys and values of all layers of ``model`` for ``num_blocks`` blocks, in the dtype and on the device of its
    weights; who owns which block is :class:`~punica.scheduling.BlockManager`'s matter.

    Memory: ``2 * num_layers * num_blocks * block_size * num_kv_heads * head_size`` elements, not initialised; on a CPU
    the operating system backs memory only when it is first written. ValueError, before any of it: more than is free.
    """

    def __init__(self, model: LlamaForCausalLM, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        weight, shape = model.lm_head.weight, (num_blocks * block_size, model.num_kv_heads, model.head_size)
        wanted = 2 * model.num_layers * num_blocks * block_size * model.num_kv_heads * model.head_size
        check_free(
            f"a KV cache of {num_blocks} blocks of {block_size} tokens", wanted * weight.element_size(),
            weight.device, "lower EngineConfig.num_blocks, max_batch_size or max_model_len",
        )  # fmt: skip
        self.keys = [weight.new_empty(shape) for _ in range(model.num_layers)]
        self.values = [weight.new_empty(shape) for _ in range(model.num_layers)]
        self._head_first = [
            tuple(rows.transpose(0, 1).unsqueeze(0) for rows in pair)
            for pair in zip(self.keys, self.values, strict=True)
        ]

    def write(self, layer_index: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` ``[T, Hkv, D]`` at ``rows [T]`` (int64: ``block * block_size + offset``)."""
        self.keys[layer_index].index_copy_(0, rows, keys)
        self.values[layer_index].index_copy_(0, rows, values)

    def read(self, layer_index: int, block_table: Sequence[int], num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``num_tokens`` tokens of a block table, each ``[1, Hkv, num_tokens, D]``.

        A view when the blocks follow one another, else a gathered copy.
        """
        keys, values = self._head_first[layer_index]
        first = block_table[0]
        if tuple(block_table) == tuple(range(first, first + len(block_table))):
            start = first * self.block_size
            return keys.narrow(2, start, num_tokens), values.narrow(2, start, num_tokens)
        rows = torch.tensor(block_table, device=keys.device).mul_(self.block_size).unsqueeze(1)
        rows = (rows + torch.arange(self.block_size, device=keys.device)).flatten()[:num_tokens]
        return keys.index_select(2, rows), values.index_select(2, rows)
