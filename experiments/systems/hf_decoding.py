"""Decoding loop for a batch of a Hugging Face model, with a KV cache that grows in place.

The loop replaces `generate()`: it calls the same forward with the same kind of cache, without stopping criteria, logits
processors and input preparation, and computes logits of the last position only, so it is faster. Batches are padded on
the left; a mask is passed only where there is padding, since SDPA without one is faster. Every step ends with its
tokens on the host, as in a server.

`DynamicCache` concatenates: at several hundred tokens of context it copies more bytes per step than the model has
weights. The layers here hold their full length from the start.
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
    """Layer of the cache in tensors of its full length, `filled` tokens of which are there already."""

    def __init__(self, keys: Tensor, values: Tensor, filled: int) -> None:
        super().__init__()
        self._all = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._show(filled)

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values = (whole[:, :, :length] for whole in self._all)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens; return those of all tokens."""
        start = self._length
        self._show(start + key_states.shape[-2])
        self.keys[:, :, start:].copy_(key_states)
        self.values[:, :, start:].copy_(value_states)
        return self.keys, self.values


class Decoding:
    """Greedy continuation of `prompts` by up to `new_tokens`, a step at a time.

    `named`: keyword arguments of every call (PEFT's `adapter_names`). `done`: tokens that each row counts as generated;
    their keys and values, and the prompts', are what `room` holds.
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
        """Invoke the model once; return logits of each row's next token, `[batch, vocabulary]`."""
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
        """Continue with `tokens` `[batch]`, generated or forced."""
        self._ids = tokens[:, None]
        self._done += 1

    def step(self) -> list[int]:
        """Invoke the model once; return its greedy tokens, on the host."""
        tokens = self.logits().argmax(dim=-1)
        self.take(tokens)
        return tokens.tolist()
