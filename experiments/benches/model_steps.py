"""Single invocations of a model at a chosen batch and context, for Figures 1 and 10, laid out as the engine does but
without requests, over a cache of noise. On a GPU a step is a CUDA graph, as the engine's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig

from experiments.harness.experiment import CheckFailed, check, difference
from experiments.harness.schema import ModelConf
from experiments.measure.timing import Call, CapturedRun
from punica.adapters import LoRAModelManager, random_adapter
from punica.config import LoRAConfig
from punica.engine.attention import KVCache, attention_for
from punica.layers import rehearsal
from punica.metadata import LoRAMapping
from punica.models import LlamaForCausalLM
from punica.scheduling import Span

BLOCK_SIZE = 16  # as in the released code
MOST_REQUESTS = 256  # of a step
MOST_CAPTURED_ROWS = 8192
"""Rows of prompts up to which they are a CUDA graph: more than the engine has in a step."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest relative difference between decoding through KV blocks and computing the whole sequence at once."""


def llama_config(model: ModelConf, layers: int | None = None) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=layers or model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
    )


def random_llama(model: ModelConf, device: str, layers: int | None = None, **form: bool) -> LlamaForCausalLM:
    """A Llama with random weights (seed 0), as in the paper: speed does not depend on them."""
    llama = LlamaForCausalLM(llama_config(model, layers), getattr(torch, model.dtype.name), device, **form)
    llama.init_random_weights(0)
    return llama


def with_adapters(
    llama: LlamaForCausalLM, rank: int, count: int, most_rows: int, seed: int = 0, **lora: Any
) -> LoRAModelManager:
    """Wrap `llama` for `count` random adapters of `rank`, all in slots; `lora`: further fields of `LoRAConfig`."""
    head, config = llama.lm_head.weight, LoRAConfig(max_lora_rank=rank, max_loras=count, **lora)
    manager = LoRAModelManager(llama, count, most_rows, llama.config.vocab_size, config, head.device)
    for i in range(1, count + 1):
        manager.add_adapter(random_adapter(i, llama.config, rank, seed + i, dtype=head.dtype))
        manager.activate_adapter(i)
    return manager


def captured(function: Callable[[], torch.Tensor]) -> CapturedRun:
    return CapturedRun(function, rehearsal())


