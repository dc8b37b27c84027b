"""Batches of many adapters: a request's tokens do not depend on its batch."""

import pytest

from punica.engine import Engine, EngineConfig, Request


@pytest.fixture(scope="module")
def expected(backbone, mixed_wishes) -> list[list[int]]:
    return [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in mixed_wishes]


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
def test_mixed_batches_equal_merged_models_one_by_one(backbone, mixed_wishes, expected, serve, sizes) -> None:
    """Whatever the batch, the blocks, the rule; with few slots adapters are evicted and loaded again on the way."""
    engine = backbone.engine(**sizes)
    assert serve(engine, mixed_wishes) == expected
    assert len(engine.manager) <= engine.manager.lora_slots


@pytest.mark.parametrize("admission", ["fcfs", "single_adapter"])
def test_preemption_and_readmission_change_no_token(backbone, admission) -> None:
    """8 requests that grow from 1 to 8 blocks in a cache of 10: several preemptions."""
    engine = backbone.engine(admission, block_size=4, num_blocks=10)
    adapter_ids = [1, 2, 3, 0, 1, 2, 3, 0] if admission == "fcfs" else [2] * 8
    requests = []
    for i, adapter_id in enumerate(adapter_ids):
        request = engine.add_request(Request(f"r{i}", [i + 1] * 3, 29, backbone.adapters.get(adapter_id)))
        requests.append(request)
    interrupted = 0
    while engine.has_unfinished():
        engine.step()
        interrupted += sum(1 for request in engine.scheduler.waiting if request.output_token_ids)
    assert sum(request.preemptions for request in requests) >= 4
    assert interrupted > 0  # some were preempted in the middle of their output
    for request, adapter_id in zip(requests, adapter_ids, strict=True):
        assert request.output_token_ids == backbone.generate_merged(request.prompt_token_ids, adapter_id, 29)
    assert engine.blocks.num_free == 10


def test_backbone_only_engine_ignores_adapters_when_told_to(backbone, mixed_wishes) -> None:
    engine = Engine(backbone.model(), None, EngineConfig(max_model_len=64, ignore_adapters=True), "single_adapter")
    requests = [
        Request(str(i), wish.prompt, wish.new, backbone.adapters.get(wish.adapter_id))
        for i, wish in enumerate(mixed_wishes)
    ]
    requests = [engine.add_request(request) for request in requests]
    batches = []
    while engine.has_unfinished():
        running = {request.adapter_id for request in engine.scheduler.running}
        assert len(running) <= 1  # one adapter per batch
        batches.append(engine.step().statistics)
    assert all(statistics.num_segments == 0 for statistics in batches)
    for request in requests:
        plain = backbone.generate_merged(request.prompt_token_ids, 0, request.request.max_new_tokens)
        assert request.output_token_ids == plain


def test_last_admitted_rule_applies_one_adapter_per_step(backbone) -> None:
    """Disagreement D04: with the released rule every step has one segment, and tokens are wrong."""
    outputs = {}
    for rule in ("per_request", "last_admitted"):
        engine = backbone.engine(adapter_index_rule=rule)
        requests = [Request(str(i), [9, 8, 7], 12, backbone.adapters[i]) for i in (1, 2, 3)]
        requests = [engine.add_request(request) for request in requests]
        segments = []
        while engine.has_unfinished():
            segments.append(engine.step().statistics.num_segments)
        outputs[rule] = [request.output_token_ids for request in requests]
        assert max(segments) == (3 if rule == "per_request" else 1)
    assert outputs["per_request"] == [backbone.generate_merged((9, 8, 7), i, 12) for i in (1, 2, 3)]
    assert outputs["last_admitted"][0] != outputs["per_request"][0]
