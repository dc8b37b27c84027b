"""The kernels together, between the model's own projections, are a decode step of the model on the engine's cache."""

import pytest
import torch
import transformers

from punica.engine.attention import KVCache, PagedAttention
from punica.models import LlamaForCausalLM
from punica.ops.backbone import HeadNorms
from punica.ops.triton_ops.backbone import Pages, add_rms_norm, decode_attention, rotate_and_store, swiglu
from punica.scheduling import Span

BLOCK_SIZE, BLOCKS = 16, 12
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
CONFIGS = {"llama": transformers.LlamaConfig(**SIZES), "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32)}
SPANS = (
    Span(0, 1, 1, (3,)),
    Span(1, 1, 16, (7,)),
    Span(2, 1, 17, (0, 11)),
    Span(3, 1, 70, (5, 1, 9, 2, 10)),
)  # fmt: skip


def decode_step(model: LlamaForCausalLM, cache: KVCache, token_ids: torch.Tensor, spans: tuple[Span, ...],
                positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """Hidden states of one row per request, by the kernels."""
    parts, device = model.model, token_ids.device
    width = max(len(span.block_table) for span in spans)
    table = [[*span.block_table, *[0] * (width - len(span.block_table))] for span in spans]
    block_table = torch.tensor(table, dtype=torch.int32, device=device)
    lengths = torch.tensor([span.kv_length for span in spans], dtype=torch.int32, device=device)
    order = torch.arange(len(spans), dtype=torch.int32, device=device)
    x, delta = parts.embed_tokens(token_ids), None
    cos, sin = parts.rotary(positions)
    normed = torch.empty_like(x)
    for layer, keys, values in zip(parts.layers, cache.keys, cache.values, strict=True):
        add_rms_norm(normed, x, delta, layer.input_layernorm.weight, layer.input_layernorm.eps)
        attention = layer.self_attn
        qkv = attention.qkv_proj(normed).view(len(spans), -1, attention.head_size)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        norms = None if q_norm is None else HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)
        rotate_and_store(qkv, cos, sin, rows, keys, values, norms)
        q = qkv[:, : attention.num_heads]
        attended = torch.empty_like(q, memory_format=torch.contiguous_format)
        decode_attention(attended, q, keys, values, Pages(block_table, lengths, order, BLOCK_SIZE), 2)
        add_rms_norm(
            normed, x, attention.o_proj(attended.flatten(1)),
            layer.post_attention_layernorm.weight, layer.post_attention_layernorm.eps,
        )  # fmt: skip
        inner = x.new_empty(len(spans), SIZES["intermediate_size"])
        swiglu(inner, layer.mlp.gate_up_proj(normed))
        delta = layer.mlp.down_proj(inner)
    add_rms_norm(normed, x, delta, parts.norm.weight, parts.norm.eps)
    return normed


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_equals_the_model_with_paged_attention(family: str, device: str) -> None:
    model = LlamaForCausalLM(CONFIGS[family], dtype=torch.float32, device=device)
    model.init_random_weights(seed=1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.3)
        elif "embed" not in name:
            parameter.mul_(8)  # as large as trained ones are, so that every part shows in the result
    caches = [KVCache(model, BLOCKS, BLOCK_SIZE) for _ in range(2)]
    for first, second in zip(*(cache.keys + cache.values for cache in caches), strict=True):
        first.normal_()
        second.copy_(first)
    token_ids = torch.tensor([4, 9, 4, 31], device=device)
    positions = torch.tensor([span.kv_length - 1 for span in SPANS], device=device)
    rows = torch.tensor([span.kv_rows(BLOCK_SIZE)[0] for span in SPANS], device=device)
    found = decode_step(model, caches[0], token_ids, SPANS, positions, rows)
    attention = PagedAttention(caches[1])
    attention.begin(SPANS, rows)
    expected = model(token_ids, positions, attention)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for first, second in zip(*(cache.keys + cache.values for cache in caches), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
