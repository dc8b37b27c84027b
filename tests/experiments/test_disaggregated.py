"""LoRA servers: bytes by hand, bounds of the cost model, the rows of its map, and the verdict on InfiniLoRA's claim."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fakes import composed

from experiments.claims.disaggregated import disaggregated_verdicts
from experiments.cluster.adapted_shapes import ITEM, MIXTURES, shape_of
from experiments.cluster.disaggregated import (
    LATE,
    Asked,
    Link,
    Rates,
    Served,
    base_step,
    base_times,
    busiest,
    coupled,
    coupled_step,
    disaggregated,
    disaggregated_step,
    lora_times,
    seen,
    trip_times,
)
from experiments.cluster.link_map import COUPLED, DISAGGREGATED, ROUTED, ratios
from experiments.cluster.load_costs import load_cost
from experiments.cluster.recorded import recorded_costs
from experiments.cluster.step_costs import model_bytes
from experiments.ext_disaggregated import EXPERIMENT as MAP
from experiments.harness.counted import frame_of
from experiments.harness.resume import run
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.harness.settings import settle
from punica.cluster import StepWork
from punica.measure.records import read_rows

RESULTS = REPOSITORY / "results"
DENSE, MIXTURE = "llama2-7b", "qwen3-30b-a3b"
COST, LOADS = recorded_costs(RESULTS)["h200", DENSE].cost, load_cost(RESULTS, "h200", DENSE)
RATES = Rates.of(COST, LOADS, model_bytes(DENSE))
FREE = Link(1e30, 0.0)
FLYING = np.array([1.0, 7.0, 64.0, 256.0])


def asked(model: str = MIXTURE, **changes) -> Asked:
    """Return 512 adapters of rank 64 on eight GPUs, changed."""
    usual = Asked(shape_of(model), RATES, 64, 512, 1.2, 20.0, 100.0, 8, 127e9, 256, 0.05, 0.25)
    return replace(usual, **changes)


# bytes


def test_a_dense_shape_has_the_elements_of_the_models_bytes() -> None:
    shape, known = shape_of(DENSE), model_bytes(DENSE)
    assert (shape.weights, shape.head, shape.kv, shape.lora) == (known.weights, known.head, known.kv, known.lora)


def test_mixtures_have_the_widths_of_the_models_that_were_timed() -> None:
    from experiments.benches.expert_models import COMMON, MODELS, model_config

    assert set(MIXTURES) == set(MODELS)
    for name, (hidden, inner, queries, keys, _, vocab, experts, top) in MIXTURES.items():
        config = model_config(name, 1, 1)
        assert (hidden, vocab) == (config.hidden_size, config.vocab_size)
        assert inner == getattr(config, "moe_intermediate_size", config.intermediate_size)
        assert queries == config.num_attention_heads * COMMON["head_dim"]
        assert keys == config.num_key_value_heads * COMMON["head_dim"]
        assert experts == (config.num_local_experts if "mixtral" in name else config.num_experts)
        assert top == config.num_experts_per_tok
    assert [MIXTURES[name][4] for name in ("mixtral-8x7b", MIXTURE)] == [32, 48]  # layers, of their model cards


def test_an_adapter_on_all_experts_has_the_bytes_that_infinilora_says() -> None:
    """6.18 GiB on the experts of Qwen3-30B-A3B at rank 64, by a summary of the paper; attention comes on top."""
    experts = 48 * 128 * 3 * (2048 + 768) * 64 * ITEM
    attention = 48 * (3 * 2048 + 4096 + 2 * 512 + 4096 + 2048) * 64 * ITEM
    assert experts / 2**30 == pytest.approx(6.18, abs=0.01)
    assert asked().adapter_bytes == experts + attention


def test_a_token_exchanges_these_elements_in_every_layer() -> None:
    dense = (4096 + 3 * 4096) + (4096 + 4096) + (4096 + 2 * 11008) + (11008 + 4096)
    mixture = (2048 + 5120) + (4096 + 2048) + (2048 + 8 * 2 * 768) + (8 * 768 + 2048)
    for model, layers, each in ((DENSE, 32, dense), (MIXTURE, 48, mixture)):
        assert shape_of(model).layers == layers
        trips = trip_times(asked(model), np.array([10.0]), 4, Link(1e9, 3e-6))
        tokens = 10 * 1.2  # a fifth of a row of prompts for each row of decodes
        assert float(sum(trips)[0]) == pytest.approx(4 * 6e-6 + ITEM * tokens * each / 1e9)


def test_fewer_servers_than_base_gpus_share_their_links() -> None:
    trip = {servers: trip_times(asked(), FLYING, servers, Link(1e9, 0.0))[0] for servers in (1, 2, 4, 7)}
    np.testing.assert_allclose(trip[1], 7 * trip[4])
    np.testing.assert_allclose(trip[2], 3 * trip[4])
    np.testing.assert_allclose(trip[7], trip[4])  # a base GPU's own link


# steps


@pytest.mark.parametrize("rank", [16, 128])
def test_a_coupled_step_of_the_timed_model_is_its_cost_models(rank) -> None:
    work = asked(DENSE, rank=rank, adapters=1)
    flying = np.array([40.0])
    tokens = StepWork(40, int(40 * work.cached), int(40 * 20 / 100), rank)
    assert float(coupled_step(work, flying, seen(1.2, 1))[0]) == pytest.approx(COST.seconds(tokens), rel=1e-9)


def test_the_rates_of_a_dense_model_tell_recorded_experts() -> None:
    """Nothing was fitted to them: 32 rows with an adapter each at rank 16, on an H200. Compared are a layer's base
    products, and what LoRA adds to a step, whose rows are as new as those that its rate is from.
    """
    rows = frame_of(read_rows(RESULTS / "h200" / "ext_moe.csv"))
    chosen = rows[(rows["panel"] == MIXTURE) & (rows["batch_size"] == 32) & (rows["workload"] == "Distinct")]
    chosen = chosen[chosen["metric"].isin(["layer_latency", "step_latency"]) & (chosen["statistic"] == "median")]
    timed = chosen.groupby("system")["value"].median()
    work = asked(rank=16, prompt=0.0)
    gate, down = base_times(work, np.array([32.0]))[1][2:]
    assert float((gate + down)[0]) == pytest.approx(timed["backbone layer"] / 1e6, rel=0.15)
    pairs = [32, 32, 32 * 8, 32 * 8]  # of rows or their experts with an adapter, on each input of a layer
    elements = sum(met * part.lora for met, part in zip(pairs, work.shape.products, strict=True))
    lora = work.shape.layers * ITEM * RATES.lora * 16 * elements
    assert lora == pytest.approx((timed["engine"] - timed["backbone engine"]) / 1e3, rel=0.15)


@pytest.mark.parametrize("model", [DENSE, *MIXTURES])
def test_free_servers_over_a_free_link_are_never_slower(model) -> None:
    work, where = asked(model), seen(1.2, 512)
    free = [np.zeros_like(FLYING)] * 4
    step = disaggregated_step(work, FLYING, 4, FREE, free)
    np.testing.assert_allclose(step, base_step(work, FLYING))
    assert (step < coupled_step(work, FLYING, where)).all()
    everything = replace(work, gpus=9, memory=1e15, rates=replace(RATES, lora=0.0))
    (served,) = disaggregated(everything, [FREE])
    assert served.servers == 1
    for routed in (False, True):
        assert 9 * served.rate >= 8 * coupled(work, routed).rate


@pytest.mark.parametrize("model", [DENSE, MIXTURE])
def test_latency_alone_bounds_a_step_from_below(model) -> None:
    work = asked(model)
    nothing = [np.zeros_like(FLYING)] * 4
    step = disaggregated_step(work, FLYING, 4, Link(1e30, 1e-3), nothing)
    rest, _ = base_times(work, FLYING)
    np.testing.assert_allclose(step, rest + work.shape.layers * 4 * 2e-3)  # no base product lasts 2 ms


def test_adapters_that_coincide_are_read_once_for_all_gpus() -> None:
    one = lora_times(asked(adapters=1), seen(1.2, 1), np.array([1.0, 8e9]))
    dense = lora_times(asked(DENSE, adapters=1), seen(1.2, 1), np.array([1.0, 8e9]))
    assert [float(part[1] / part[0]) for part in dense] == pytest.approx([1.0] * 4)
    assert [float(part[1] / part[0]) for part in one] == pytest.approx([1.0, 1.0, 16.0, 16.0])  # of 128 experts, 8


# slots and loads


def test_a_uniform_popularity_misses_what_slots_do_not_hold() -> None:
    where = seen(0.0, 100)
    assert [where.missed(slots) for slots in (25, 60, 100)] == pytest.approx([0.75, 0.4, 0.0], abs=0.01)
    misses = [seen(1.2, 512).missed(slots) for slots in range(1, 513, 7)]
    assert misses == sorted(misses, reverse=True)


def test_routing_by_adapter_splits_the_rare_ones_over_the_gpus() -> None:
    anywhere, routed = seen(1.2, 512), seen(1.2, 512, 8)
    assert float(routed.part @ routed.share) == pytest.approx(1.0)
    assert float(routed.share.max()) <= 1.0
    assert routed.part.sum() < 512 / 8 + 8
    assert all(routed.missed(slots) < anywhere.missed(slots) for slots in (2, 9, 40))


def test_a_link_is_busy_until_too_many_wait_too_long() -> None:
    waits = np.array([0.5, 2.0, 30.0])
    use = busiest(0.4, waits)
    np.testing.assert_allclose(0.4 * use * np.exp(-2 * (1 - use) * waits), LATE, rtol=1e-6)
    assert busiest(LATE, np.array([-1.0, 1.0])) == pytest.approx([1.0, 1.0])  # the rest is in time
    assert busiest(0.4, np.array([-1.0])) == pytest.approx([0.0], abs=1e-9)


def test_no_rate_is_served_where_no_slot_fits_and_where_loads_are_too_late() -> None:
    assert coupled(asked(memory=62e9), routed=False) == Served()
    assert coupled(asked(wait_s=0.05), routed=False) == Served()


# rates


LINKS = [Link(1e9 * bandwidth, latency) for bandwidth in (5, 25, 50, 450) for latency in (0.0, 1e-6, 1e-5, 1e-4)]


@pytest.mark.parametrize("changes", [{}, {"rank": 16}, {"adapters": 2000, "rank": 128}, {"wait_s": 1.0}])
def test_a_faster_link_never_serves_less(changes) -> None:
    for model in (DENSE, MIXTURE):
        rate = np.array([one.rate for one in disaggregated(asked(model, **changes), LINKS)]).reshape(4, 4)
        assert (np.diff(rate, axis=0) >= 0).all()
        assert (np.diff(rate, axis=1) <= 0).all()
        assert rate[-1, 0] > rate[0, -1]


def test_a_step_beyond_its_target_is_not_served() -> None:
    assert disaggregated(asked(), [Link(450e9, 1e-3)]) == [Served()]
    assert disaggregated(asked(token_s=1.0), [Link(450e9, 1e-3)])[0].rate > 0


def test_the_same_is_served_each_time() -> None:
    assert disaggregated(asked(), LINKS) == disaggregated(asked(), LINKS)
    assert coupled(asked(), True) == coupled(asked(), True)


# rows, figure and verdicts


def rows_of(rates: dict[str, float], model: str = MIXTURE, adapters: int = 512, rank: int = 64) -> pd.DataFrame:
    """Return rows of system, or latency of `disaggregated` over 50 GB/s -> request rate."""
    fixed = {"figure": MAP.figure, "model": model, "rank": rank, "panel": f"{adapters} adapters, Zipf 1.2"}
    named = {COUPLED: (COUPLED, "request_rate"), ROUTED: (ROUTED, "request_rate")}
    found = [
        (*named.get(key, (DISAGGREGATED, f"request_rate, 50 GB/s, {key} us")), rate) for key, rate in rates.items()
    ]
    return pd.DataFrame([{**fixed, "system": system, "metric": name, "value": rate} for system, name, rate in found])


def of_mixtures(rates: dict[str, float], rank: int = 64) -> pd.DataFrame:
    """Return the same rows of every mixture."""
    return pd.concat([rows_of(rates, name, rank=rank) for name in MIXTURES])


def test_ratios_are_infinite_where_only_servers_meet_the_targets() -> None:
    rows = pd.concat([rows_of({COUPLED: 2.0, "5": 3.0}), rows_of({COUPLED: 0.0, "5": 3.0, "9": 0.0}, adapters=9)])
    table = ratios(rows, COUPLED)
    assert table["adapters"].tolist() == [512, 9, 9]
    assert table["latency"].tolist() == [5, 5, 9]
    assert table["ratio"].tolist()[:2] == [1.5, np.inf]
    assert np.isnan(table["ratio"].iloc[2])


@pytest.mark.parametrize(
    ("fast", "slow", "verdict"),
    [(8.0, 6.2, "reproduced in simulation."), (6.0, 1.0, "differs."),
     (8.0, 1.0, "reproduced in simulation at rank 64 up to 1 us, differs elsewhere.")],
)  # fmt: skip
def test_the_claim_is_held_against_every_latency(fast, slow, verdict) -> None:
    *counted, judged = disaggregated_verdicts(of_mixtures({COUPLED: 2.0, "1": fast, "20": slow}))
    assert f"{fast / 2:.2f} to {slow / 2:.2f} (rank 64) times that of the same GPUs" in judged
    assert "50 GB/s, 1 to 20 us one way" in judged
    assert judged.endswith(verdict)
    assert len(counted) == len(MIXTURES)
    assert f"in {2 if slow > 2 else 1} of 2 cells of the map (at most {fast / 2:.2f} times)" in counted[0]


def test_the_claim_is_held_against_both_ranks_that_it_may_be_of() -> None:
    rows = [of_mixtures({COUPLED: 1.0, "5": rate}, rank) for rank, rate in ((16, 9.0), (32, 2.0), (64, 4.0))]
    *_, judged = disaggregated_verdicts(pd.concat(rows))
    assert "2.00 to 2.00 (rank 32), 4.00 to 4.00 (rank 64) times that of" in judged
    assert judged.endswith("reproduced in simulation at rank 64 up to 5 us, differs elsewhere.")


def test_the_claim_is_of_the_mean_mixture_and_of_no_dense_model() -> None:
    rates = zip(MIXTURES, (2.0, 8.0), strict=True)
    mixtures = [rows_of({COUPLED: 1.0, ROUTED: 4.0, "5": rate}, name) for name, rate in rates]
    dense = rows_of({COUPLED: 1.0, "5": 0.1}, DENSE)
    *_, judged = disaggregated_verdicts(pd.concat([*mixtures, dense]))
    assert "4.00 to 4.00 (rank 64) times that of the same GPUs" in judged
    assert judged.endswith("with requests routed by adapter: 1.00 to 1.00 (rank 64) times.")
    for rows in (dense, mixtures[0]):
        assert len(disaggregated_verdicts(rows)) == 1  # no mean of all mixtures
    assert disaggregated_verdicts(rows_of({"5": 0.1})) == []


def test_the_map_is_simulated_and_not_drawn(tmp_path) -> None:
    outcome = run(composed(tmp_path, "draw=true", "hardware=cpu", name=MAP.name), MAP)
    assert (outcome.failed, outcome.measured, len(outcome.figures)) == ([], 9, 0)
    rows = read_rows(outcome.rows_file)
    assert {row.kind for row in rows} == {"simulated"}
    assert {row.cost_model for row in rows} == {COST.name}
    assert len(rows) == 3 * (2 * 2 + 4 * 2)


@pytest.mark.parametrize(
    ("override", "said"),
    [("figure.models=[gpt]", "figure.models has 'gpt'; it can have mixtral-8x7b"),
     ("figure.memory_gb=60", "figure.memory_gb=60 does not hold mixtral-8x7b: give 94 or more"),
     ("figure.gpus=1", "figure.gpus=1 must be at least 2"),
     ("figure.exponents=[-1]", "figure.exponents has -1.0, must be at least 0"),
     ("figure.cost=abacus", "figure.cost is 'abacus'")],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_before_anything_runs(tmp_path, override, said) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        MAP.points(settle(composed(tmp_path, override, "hardware=cpu", name=MAP.name), MAP))
