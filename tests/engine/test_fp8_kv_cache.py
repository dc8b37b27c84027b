"""Keys and values in FP8: as if each were rounded when it is written, in a quarter of float32's bytes."""

import pytest
import torch

from punica.engine import Engine, EngineConfig
from punica.engine import sampler as sampler_module
from punica.engine.attention import KVCache
from punica.ops.quant import saturated
from punica.scheduling import Request
from tests.engine.test_attention import make_cache

FP8 = torch.float8_e4m3fn


def logits_of(engine: Engine, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the logits of all steps of greedy requests, in the order of the rows."""
    from punica.engine import runner

    found = []

    def noted(logits, *rest):
        found.append(logits.clone())
        return sampler_module.choose_tokens(logits, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "choose_tokens", noted)
        for request in requests:
            engine.add_request(request)
        while engine.has_unfinished():
            engine.step()
    return torch.cat(found)


def requests(backbone) -> list[Request]:
    return [Request(f"r{i}", [7 * i + j for j in range(3 + 2 * i)], 10, backbone.adapters.get(i)) for i in range(5)]


def test_equals_a_wide_cache_whose_entries_are_rounded(backbone, monkeypatch) -> None:
    """The same bits; few blocks, so that some are preempted and computed again."""
    sizes = {"num_blocks": 6, "block_size": 8}
    held = logits_of(backbone.engine(**sizes, fp8_kv_cache=True), requests(backbone), monkeypatch)
    write = KVCache.write

    def rounding(cache, layer, rows, keys, values):
        write(cache, layer, rows, *(saturated(part, FP8).float() for part in (keys, values)))

    monkeypatch.setattr(KVCache, "write", rounding)
    assert held.equal(logits_of(backbone.engine(**sizes), requests(backbone), monkeypatch))


def test_the_first_step_that_reads_the_cache_is_close(backbone, monkeypatch) -> None:
    """A prompt reads none; its logits keep their bits."""
    prompt, found = [Request("r", list(range(5, 45)), 2, backbone.adapters[2])], []
    for fp8 in (False, True):
        found.append(logits_of(backbone.engine(fp8_kv_cache=fp8), prompt, monkeypatch))
    assert found[0][0].equal(found[1][0])
    assert 0 < (found[0][1] - found[1][1]).norm() / found[0][1].norm() < 0.05


def test_a_quarter_of_the_bytes_of_float32(backbone) -> None:
    config = EngineConfig(max_batch_size=4, max_model_len=64, fp8_kv_cache=True)
    engine, wide = (Engine(backbone.model(), None, one) for one in (config, EngineConfig(4, 16, 64)))
    cache = engine.runner.attention.cache
    assert {tensor.dtype for tensor in (*cache.keys, *cache.values)} == {FP8}
    assert engine.memory.kv_cache == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert 4 * engine.memory.token_bytes == wide.memory.token_bytes


def test_values_beyond_the_format_become_its_largest() -> None:
    given = torch.tensor([1e9, -1e9, 448.0, 460.0, -500.0, 0.3, float("inf")])
    assert saturated(given, FP8).float().tolist() == [448.0, -448.0, 448.0, 448.0, -448.0, 0.3125, 448.0]
    assert saturated(torch.tensor([float("nan")]), FP8).float().isnan().all()


@pytest.mark.parametrize("table", [(3, 4), (9, 2)], ids=["consecutive", "scattered"])
def test_what_is_read_is_wide(table) -> None:
    cache = make_cache(2, 8, fp8=True)
    rows = torch.tensor([block * 4 + offset for block in table for offset in range(4)])
    keys, values = torch.randn(8, 2, 8), 1000 * torch.randn(8, 2, 8)
    cache.write(1, rows, keys, values)
    for found, given in zip(cache.read(1, table, 7), (keys, values), strict=True):
        assert found.dtype == torch.float32
        assert found[0].transpose(0, 1).equal(saturated(given, FP8).float()[:7])
