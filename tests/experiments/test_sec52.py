"""Loading adapters: bytes as the paper's arithmetic, wrong loads refused, a step undisturbed, the figure drawn."""

import csv
import time
from dataclasses import replace

import pytest
import torch
from fakes import PAPER, measured, settled
from tiny import TINY

from experiments.benches import adapter_loading
from experiments.benches.adapter_loading import LOADERS, Bench, Decode, Loader, check_loader
from experiments.benches.adapter_loading import measured as timed
from experiments.benches.operators import protocol
from experiments.harness import CheckFailed
from experiments.harness.schema import ModelConf, model_conf
from experiments.sec52_adapter_loading import EXPERIMENT as SEC52

STEPS = Decode("Distinct", 3, 16)


@pytest.fixture
def bench():
    return Bench(TINY, 8, "cpu", rotate_bytes=300_000)


@pytest.fixture
def serving():
    return Bench(TINY, 8, "cpu", decode=STEPS)


def paper_bytes():
    with (PAPER / "text_other_numbers.csv").open(newline="") as stream:
        lines = [line for line in csv.DictReader(stream) if line["metric"].startswith("lora_bytes")]
    return [(line["model"], line["metric"], int(line["value"])) for line in lines]


@pytest.mark.parametrize(("model", "metric", "expected"), paper_bytes(), ids=str)
def test_bytes_are_those_of_the_paper(model, metric, expected):
    """D03: 2.50 MB per layer and 80.0 MB in all for 7B at rank 16."""
    conf = model_conf(f"llama2-{model.lower()}")
    assert conf.lora_parameters(16, 1 if "layer" in metric else None) * conf.dtype.bytes == expected


def test_adapters_and_slots_have_these_bytes_or_nothing_is_timed(bench, monkeypatch):
    tensors = [tensor for weights in bench.adapters[0].loras.values() for tensor in weights.pair()]
    assert sum(tensor.nbytes for tensor in tensors) == bench.bytes == bench.manager.slot_bytes == 73_984
    monkeypatch.setattr(ModelConf, "lora_parameters", lambda *_: 70_000 // TINY.dtype.bytes)
    with pytest.raises(CheckFailed, match="73984 bytes in an adapter, 73984 in a slot, 70000 by arithmetic"):
        Bench(TINY, 8, "cpu")


@pytest.mark.parametrize("name", ["punica", "pageable", "link"])
def test_every_loader_fills_a_poisoned_slot_and_leaves_the_step_alone(name, bench, serving):
    for one in (bench, serving):
        check_loader(one, name, LOADERS.get(name)(one))


def test_a_load_fills_only_the_spare_slot(serving):
    loader = LOADERS.get("punica")(serving)
    before = serving.step().clone()
    for i in range(5):
        loader.start(i)
        assert serving.manager.lora_index_to_id == [1, 2, 3, serving.adapters[i % 2].id]
        loader.check(i)
        with pytest.raises(CheckFailed, match="does not hold adapter"):
            loader.check(i + 1)
    assert torch.equal(serving.step(), before)


def spoilt_by(bench, spoil):
    right = LOADERS.get("pageable")(bench)

    def start(i):
        handle = right.start(i)
        spoil()
        return handle

    return replace(right, start=start)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda layer, slot: layer.lora_b_stacked[1][slot].mul_(0.5), "k_proj does not hold adapter 2"),
        (lambda layer, slot: layer.lora_a_stacked[0][slot, 0, 7, 63].add_(1e-3), "q_proj does not hold adapter 2"),
        (lambda layer, slot: layer.lora_b_stacked[2][slot, 0, -1].fill_(torch.nan), "v_proj does not hold adapter 2"),
        (lambda layer, slot: layer.lora_ranks[2, slot].fill_(7), "rank of slot 0 of .*v_proj is not 8"),
    ],
    ids=["unscaled-b", "one-element-of-a", "last-row-missing", "rank"],
)
def test_a_wrong_load_is_not_timed(bench, spoil, words):
    layer = bench.manager.modules["model.layers.1.self_attn.qkv_proj"]
    wrong = spoilt_by(bench, lambda: spoil(layer, bench.slot))
    with pytest.raises(CheckFailed, match=words):
        check_loader(bench, "pageable", wrong)


