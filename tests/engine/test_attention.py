"""Paged attention against plain softmax over each request's own keys and values; the cache in FP8."""

from types import SimpleNamespace

import pytest
import torch

from punica.engine import Engine, EngineConfig, Request
from punica.engine.attention import KVCache, PagedAttention
from punica.ops.backbone import PackedHeads
from punica.ops.quant import saturated
from punica.scheduling import Span
from tests.world import logits_of

BLOCK, FP8 = 4, torch.float8_e4m3fn


def make_cache(heads: int, size: int, fp8: bool = False, device: str = "cpu") -> KVCache:
    head = SimpleNamespace(weight=torch.empty(0, device=device))
    model = SimpleNamespace(num_layers=2, num_kv_heads=heads, head_size=size, lm_head=head)
    cache = KVCache(model, 40, BLOCK, fp8=fp8)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))  # reading a row that was not written shows
    return cache


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``q [n, H, D]`` are the last n positions of ``k, v [m, Hkv, D]``; float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) / q.shape[-1] ** 0.5
    hidden = torch.arange(k.shape[0])[None] > torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).float()


def unturned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> PackedHeads:
    """Heads whose rotation changes nothing."""
    cos = torch.ones(q.shape[0], 1, q.shape[2] // 2).to(q)
    return PackedHeads(torch.cat((q, k, v), dim=1), k.shape[1], cos, torch.zeros_like(cos), None)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 16), (4, 2, 8), (6, 1, 10)], ids=["full", "grouped", "one kv head"]
)
def test_prompt_and_decode_rows_in_one_step(heads, kv_heads, size) -> None:
    """Three requests live in the cache (consecutive blocks, scattered ones, one token); a fourth brings its prompt."""
    cache = make_cache(kv_heads, size)
    tables = [(3, 4, 5), (20, 9, 30), (12,), (33, 34)]
    lengths = [11, 9, 1, 7]
    spans = [Span(0, 7, 7, tables[3]), *(Span(7 + i, 1, lengths[i], tables[i]) for i in range(3))]
    history = [(torch.randn(n, kv_heads, size), torch.randn(n, kv_heads, size)) for n in lengths]
    attention = PagedAttention(cache)
    for layer in range(2):
        for i in range(3):
            for p in range(lengths[i] - 1):
                row = tables[i][p // BLOCK] * BLOCK + p % BLOCK
                cache.keys[layer][row], cache.values[layer][row] = history[i][0][p], history[i][1][p]
        k = torch.cat([history[3][0], *(history[i][0][-1:] for i in range(3))])
        v = torch.cat([history[3][1], *(history[i][1][-1:] for i in range(3))])
        q = torch.randn(10, heads, size)
        attention.begin(spans, torch.tensor([row for span in spans for row in span.kv_rows(BLOCK)]))
        output = attention.attend(layer, unturned(q, k, v))
        torch.testing.assert_close(output[:7], reference(q[:7], *history[3]), atol=1e-5, rtol=1e-5)
        for i in range(3):
            rows = slice(7 + i, 8 + i)
            torch.testing.assert_close(output[rows], reference(q[rows], *history[i]), atol=1e-5, rtol=1e-5)


def test_consecutive_blocks_are_read_in_place_and_scattered_ones_gathered() -> None:
    cache = make_cache(2, 8)
    keys, values = cache.read(1, (5, 6, 7), 10)
    assert keys.data_ptr() == cache.keys[1][20].data_ptr()
    assert values.data_ptr() == cache.values[1][20].data_ptr()
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    for table in ((5, 7, 6), (7, 6, 5), (5, 6, 8), (5, 8, 7)):
        keys, _ = cache.read(1, table, 10)
        expected = [cache.keys[1][table[p // BLOCK] * BLOCK + p % BLOCK] for p in range(10)]
        assert torch.equal(keys[0].transpose(0, 1), torch.stack(expected))


# --- in FP8 ----------------------------------------------------------------------------------------------------------


def test_equals_a_wide_cache_whose_entries_are_rounded(backbone, monkeypatch) -> None:
    """The same bits; few blocks, so that some are preempted and computed again."""
    sizes = {"num_blocks": 6, "block_size": 8}
    requests = [Request(f"r{i}", [7 * i + j for j in range(3 + 2 * i)], 10, backbone.adapters.get(i)) for i in range(5)]
    held = logits_of(backbone.engine(**sizes, fp8_kv_cache=True), requests)
    write = KVCache.write

    def rounding(cache, layer, rows, keys, values):
        write(cache, layer, rows, *(saturated(part, FP8).float() for part in (keys, values)))

    monkeypatch.setattr(KVCache, "write", rounding)
    wide = logits_of(backbone.engine(**sizes), requests)
    assert {name: all(map(torch.equal, rows, held[name])) for name, rows in wide.items()} == dict.fromkeys(held, True)


def test_the_first_step_that_reads_the_cache_is_close(backbone) -> None:
    """A prompt reads none; its logits keep their bits."""
    prompt = [Request("r", list(range(5, 45)), 2, backbone.adapters[2])]
    wide, held = (logits_of(backbone.engine(fp8_kv_cache=fp8), prompt)["r"] for fp8 in (False, True))
    assert wide[0].equal(held[0])
    assert 0 < (wide[1] - held[1]).norm() / wide[1].norm() < 0.05


def test_a_quarter_of_the_bytes_of_float32(backbone) -> None:
    config = EngineConfig(max_batch_size=4, max_model_len=64, fp8_kv_cache=True)
    engine, wide = (Engine(backbone.model(), None, one) for one in (config, EngineConfig(4, 16, 64)))
    cache = engine.runner.attention.cache
    assert {tensor.dtype for tensor in (*cache.keys, *cache.values)} == {FP8}
    assert engine.memory.kv_cache == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert 4 * engine.memory.token_bytes == wide.memory.token_bytes


@pytest.mark.parametrize("table", [(3, 4), (9, 2)], ids=["consecutive", "scattered"])
def test_what_is_read_is_wide(table) -> None:
    cache = make_cache(2, 8, fp8=True)
    rows = torch.tensor([block * 4 + offset for block in table for offset in range(4)])
    keys, values = torch.randn(8, 2, 8), 1000 * torch.randn(8, 2, 8)
    cache.write(1, rows, keys, values)
    for found, given in zip(cache.read(1, table, 7), (keys, values), strict=True):
        assert found.dtype == torch.float32
        assert found[0].transpose(0, 1).equal(saturated(given, FP8).float()[:7])


def test_values_beyond_the_format_become_its_largest() -> None:
    given = torch.tensor([1e9, -1e9, 448.0, 460.0, -500.0, 0.3, float("inf"), float("nan")])
    found = saturated(given, FP8).float()
    assert found[:-1].tolist() == [448.0, -448.0, 448.0, 448.0, -448.0, 0.3125, 448.0]
    assert found[-1].isnan()
