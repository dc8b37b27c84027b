"""Hugging Face Transformers and PEFT, as a server of static batches would use them.

The model is `LlamaForCausalLM` with SDPA, adapters are PEFT's `lora.Linear`; dtype, threads, product and a cache
without copies are those of the other systems. Greedy decoding in place of `generate()`, so faster. One PEFT adapter per
place in the batch; a batch of one adapter has it merged, and on a GPU its decode steps are CUDA graphs. A mixed batch
is launched kernel by kernel, since PEFT sorts its rows on the host. Loading, merging, capturing are not timed.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache
from transformers.cache_utils import DynamicLayer

from experiments.benches.model_steps import captured
from experiments.systems.weights import Weights
from punica.engine.attention import KVCache
from punica.parallel.matmul import linear

PADDING = 0  # any token id: padded positions are masked
BLOCK = 128  # places by which the part of the cache that a graph reads grows


class SameProduct(nn.Linear):
    """A linear layer with the matrix product of our engine's layers (`punica.parallel.matmul`)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias).view(*x.shape[:-1], -1)


class Layer(DynamicLayer):
    """A layer's cache at full length, `filled` of it; for a graph it writes at `at [1]` and reads `filled`."""

    def __init__(self, keys: Tensor, values: Tensor, filled: int, at: Tensor | None = None) -> None:
        super().__init__()
        self._all, self._at, self._length = (keys, values), at, filled
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values = self._read = keys[:, :, :filled], values[:, :, :filled]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._at is not None:
            for whole, states in zip(self._all, (key_states, value_states), strict=True):
                whole.index_copy_(2, self._at, states)
            return self._read
        start, self._length = self._length, self._length + key_states.shape[-2]
        keys, values = (whole[:, :, : self._length] for whole in self._all)
        keys[:, :, start:].copy_(key_states)
        values[:, :, start:].copy_(value_states)
        self.keys, self.values = keys, values
        return keys, values


class Decoding:
    """Greedy continuation of `prompts` by up to `new_tokens`, a step at a time. `room(layer, batch, length)`: keys and
    values to write into; `named`: arguments of every call; `done`: tokens that count as generated, whose keys `room`
    holds. Padded on the left, with a mask only where there is padding.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], new_tokens: int,
        room: Callable[[int, int, int], tuple[Tensor, Tensor]], device: str, named: dict[str, Any], done: int = 0,
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
        self._cache = Cache(layers=[Layer(*pair, filled) for pair in self._pairs])
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
        self._ids = tokens[:, None]
        self._done += 1

    def forced(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, positions, vocabulary]` (float32, on the host) of rows continued by `tokens`."""
        positions = []
        for column in tokens.unbind(1):
            positions.append(self.logits().float().cpu())
            self.take(column)
        return torch.stack(positions, dim=1)

    def step(self) -> list[int]:
        tokens = self.logits().argmax(dim=-1)
        self.take(tokens)
        return tokens.tolist()


