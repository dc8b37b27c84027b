"""Batches of many adapters: a request's tokens do not depend on its batch, and none starves."""

import random

import pytest

from punica.engine import Engine, EngineConfig
from punica.scheduling.admission import MOST_OVERTAKES

LONGEST = 7


def test_oracle_tells_adapters_apart(backbone) -> None:
    """Equality below would be empty if adapters did not change what is generated."""
    outputs = {tuple(backbone.generate_merged((3, 1, 4, 1, 5), adapter_id, 12)) for adapter_id in range(7)}
    assert len(outputs) == 7


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_batch_size": 16}, {"max_batch_size": 1}, {"block_size": 1}, {"block_size": 5}, {"max_loras": 1},
        {"max_loras": 3}, {"admission": "fcfs_many"}, {"admission": "resident_first"},
        {"admission": "single_adapter"}, {"admission": "static"},
    ],
    ids=str,
)  # fmt: skip
def test_mixed_batches_equal_merged_models_one_by_one(backbone, mixed_wishes, mixed_tokens, serve, sizes) -> None:
    """Whatever the batch, the blocks, the rule; with few slots adapters are evicted and loaded again on the way."""
    engine = backbone.engine(**sizes)
    assert serve(engine, mixed_wishes) == mixed_tokens
    assert len(engine.manager) <= engine.manager.lora_slots


def test_backbone_only_engine_ignores_adapters_when_told_to(backbone, mixed_wishes) -> None:
    engine = Engine(backbone.model(), None, EngineConfig(max_model_len=64, ignore_adapters=True), "single_adapter")
    requests = [backbone.ask(engine, str(i), *wish) for i, wish in enumerate(mixed_wishes)]
    while engine.has_unfinished():
        assert len({request.adapter_id for request in engine.scheduler.running}) <= 1  # one adapter per batch
        assert engine.step().statistics.num_segments == 0
    plain = [backbone.generate_merged(wish.prompt, 0, wish.new) for wish in mixed_wishes]
    assert [request.output_token_ids for request in requests] == plain


def test_last_admitted_rule_applies_one_adapter_per_step(backbone) -> None:
    """Disagreement D04: with the released rule every step has one segment, and tokens are wrong."""
    outputs = {}
    for rule in ("per_request", "last_admitted"):
        engine = backbone.engine(adapter_index_rule=rule)
        requests = [backbone.ask(engine, str(i), [9, 8, 7], i, 12) for i in (1, 2, 3)]
        segments = []
        while engine.has_unfinished():
            segments.append(engine.step().statistics.num_segments)
        outputs[rule] = [request.output_token_ids for request in requests]
        assert max(segments) == (3 if rule == "per_request" else 1)
    assert outputs["per_request"] == [backbone.generate_merged((9, 8, 7), i, 12) for i in (1, 2, 3)]
    assert outputs["last_admitted"][0] != outputs["per_request"][0]


@pytest.mark.parametrize(
    ("rule", "slots", "pinned", "blocks"),
    [
        ("fcfs", 1, (), None), ("fcfs", 2, (6,), 9), ("fcfs_many", 2, (6,), 9), ("resident_first", 3, (1, 6), None),
        ("resident_first", 2, (6,), 9), ("single_adapter", 1, (), None), ("static_mixed", 3, (1, 6), None),
    ],
)  # fmt: skip
def test_waits_are_bounded_by_what_came_before(backbone, rule, slots, pinned, blocks) -> None:
    """Tenant 1 adds requests at every step, the others one now and then; L = 7 is the longest generation."""
    engine, choose = backbone.engine(rule, slots, max_batch_size=3, block_size=4, num_blocks=blocks), random.Random(5)
    for adapter_id in pinned:
        engine.manager.add_adapter(backbone.adapters[adapter_id])
        engine.manager.pin_adapter(adapter_id)
    arrived: dict[str, tuple[int, int]] = {}  # step, unfinished requests before it
    waited, joined, states = {}, [], {}
    for step in range(600):
        if step < 20:
            for tenant in (1, choose.choice((2, 3, 4, 5, 6, 0))):
                name = f"{step} of {tenant}"
                before = sum(not state.has_ended for state in states.values())
                prompt, new = [choose.randrange(256) for _ in range(choose.randint(1, 9))], choose.randint(1, LONGEST)
                states[name] = backbone.ask(engine, name, prompt, tenant, new)
                arrived[name] = step, before
        new_tokens = engine.step().tokens
        for name in [name for name in arrived if name in new_tokens and name not in waited]:
            waited[name] = step - arrived[name][0]
            joined.append(name)
        if step >= 20 and not engine.has_unfinished():
            break
    assert not engine.has_unfinished()
    assert {state.finish_reason for state in states.values()} == {"length"}
    overtakers = MOST_OVERTAKES if rule == "resident_first" else 0
    assert all(waited[name] <= (before + 1 + overtakers) * LONGEST for name, (_, before) in arrived.items())
    assert all(state.overtaken <= overtakers for state in states.values())
    order = [list(arrived).index(name) for name in joined]
    if not overtakers:
        assert all(later >= place - 2 for place, later in enumerate(order))  # a batch of three may join in one step
    assert max(waited.values()) > 20  # the queue was long
