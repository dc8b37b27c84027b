"""Single model invocations at a chosen batch and context: what Figures 1 and 10 time.

`Invocation` lays rows out as the engine does (`punica.scheduling.layout`) but without requests: row i of a decode step
attends to `seq_len` cached tokens in blocks of its own, and a prefill computes whole prompts. The cache holds noise;
time does not depend on its values. What a server does once per step (layout, segment indices) happens outside the
timing.
"""

from collections.abc import Sequence

import torch
from transformers import LlamaConfig

from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ModelConf
from punica.engine.attention import PagedAttention
from punica.engine.kv_cache import KVCache
from punica.models import LlamaForCausalLM
from punica.scheduling import Span

BLOCK_SIZE = 16  # as in the released code
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest relative difference between decoding through KV blocks and computing the whole sequence at once."""


def llama_config(model: ModelConf, layers: int | None = None) -> LlamaConfig:
    """The Hugging Face config of `model`, with `layers` decoder layers if given."""
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


def random_llama(model: ModelConf, device: str, layers: int | None = None) -> LlamaForCausalLM:
    """A Llama with random weights (seed 0), as in the paper: speed does not depend on them."""
    llama = LlamaForCausalLM(llama_config(model, layers), dtype=getattr(torch, model.dtype.name), device=device)
    llama.init_random_weights(0)
    return llama


class Invocation:
    """One model with a cache of `max_tokens` places, ready to run steps on."""

    def __init__(self, llama: LlamaForCausalLM, max_tokens: int) -> None:
        self.llama = llama
        self.device = llama.lm_head.weight.device
        self.cache = KVCache(llama, -(-max_tokens // BLOCK_SIZE), BLOCK_SIZE)
        self.attention = PagedAttention(self.cache)
        self._fill()

    def _fill(self) -> None:
        """Noise in every block of the cache: one random block, copied over."""
        block = torch.randn(BLOCK_SIZE, *self.cache.keys[0].shape[1:]).to(self.cache.keys[0])
        for rows in (*self.cache.keys, *self.cache.values):
            rows.view(-1, *block.shape).copy_(block.expand(rows.shape[0] // BLOCK_SIZE, *block.shape))

    def begin(self, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tell the attention the layout of a step; its token ids and positions, both int64 `[T]`."""
        positions = [position for span in spans for position in span.positions]
        rows = [row for span in spans for row in span.kv_rows(BLOCK_SIZE)]
        tokens = [(7 * i + 1) % self.llama.config.vocab_size for i in range(len(positions))]
        self.attention.begin(spans, torch.tensor(rows, device=self.device))
        return torch.tensor(tokens, device=self.device), torch.tensor(positions, device=self.device)


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
    """Prefill 19 tokens of two requests and decode the 20th: the same hidden states as computing all 20 at once.

    Raises `CheckFailed` when they differ: paging, positions or masks are wrong then, and no time would mean anything.
    """
    length = 20
    whole = spans(2, length, length)
    ids, positions = invocation.begin(whole)
    expected = invocation.llama(ids, positions, invocation.attention)[length - 1 :: length]
    prompt = [Span(span.start - row, length - 1, length - 1, span.block_table) for row, span in enumerate(whole)]
    kept = torch.arange(2 * length, device=ids.device) % length < length - 1
    invocation.begin(prompt)
    invocation.llama(ids[kept], positions[kept], invocation.attention)
    invocation.begin([Span(row, 1, length, span.block_table) for row, span in enumerate(whole)])
    found = invocation.llama(ids[~kept], positions[~kept], invocation.attention)
    error = difference(found, expected)
    if not error <= TOLERANCE[found.dtype]:
        raise CheckFailed(f"decoding through KV blocks differs from the whole sequence by {error:.2e} (relative)")


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of `found`."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
