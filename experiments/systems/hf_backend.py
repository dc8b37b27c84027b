"""Hugging Face Transformers and PEFT, as a server of static batches would use them.

The model is `transformers.LlamaForCausalLM` with SDPA attention, adapters are PEFT's own `lora.Linear`. Dtype, threads,
`inference_mode`, the matrix product and a cache without copies are those of the other systems, so that batching and the
adapters' operator are compared.

There is one PEFT adapter per place in the batch; `load` gives it other weights between batches. A batch of one adapter
has it merged into the weights, and on a GPU its decode steps are CUDA graphs: the same kernels as unmerged, less the
adapter's. A mixed batch is launched kernel by kernel, since PEFT sorts its rows on the host. Loading, merging,
capturing and building are not timed: the paper does not charge baselines for switching models.
"""

import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from experiments.benches.model_steps import CapturedRun
from experiments.systems.hf_decoding import Decoding, GraphDecoding
from experiments.systems.weights import Weights
from punica.engine.kv_cache import KVCache
from punica.parallel.matmul import linear


class SameProduct(nn.Linear):
    """A linear layer with the matrix product of our engine's layers (`punica.parallel.matmul`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `x [..., in]` to `[..., out]`."""
        rows = linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return rows.view(*x.shape[:-1], -1)


def linear_layers(model: nn.Module, device: str) -> list[nn.Linear]:
    """Return the linear layers of `model` whose product is ours on `device`.

    On a GPU adapters' factors keep torch's: PEFT's thousands of small launches per step of a mixed batch wait for the
    host, which takes longer to launch ours.
    """
    return [
        module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, SameProduct) and (device == "cpu" or ".lora_" not in name)
    ]


ALONE, FULL, MIXED = "a request alone", "a batch of one adapter", "a mixed batch"


def kind_of(prompts: Sequence[object], rows: Sequence[str] | None) -> str:
    """Return the kind of a batch, each of which has the product with which it decodes faster."""
    if rows is not None:
        return MIXED
    return ALONE if len(prompts) == 1 else FULL


def use_product(kind: type[nn.Linear], layers: list[nn.Linear]) -> None:
    """Make every one of `layers` a `SameProduct`, or torch's own linear layer, in place."""
    for layer in layers:
        layer.__class__ = kind


