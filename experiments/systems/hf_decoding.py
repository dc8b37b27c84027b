"""Greedy decoding with Transformers' forward, in place of `generate()`.

The same forward with the same kind of cache, without stopping criteria, logits processors and input preparation, and
logits of the last position only, so it is faster. Batches are padded on the left; a mask is passed only where there is
padding, since SDPA without one is faster. A step ends with its tokens on the host. Transformers' `DynamicCache` copies
more bytes per step than the model has weights; layers here have their full length.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

PADDING = 0  # any token id: padded positions are masked
BLOCK = 128
"""Places by which the part of the cache that a graph reads grows."""

Room = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""`room(layer, batch, length)`: keys and values `[batch, heads, length, head_size]` to write into."""


class GrowingLayer(DynamicLayer):
    """Layer of the cache in tensors of its full length, `filled` tokens of which are there already."""

    def __init__(self, keys: Tensor, values: Tensor, filled: int) -> None:
        super().__init__()
        self._all = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._show(filled)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = (whole[:, :, :length] for whole in self._all)
        self._length, self.keys, self.values = length, keys, values
        return keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens; return those of all tokens."""
        start = self._length
        keys, values = self._show(start + key_states.shape[-2])
        keys[:, :, start:].copy_(key_states)
        values[:, :, start:].copy_(value_states)
        return keys, values


class FixedLayer(DynamicLayer):
    """Layer of the cache for a graph: writes at the place in `at [1]`, and reads the first `length` places."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor, length: int) -> None:
        super().__init__()
        self._all, self._at = (keys, values), at
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._read = keys[:, :, :length], values[:, :, :length]
        self.keys, self.values = self._read

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one token per row; return those of all places that the graph reads."""
        for whole, states in zip(self._all, (key_states, value_states), strict=True):
            whole.index_copy_(2, self._at, states)
        return self._read


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
        self._pairs = [room(layer, len(prompts), self._width + new_tokens) for layer in layers]
        self._cache = Cache(layers=[GrowingLayer(*pair, filled) for pair in self._pairs])
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

    def forced(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, positions, vocabulary]` (float32, on the host) of rows continued by `tokens`."""
        found = []
        for column in tokens.unbind(1):
            found.append(self.logits().float().cpu())
            self.take(column)
        return torch.stack(found, dim=1)

    def step(self) -> list[int]:
        """Invoke the model once; return its greedy tokens, on the host."""
        tokens = self.logits().argmax(dim=-1)
        self.take(tokens)
        return tokens.tolist()


Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a step without arguments into its replay; on a GPU `benches.model_steps.CapturedRun`."""


class GraphDecoding(Decoding):
    """A `Decoding` whose steps after the first, which has the prompts, replay graphs that `capture` made at the start.

    A graph reads a fixed number of places: there is one per `BLOCK` places. A mask hides those that are not filled yet.
    """

    @torch.inference_mode()
    def __init__(self, capture: Capture, *batch: Any) -> None:
        super().__init__(*batch)
        capacity = self._mask.shape[1]
        self._at = self._mask.new_zeros(1)
        self._token = self._mask.new_zeros(len(self._mask), 1)
        self._padding = self._mask.shape[1] - self._mask.sum(dim=1, keepdim=True)
        self._column = torch.arange(capacity, device=self._at.device)
        first = self._width + max(self._done, 1)  # places that the first replay reads
        lengths = sorted({self._length(seen) for seen in range(first, capacity)})
        self._replays = {}
        for length in lengths:
            self._begin(first)  # a capture runs the step: it writes where the first replay will
            self._replays[length] = capture(self._step_of(length))
        self._begun = False

    @torch.inference_mode()
    def logits(self) -> Tensor:
        if not self._done:
            return super().logits()
        seen = self._width + self._done
        if not self._begun:
            self._begin(seen)
            self._begun = True
        self._token.copy_(self._ids)
        return self._replays[self._length(seen)]()

    def _begin(self, seen: int) -> None:
        self._at.fill_(seen - 1)
        self._token.fill_(PADDING)

    def _length(self, seen: int) -> int:
        """Places that the graph reads of which `seen` are filled."""
        return min(-(-seen // BLOCK) * BLOCK, self._mask.shape[1])

    def _step_of(self, length: int) -> Callable[[], Tensor]:
        """Return the step over the first `length` places of the cache; it moves on by a place."""
        cache = Cache(layers=[FixedLayer(*pair, self._at, length) for pair in self._pairs])
        column, dtype = self._column[:length], self._pairs[0][0].dtype

        def step() -> Tensor:
            hidden = (column < self._padding) | (column > self._at)
            mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)  # once, not in every layer
            output = self._model(
                input_ids=self._token, attention_mask=mask[:, None, None], position_ids=self._at - self._padding,
                past_key_values=cache, use_cache=True, logits_to_keep=1, **self._named,
            )  # fmt: skip
            self._at.add_(1)
            return output.logits[:, -1]

        return step