class Invocation:
    """One model with a cache of `max_tokens` places, ready to run steps of up to `max_requests` requests on."""

    def __init__(self, llama: LlamaForCausalLM, max_tokens: int, max_requests: int = MOST_REQUESTS) -> None:
        self.llama = llama
        self.device = llama.lm_head.weight.device
        self.cache = KVCache(llama, -(-max_tokens // BLOCK_SIZE), BLOCK_SIZE)
        self.attention = attention_for(self.cache, max_requests, self.cache.num_blocks)
        self._captured: dict[int, tuple[list[torch.Tensor], CapturedRun]] = {}
        fill_with_noise(self.cache)

    def begin(self, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tell the attention the layout of a step; return its token ids and positions, both int64 `[T]`."""
        tokens, positions, kv_rows = self._inputs(spans)
        self.attention.begin(spans, kv_rows)
        return tokens, positions

    @torch.inference_mode()  # else inputs made in it could not be refilled
    def decode_step(self, batch_size: int, kv_length: int) -> Callable[[], torch.Tensor]:
        """Begin a step; return its call, which gives `[T, hidden]`. Only that of the step begun last is valid."""
        layout = spans(batch_size, 1, kv_length)
        if self.device.type != "cuda":
            return partial(self.forward, *self.begin(layout))
        inputs = self._inputs(layout)
        held, run = self._captured.get(batch_size, (inputs, None))
        for kept, new in zip(held, inputs, strict=True):
            kept.copy_(new)
        tokens, positions, kv_rows = held
        self.attention.begin(layout, kv_rows)
        if run is None:
            run = captured(partial(self.forward, tokens, positions))
            self._captured[batch_size] = held, run
        return run

    def prefill_step(self, batch_size: int, length: int) -> Callable[[], torch.Tensor]:
        """Begin `batch_size` prompts of `length` tokens; up to `MOST_CAPTURED_ROWS` rows it is a graph on a GPU."""
        step = partial(self.forward, *self.begin(spans(batch_size, length, length)))
        if self.device.type != "cuda" or batch_size * length > MOST_CAPTURED_ROWS:
            return step
        return captured(step)  # captured for every use: its activations take too much memory to be kept

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return hidden states `[T, hidden]` of the step that was begun, launched by the host."""
        return self.llama(tokens, positions, self.attention)

    def _inputs(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Token ids, positions and cache rows of a step, each int64 `[T]` on the device."""
        positions = [position for span in spans for position in range(span.kv_length - span.length, span.kv_length)]
        rows = [row for span in spans for row in span.kv_rows(BLOCK_SIZE)]
        tokens = [(7 * i + 1) % self.llama.config.vocab_size for i in range(len(positions))]
        return [torch.tensor(values, device=self.device) for values in (tokens, positions, rows)]


def fill_with_noise(cache: KVCache) -> None:
    """Noise in every block: one random block, copied over."""
    block = torch.randn(cache.block_size, *cache.keys[0].shape[1:]).to(cache.keys[0])
    for rows in (*cache.keys, *cache.values):
        rows.view(-1, *block.shape).copy_(block.expand(cache.num_blocks, *block.shape))


def spans(batch_size: int, length: int, kv_length: int) -> list[Span]:
    """`batch_size` requests with `kv_length` cached tokens each, of which the last `length` are computed now."""
    blocks = -(-kv_length // BLOCK_SIZE)
    tables = [tuple(range(row * blocks, (row + 1) * blocks)) for row in range(batch_size)]
    return [Span(row * length, length, kv_length, table) for row, table in enumerate(tables)]


def step_tokens(batch_size: int, kv_length: int) -> int:
    """Cache places that `spans` needs, whole blocks."""
    return batch_size * -(-kv_length // BLOCK_SIZE) * BLOCK_SIZE


@torch.inference_mode()
def check_decode(invocation: Invocation) -> None:
    """Raise `CheckFailed` unless prefill and decode equal one prefill, and steps run before leave no trace."""
    length, tolerance = 20, TOLERANCE[invocation.cache.keys[0].dtype]
    whole = spans(2, length, length)
    ids, positions = invocation.begin(whole)
    expected = invocation.forward(ids, positions)[length - 1 :: length]
    kept = torch.arange(2 * length, device=ids.device) % length < length - 1
    tables = [span.block_table for span in whole]
    invocation.begin([Span(row * (length - 1), length - 1, length - 1, table) for row, table in enumerate(tables)])
    invocation.forward(ids[kept], positions[kept])
    invocation.begin([Span(row, 1, length, table) for row, table in enumerate(tables)])
    check("decoding through KV blocks", invocation.forward(ids[~kept], positions[~kept]), expected, tolerance)
    invocation.decode_step(2, length - 3)()
    for name, step, rows in (("decode", invocation.decode_step, 1), ("prefill", invocation.prefill_step, length)):
        found = step(2, length)().clone()
        check(f"a {name} step", found, invocation.forward(*invocation.begin(spans(2, rows, length))), tolerance)


def check_rows(
    together: torch.Tensor, of_row: Callable[[int], tuple[torch.Tensor, torch.Tensor]], tolerance: float
) -> None:
    """Raise `CheckFailed` unless the first and last row equal the row alone, and not without its adapter."""
    for row in {0, len(together) - 1}:
        alone, plain = of_row(row)
        check(f"row {row} of {len(together)}, alone,", together[row : row + 1], alone, tolerance)
        if difference(plain, alone) <= tolerance:
            raise CheckFailed(f"row {row} of {len(together)} comes out as if it had no adapter")


class LayerBench:
    """Layer 0 of `model` in decode steps, `slots` random adapters of `rank`, a cache of `max_tokens` places."""

    def __init__(self, model: ModelConf, rank: int, slots: int, max_tokens: int, device: str) -> None:
        llama = random_llama(model, device, layers=1)
        self.invocation = Invocation(llama, max_tokens)
        self.layer = llama.model.layers[0]
        self.rotary = llama.model.rotary
        self.hidden_size = model.hidden_size
        self.dtype = getattr(torch, model.dtype.name)
        self.manager = with_adapters(llama, rank, slots, slots)

    def rows(self, batch_size: int) -> torch.Tensor:
        """Hidden states `[batch_size, hidden]`, the same first rows for every batch size."""
        x = torch.randn(batch_size, self.hidden_size, generator=torch.Generator().manual_seed(1))
        return x.to(self.dtype).to(self.invocation.device)

    def begin(self, adapter_ids: list[int], kv_length: int, first_row: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin a decode step: `adapter_ids` one per row, 0: none; row i reads blocks of request `first_row + i`."""
        requests = spans(first_row + len(adapter_ids), 1, kv_length)[first_row:]
        _, positions = self.invocation.begin([span._replace(start=row) for row, span in enumerate(requests)])
        self.manager.set_adapter_mapping(LoRAMapping(adapter_ids, adapter_ids))
        return self.rotary(positions)

    def run(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Run the layer: attention is added to `x [T, hidden]` in place, the MLP's output is returned."""
        return self.layer(x, None, cos, sin, self.invocation.attention)

    def output(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        return x.add_(self.run(x, cos, sin))

    def checked_call(self, adapter_ids: list[int], kv_length: int) -> Call:
        self.check(adapter_ids, kv_length)
        x = self.rows(len(adapter_ids))
        cos, sin = self.begin(adapter_ids, kv_length)
        return torch.inference_mode()(lambda: self.run(x, cos, sin))

    @torch.inference_mode()
    def check(self, adapter_ids: list[int], kv_length: int) -> None:
        """`CheckFailed` unless first and last row equal the same row alone, and not without its adapter."""
        x = self.rows(len(adapter_ids))

        def of_row(row: int) -> tuple[torch.Tensor, torch.Tensor]:
            one, own = x[row : row + 1], [adapter_ids[row]]
            alone = self.output(one, *self.begin(own, kv_length, row))
            return alone, self.output(one, *self.begin([0], kv_length, row))

        check_rows(self.output(x, *self.begin(adapter_ids, kv_length)), of_row, TOLERANCE[self.dtype])