def test_a_load_that_does_nothing_or_misses_a_module_is_not_timed(bench):
    bench.manager.activate_adapter(2)  # the right content is there, and must not pass for a load
    bench.check_slot(1)
    with pytest.raises(CheckFailed, match="does not hold adapter 2"):
        check_loader(bench, "idle", Loader(lambda i: adapter_loading.CopyHandle(), bench.check_slot))
    bench.adapters[1].loras.popitem()
    with pytest.raises(CheckFailed, match=r"adapter 2 has no model\.layers\.1\.mlp\.down_proj"):
        check_loader(bench, "punica", LOADERS.get("punica")(bench))


def test_a_load_that_disturbs_the_step_is_not_timed(serving):
    neighbour = serving.manager.modules["model.layers.0.mlp.down_proj"].lora_b_stacked[0]
    wrong = spoilt_by(serving, lambda: neighbour[1].mul_(10))
    with pytest.raises(CheckFailed, match="a step beside a load differs"):
        check_loader(serving, "pageable", wrong)


def test_steps_without_effect_of_their_adapters_are_refused(monkeypatch):
    monkeypatch.setattr(adapter_loading, "difference", lambda *_: 0.0)
    with pytest.raises(CheckFailed, match="as if its rows had no adapters"):
        Bench(TINY, 8, "cpu", decode=STEPS)


def test_other_bytes_over_the_link_are_seen(bench):
    loader = LOADERS.get("link")(bench)
    loader.start(0)
    with pytest.raises(CheckFailed, match="not those of its source"):
        loader.check(1)


def test_samples_of_loads_and_steps_belong_together(tmp_path, serving):
    clock = protocol(settled(tmp_path, SEC52))
    found = timed(serving, ["punica", "pageable", "link"], clock)
    for one in found.values():
        assert {len(one.load), len(one.host), len(one.step), len(one.step_alone)} == {clock.repeats}
        assert one.load == one.host  # a CPU loads before the call returns
        assert all(beside > load > 0 for beside, load in zip(one.step, one.load, strict=True))
        assert one.device == []
    assert found["punica"].step_alone == found["link"].step_alone
    assert found["punica"].load != found["link"].load


def test_a_slow_load_is_seen_in_every_number_that_it_should_be_in(tmp_path, bench, serving, monkeypatch):
    late, clock = [0.0], time.perf_counter  # an hour per load, which no busy machine takes for a step
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(late))

    def slow(one):
        right = LOADERS.get("pageable")(one)

        def start(i):
            late.append(3600.0)
            return right.start(i)

        return replace(right, start=start)

    monkeypatch.setitem(LOADERS._entries, "punica", slow)
    settings = replace(protocol(settled(tmp_path, SEC52)), seconds=float("inf"))
    alone, beside = (timed(one, ["punica"], settings)["punica"] for one in (bench, serving))
    assert len(alone.load) == len(beside.step_alone) == settings.repeats
    assert 3600 <= min(alone.load + alone.host + beside.load + beside.step) < 2 * 3600
    assert max(beside.step_alone) < 3600


@pytest.mark.slow
def test_bytes_of_layers_and_models_are_rows(tmp_path):
    words = ("adapters.ranks=[8,16]", "figure.overlap_rank=16")
    outcome, rows = measured(tmp_path, SEC52, *words)
    assert outcome.measured == 2 * (2 * 2 + 1)
    sizes = {(row.panel, row.rank): row.value for row in rows if row.metric == "bytes"}
    assert sizes["model", 16] == sizes["overlap", 16] == 2 * sizes["layer", 16] == 4 * sizes["layer", 8]
