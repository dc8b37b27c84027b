"""Pipelines over one context: three ways agree where they must, and differ in blocks."""

import pytest
from fakes import composed

from experiments.benches.pipelines import Pipelines
from experiments.ext_prefix_cache import EXPERIMENT as PREFIX
from experiments.harness.experiment import CheckFailed
from experiments.harness.resume import run
from experiments.harness.settings import settle
from experiments.measure.records import read_rows


@pytest.fixture(scope="module")
def drawn() -> list[tuple[str, int]]:
    """Filled by `rows`: the system and the seed of every pipeline."""
    return []


@pytest.fixture(scope="module")
def rows(tmp_path_factory, drawn):
    home = tmp_path_factory.mktemp("rows")
    sizes = ("figure.contexts=[48]", "figure.adapters=[1,3]", "figure.pipelines=1")
    genuine = Pipelines.run

    def seen(self, name: str, *case: int):
        drawn.append((name, case[-1]))
        return genuine(self, name, *case)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pipelines, "run", seen)
        run(composed(home, *sizes, name="ext_prefix_cache"), PREFIX)
    return read_rows(home / "cpu" / "smoke" / "rows" / "ext_prefix_cache.csv")


def test_no_pipeline_finds_the_context_of_another_in_the_cache(rows, drawn):
    cached = [one for one in drawn if one[0] != "recompute"]
    assert len(set(cached)) == len(cached) > 4


def blocks(rows, system: str, panel: str) -> float:
    (found,) = [row.value for row in rows if (row.system, row.panel, row.metric) == (system, panel, "blocks")]
    return found


def test_activated_adapters_share_the_blocks_of_the_context(rows):
    alone = blocks(rows, "activated_cached", "adapters: 1")
    assert blocks(rows, "recompute", "adapters: 1") == alone == 7  # 48 + 3 + 16 + 32 tokens
    assert blocks(rows, "activated_cached", "adapters: 3") <= 3 * alone - 2 * (48 // 16)
    assert blocks(rows, "recompute", "adapters: 3") >= 3 * alone - 3


def test_every_point_has_first_tokens_and_pipelines(rows):
    timed = [row for row in rows if row.statistic == "median"]
    assert len(timed) == 2 * 2 * 3
    assert min(row.value for row in timed) > 0


def test_other_tokens_than_without_a_cache_are_not_timed(monkeypatch, tmp_path):
    cfg = settle(composed(tmp_path, name="ext_prefix_cache"), PREFIX)
    bench = Pipelines(cfg.model, "cpu", [32], 2, 4, 0, 1024)
    genuine = bench.run
    monkeypatch.setattr(bench, "run", lambda name, *case: genuine(name, *case)._replace(tokens=[len(name)] * 2))
    with pytest.raises(CheckFailed, match=r"0\.00 .* 0\.75"):
        bench.check("activated_cached", 32, 2, 1)
