"""Decoding a batch with a Hugging Face model: the loop, and a KV cache that grows in place.

The loop is written out instead of `generate()`: it calls the same forward with the same kind of cache, skips stopping
criteria, logits processors and per-step input preparation, and computes logits of the last position only, so it is the
faster of the two. Batches are padded on the left to their longest prompt, and a mask is passed only when there is
padding, because SDPA without a mask is faster. Every step ends with its tokens on the host, as in a server.

`DynamicCache` concatenates: at contexts of several hundred tokens it copies more bytes per step than the model has
weights, which would be counted for the adapters' operator. The layers here hold their full length from the start.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

PADDING = 0  # any token id: padded positions are masked

Room = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""`room(layer, batch, length)`: keys and values `[batch, heads, length, head_size]` to write into."""


class GrowingLayer(DynamicLayer):
    """A layer of the cache inside of tensors that hold all of its tokens; the first `filled` are there already."""

    def __init__(self, keys: Tensor, values: Tensor, filled: int) -> None:
        super().__init__()
        self._all = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._show(filled)

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values = (whole[:, :, :length] for whole in self._all)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens; those of all tokens."""
        start = self._length
        self._show(start + key_states.shape[-2])
        self.keys[:, :, start:].copy_(key_states)
        self.values[:, :, start:].copy_(value_states)
        return self.keys, self.values


class Decoding:
    """Greedy continuation of `prompts` by up to `new_tokens`, a step at a time.

    `named`: keyword arguments of every call (PEFT's `adapter_names`). `done`: tokens that each row is taken to have
    generated before; their keys and values, and the prompts', are what `room` holds.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, room: Room, device: str,
        named: dict[str, Any], done: int = 0,
    ) -> None:  # fmt: skip
        self._model, self._named, self._done = model, named, done
        self._width = max(len(prompt) for prompt in prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        column = torch.arange(self._width + new_tokens, device=device)
        self._mask = (column >= (self._width - lengths)[:, None]).long()
        self._has_padding = bool((lengths < self._width).any())
        self._positions = (column - (self._width - lengths)[:, None]).clamp_(min=0)
        filled = self._width + done - 1 if done else 0
        layers = range(model.config.num_hidden_layers)
        pairs = (room(layer, len(prompts), self._width + new_tokens) for layer in layers)
        self._cache = Cache(layers=[GrowingLayer(*pair, filled) for pair in pairs])
        padded = [[PADDING] * (self._width - len(prompt)) + list(prompt) for prompt in prompts]
        self._ids = torch.tensor(padded, device=device)
        if done:
            self._ids = self._ids[:, -1:]  # any token: what was generated last

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """One model invocation: logits of each row's next token, `[batch, vocabulary]`."""
        seen = self._width + self._done
        output = self._model(
            input_ids=self._ids,
            attention_mask=self._mask[:, :seen] if self._has_padding else None,
            position_ids=self._positions[:, seen - self._ids.shape[1] : seen],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **self._named,
        )
        return output.logits[:, -1]

    def take(self, tokens: Tensor) -> None:
        """Go on with `tokens` `[batch]`, generated or forced."""
        self._ids = tokens[:, None]
        self._done += 1

    def step(self) -> list[int]:
        """One invocation and its greedy tokens, on the host."""
        tokens = self.logits().argmax(dim=-1)
        self.take(tokens)
        return tokens.tolist()