@dataclass(frozen=True)
class Generated:
    """New tokens `[batch][longest]`; seconds until the first, and from there to the last."""

    tokens: list[list[int]]
    prefill_s: float
    decode_s: float


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
        self._larger: dict[tuple[int, bool], torch.Tensor] = {}
        self.model: Any = model
        self._add_places(1)
        named = self.model.named_modules()
        self._layers: dict[str, Any] = {name: layer for name, layer in named if isinstance(layer, LoraLayer)}
        self._unmerged: dict[str, torch.Tensor] = {}
        self._faster: dict[str, type[nn.Linear]] = {}
        if weights.device != "cpu":
            self._find_faster_products()

    def load(self, name: str, adapter_id: int) -> None:
        """Give the PEFT adapter `name` the weights of `adapter_id`."""
        wanted = self.weights.adapter_set(adapter_id)
        if self._held.get(name) == wanted:
            return
        for key, tensor in self.weights.adapter_tensors(adapter_id).items():
            layer, _, factor = key.removesuffix(".weight").rpartition(".")
            getattr(self._layers[layer], factor)[name].weight = nn.Parameter(tensor, requires_grad=False)
        self._held[name] = wanted

    @contextmanager
    def adapter(self, adapter_id: int | None) -> Iterator[None]:
        """Apply `adapter_id` to the whole batch, or no adapter (None)."""
        if adapter_id is None:
            with self.model.disable_adapter():
                yield
        else:
            self.load(self._names[0], adapter_id)
            yield

    @contextmanager
    def merged(self, adapter_id: int) -> Iterator[None]:
        """Merge `adapter_id` into the weights, which all systems share; afterwards they have their bits back, from a
        copy in host memory.
        """
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

    def places(self, adapter_ids: Sequence[int]) -> list[str]:
        """Load the distinct `adapter_ids`; return the PEFT adapter of each row."""
        distinct = list(dict.fromkeys(adapter_ids))
        self._add_places(len(distinct))
        place = dict(zip(distinct, self._names, strict=False))
        for adapter_id, name in place.items():
            self.load(name, adapter_id)
        return [place[adapter_id] for adapter_id in adapter_ids]

    def decoding(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, rows: list[str] | None = None, done: int = 0,
        graphs: bool = True,
    ) -> Decoding:  # fmt: skip
        """Prepare a batch. `rows`: PEFT adapter of each row (a mixed batch); None: the active one for all, and on a
        GPU, unless `graphs` is false, graphs, captured here.
        """
        if self._faster:
            use_product(self._faster[kind_of(prompts, rows)], linear_layers(self.model, self.weights.device))
        named = {} if rows is None else {"adapter_names": rows}
        batch = self.model, prompts, new_tokens, self._room, self.weights.device, named, done
        captures = graphs and rows is None and self.weights.device != "cpu"
        return GraphDecoding(CapturedRun, *batch) if captures else Decoding(*batch)

    @contextmanager
    def product(self, kind: type[nn.Linear]) -> Iterator[None]:
        """Use one product for all batches."""
        before, self._faster = self._faster, dict.fromkeys((ALONE, FULL, MIXED), kind)
        try:
            yield
        finally:
            self._faster = before

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, rows: list[str] | None = None) -> Generated:
        """Continue all `prompts` greedily by `new_tokens`."""
        decoding = self.decoding(prompts, new_tokens, rows)
        start = time.perf_counter()
        columns = [decoding.step()]
        prefill_s = time.perf_counter() - start
        columns += [decoding.step() for _ in range(new_tokens - 1)]
        tokens = [list(row) for row in zip(*columns, strict=True)]
        return Generated(tokens, prefill_s, time.perf_counter() - start - prefill_s)

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Return logits `[len(tokens), vocabulary]` (float32, on the host) after `prompt`, of one invocation."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self.weights.device)
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float().cpu()

    def forced(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], rows: list[str] | None = None
    ) -> torch.Tensor:
        """Return `Decoding.forced` of rows continued by `tokens`, all of one length."""
        forced = torch.tensor(tokens, device=self.weights.device)
        return self.decoding(prompts, forced.shape[1], rows).forced(forced)

    def _add_places(self, count: int) -> None:
        """Make PEFT adapters for `count` places, new ones without weights."""
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
            use_product(SameProduct, linear_layers(self.model, "cpu"))

    def _find_faster_products(self) -> None:
        """Choose the faster product, ours (less device time) or torch's (less host time), per `kind_of` batch."""
        most, found = self.weights.limits.max_batch_size, dict[str, type[nn.Linear]]()
        place = self.places([1])[0]
        with self.merged(1):
            found |= {kind: self._faster_of(kind, size) for kind, size in ((ALONE, 1), (FULL, most))}
        self._faster = found | {MIXED: self._faster_of(MIXED, most, most * [place])}

    def _faster_of(self, batch: str, size: int, rows: list[str] | None = None) -> type[nn.Linear]:
        """Time a few steps of a batch with either product, twice."""
        seconds: dict[type[nn.Linear], float] = {SameProduct: math.inf, nn.Linear: math.inf}
        for kind in 2 * [*seconds]:
            with self.product(kind):
                seconds[kind] = min(seconds[kind], self.generate(size * [[1, 2, 3]], 6, rows).decode_s)
        ours, torchs = (1e3 * spent / 5 for spent in seconds.values())
        said = f"Hugging Face, {batch}: {ours:.1f} ms per step with our product, {torchs:.1f} with torch's"
        tqdm.write(said, file=sys.stderr)
        return min(seconds, key=seconds.__getitem__)

    def _room(self, layer: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values for a batch, in memory that all batches and systems share; noise at first."""
        config, cache = self.model.config, self._cache
        shape = (batch, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
        keys, values = (
            self._at_least(math.prod(shape), rows[layer].view(-1), (layer, rows is cache.values)).view(shape)
            for rows in (cache.keys, cache.values)
        )
        return keys, values

    def _at_least(self, size: int, shared: torch.Tensor, key: tuple[int, bool]) -> torch.Tensor:
        """`size` numbers of the `shared` ones, or of own ones where those are too few."""
        if size <= shared.numel():
            return shared[:size]
        if key not in self._larger or self._larger[key].numel() < size:
            self._larger.pop(key, None)
            self._larger[key] = noise(size, self.weights.dtype, self.weights.device)
        return self._larger[key][:size]


def noise(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return `size` numbers like those of keys and values: one random block, repeated."""
    block = torch.randn(1 << 14).to(dtype).to(device)
    return block.repeat(-(-size // block.numel()))[:size]
