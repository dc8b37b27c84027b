"""Random runs with chunks and prefix cache, and without: equal tokens, whatever arrives, leaves and runs out."""

from random import Random

import pytest

from punica.engine import Engine, Request
from punica.engine.runner import ModelRunner
from punica.scheduling import RequestStatus, SamplingParams

STEMS = [tuple(range(start, start + 24)) for start in (10, 60, 110)]


@pytest.fixture(scope="module")
def plain(backbone) -> Engine:
    return backbone.engine(max_batch_size=1)


def random_request(backbone, chance: Random, name: str, states: list) -> Request:
    """A prompt that begins as others do, or is the next turn of one that ended; seeded: numbers of arrival differ."""
    ended = [state for state in states if state.status is RequestStatus.FINISHED and state.num_tokens < 34]
    if ended and chance.random() < 0.3:
        before = chance.choice(ended)
        prompt, adapter = before.token_ids, before.adapter
    else:
        prompt = [*chance.choice(STEMS)[: chance.randint(1, 20)]]
        adapter = backbone.adapters.get(chance.choice((0, 0, 1, 2, 4)))
    prompt += [chance.randrange(3) for _ in range(chance.randint(0, 4))]
    wishes = {"max_new_tokens": chance.randint(1, 9), "seed": chance.randrange(99)}
    wishes |= {} if chance.random() < 0.7 else {"temperature": 0.8}
    wishes |= {} if chance.random() < 0.8 else {"repetition_penalty": 1.3}
    wishes |= {} if chance.random() < 0.8 else {"stop_token_ids": chance.sample(range(256), 8)}
    wishes |= {} if chance.random() < 0.8 else {"logprobs": 1}
    return Request(name, prompt, SamplingParams(**wishes), adapter, chance.choice(("", "", "salt")))


def check_blocks(engine: Engine) -> None:
    """Blocks are counted as they are owned, and no running request has one that another computes at the moment."""
    tables = [engine.blocks.block_table(owner) for owner in engine.blocks.owners()]
    owned = {block for table in tables for block in table}
    assert engine.blocks.num_free == engine.blocks.num_blocks - len(owned)
    for state in engine.scheduler.running:
        table, size = engine.blocks.block_table(state.request_id), engine.blocks.block_size
        last = table[(state.num_tokens - 1) // size : -(-state.num_tokens // size)]
        assert all(sum(block in other for other in tables) == 1 for block in last if state is engine.scheduler.partial)


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 200))])
def test_random_runs(backbone, plain: Engine, monkeypatch, seed: int) -> None:
    chance = Random(seed)
    monkeypatch.setattr(ModelRunner, "works_ahead", chance.random() < 0.7)
    size = chance.choice((1, 2, 4, 16))
    sizes = {"block_size": size, "max_batch_size": chance.choice((2, 4)), "max_loras": chance.choice((1, 2, 5))}
    sizes |= {"num_blocks": max(60 // size, -(-44 // size))} if chance.random() < 0.7 else {}
    cached, chunked = chance.choice(((True, True), (True, False), (False, True)))
    sizes |= (
        {"admission": "chunked", "prefill_chunk": chance.choice((1, 3, 8, 40))}
        if chunked
        else {"admission": chance.choice(("fcfs", "fcfs_many", "resident_first", "single_adapter"))}
    )
    engine, states = backbone.engine(prefix_cache=cached, max_model_len=64, **sizes), []
    for cache in (*engine.runner.attention.cache.keys, *engine.runner.attention.cache.values):
        cache.fill_(float("nan"))
    while len(states) < 14 or engine.has_unfinished():
        for _ in range(chance.randrange(3) if len(states) < 14 else 0):
            states.append(engine.add_request(random_request(backbone, chance, f"{len(states)}", states)))
        if chance.random() < 0.06 and engine.scheduler.running:
            engine.abort_request(chance.choice(engine.scheduler.running).request_id)
        if chance.random() < 0.06:
            engine.forget_next()
        backbone.step_or_fail(engine, chance, monkeypatch)
        check_blocks(engine)
    ended = [state for state in states if state.status is not RequestStatus.ABORTED]
    assert {state.status for state in ended} == {RequestStatus.FINISHED}
    prompts, adapters, params = zip(*((s.prompt_token_ids, s.adapter, s.params) for s in ended), strict=True)
    expected = plain.generate(list(prompts), list(adapters), list(params))
    for state, result in zip(ended, expected, strict=True):
        assert (state.output_token_ids, state.finish_reason) == (result.token_ids, result.finish_reason)
        assert len(state.logprobs) == len(result.logprobs or ())
    assert engine.blocks.num_free == engine.blocks.num_blocks