class GraphDecoding(Decoding):
    """A `Decoding` whose later steps replay graphs that `capture` made, one per `BLOCK` places, with a mask."""

    @torch.inference_mode()
    def __init__(self, capture: Callable[[Callable[[], Tensor]], Callable[[], Tensor]], *batch: Any) -> None:
        super().__init__(*batch)
        capacity = self._mask.shape[1]
        self._at = self._mask.new_zeros(1)
        self._token = self._mask.new_zeros(len(self._mask), 1)
        self._padding = self._mask.shape[1] - self._mask.sum(dim=1, keepdim=True)
        self._column = torch.arange(capacity, device=self._at.device)
        first = self._width + max(self._done, 1)  # places that the first replay reads
        self._replays = {}
        for length in sorted({self._length(seen) for seen in range(first, capacity)}):
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
        return min(-(-seen // BLOCK) * BLOCK, self._mask.shape[1])

    def _step_of(self, length: int) -> Callable[[], Tensor]:
        """Return the step over the first `length` places of the cache; it moves on by a place."""
        cache = Cache(layers=[Layer(*pair, length, self._at) for pair in self._pairs])
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


class PeftBackend:
    """Backbone of `weights` with PEFT adapters, one per place in the batch; keys and values are in `cache`."""

    def __init__(self, weights: Weights, cache: KVCache) -> None:
        self.weights = weights
        with torch.device("meta"):  # its weights are there already
            model = AutoModelForCausalLM.from_config(weights.config, dtype=weights.dtype, attn_implementation="sdpa")
        model.load_state_dict(weights.exported(), assign=True)
        with torch.device(weights.device):  # angles are no weights
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        self._lora = LoraConfig(
            r=weights.rank,
            lora_alpha=weights.alpha,  # type: ignore[arg-type]  # a float works as well
            target_modules=weights.target_modules,
            task_type="CAUSAL_LM",
        )
        self._names: list[str] = []
        self._held: dict[str, int] = {}
        self._cache = cache
        self.model: Any = model
        self._add_places(1)
        named = self.model.named_modules()
        self._layers: dict[str, Any] = {name: layer for name, layer in named if isinstance(layer, LoraLayer)}
        self._unmerged: dict[str, Tensor] = {}

    def load(self, name: str, adapter_id: int) -> None:
        wanted = self.weights.adapter_set(adapter_id)
        if self._held.get(name) == wanted:
            return
        for key, tensor in self.weights.adapter_tensors(adapter_id).items():
            layer, _, factor = key.removesuffix(".weight").rpartition(".")
            getattr(self._layers[layer], factor)[name].weight = nn.Parameter(tensor, requires_grad=False)
        self._held[name] = wanted

    @contextmanager
    def adapter(self, adapter_id: int | None) -> Iterator[None]:
        if adapter_id is not None:
            self.load(self._names[0], adapter_id)
        with self.model.disable_adapter() if adapter_id is None else nullcontext():
            yield

    @contextmanager
    def merged(self, adapter_id: int) -> Iterator[None]:
        """Merge `adapter_id` into the shared weights, which have their bits back afterwards, from a copy."""
        if not self._unmerged:
            for name, layer in self._layers.items():
                weight = layer.get_base_layer().weight.detach()
                copy = weight.to("cpu", copy=True)
                self._unmerged[name] = copy.pin_memory() if weight.is_cuda else copy
        self.load(self._names[0], adapter_id)
        try:
            self.model.merge_adapter([self._names[0]])
            yield
        finally:
            for name, layer in self._layers.items():
                layer.get_base_layer().weight.data.copy_(self._unmerged[name])
                layer.merged_adapters.clear()

    @contextmanager
    def applied(self, adapter_ids: Sequence[int], mixed: bool) -> Iterator[list[str] | None]:
        """Apply the adapters of a batch's rows, all of one unless it is `mixed`; yields the `rows` of `decoding`."""
        if mixed:
            yield self.places(adapter_ids)
        else:
            with self.merged(adapter_ids[0]):
                yield None

    def places(self, adapter_ids: Sequence[int]) -> list[str]:
        """Load the distinct `adapter_ids`; return the PEFT adapter of each row."""
        distinct = list(dict.fromkeys(adapter_ids))
        self._add_places(len(distinct))
        place = dict(zip(distinct, self._names, strict=False))
        for adapter_id, name in place.items():
            self.load(name, adapter_id)
        return [place[adapter_id] for adapter_id in adapter_ids]

    def decoding(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, rows: list[str] | None = None, done: int = 0
    ) -> Decoding:
        """Prepare a batch. `rows`: PEFT adapter of each (mixed); None: the active one, and on a GPU graphs."""
        device = self.weights.device
        if device != "cpu":  # a graph needs no time of the host, which launches every kernel of a mixed batch
            use_product(SameProduct if rows is None else nn.Linear, self.model, device)
        named = {} if rows is None else {"adapter_names": rows}
        batch = self.model, prompts, new_tokens, self._room, device, named, done
        return GraphDecoding(captured, *batch) if not named and device != "cpu" else Decoding(*batch)

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return logits `[len(tokens), vocabulary]` (float32, on the host) after `prompt`, of one invocation."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self.weights.device)
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float().cpu()

    def _add_places(self, count: int) -> None:
        fresh = [f"place{index}" for index in range(len(self._names), count)]
        with warnings.catch_warnings():
            # PEFT reads an attribute that Transformers is renaming; it concerns training only
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            for name in fresh:
                if self._names:
                    self.model.add_adapter(name, self._lora, low_cpu_mem_usage=True)
                else:
                    self.model = PeftModel(self.model, self._lora, name, low_cpu_mem_usage=True)
                self._names.append(name)
        if fresh:
            self.model.eval()
        if fresh and self.weights.device == "cpu":
            use_product(SameProduct, self.model, "cpu")

    def _room(self, layer: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values for a batch, noise at first, in memory that all batches and systems share, or own."""
        config, cache = self.model.config, self._cache
        shape = (batch, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
        size, shared = math.prod(shape), [rows[layer].view(-1) for rows in (cache.keys, cache.values)]
        keys, values = (
            part[:size] if size <= part.numel() else torch.randn(size, dtype=part.dtype, device=part.device)
            for part in shared
        )
        return keys.view(shape), values.view(shape)


def use_product(kind: type[nn.Linear], model: nn.Module, device: str) -> None:
    """Make linear layers `SameProduct`, or torch's; adapters' factors keep torch's on a GPU, cheaper to launch."""
    for name, layer in model.named_modules():
        if type(layer) in (nn.Linear, SameProduct) and (device == "cpu" or ".lora_" not in name):
            layer.__class__ = kind
