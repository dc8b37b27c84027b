"""Random runs of engines with all that they can do, and one request at a time without: equal results.

Chunks, prefix cache, drafts, steps ahead; few blocks and slots; stops, samples and adjusted scores; mixtures and
activated adapters; requests that leave, steps that fail or are dropped, pins and adapters that are loaded meanwhile;
interrupts at random lines.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType

import pytest

from punica.engine import Engine, Request, StepOutput
from punica.engine.runner import ModelRunner
from punica.scheduling import RequestState, RequestStatus, SamplingParams
from punica.scheduling.lookup import look_up
from tests.engine.test_activated_lora import activated
from tests.world import VOCAB, Backbone, byte_tokenizer, write_backbone

STEMS = [tuple(range(start, start + 12)) * 2 for start in (10, 60, 110)]
INVOCATION = (12, 13)
FAILURES = {
    0: "engine.runner.ModelRunner.launch", 1: "engine.sampler.PendingCopy.tolist",
    2: "scheduling.scheduler.Scheduler._drafts",
}  # fmt: skip
RULES = ("fcfs", "fcfs_many", "chunked", "chunked", "chunked", "resident_first", "single_adapter", "static_mixed")
WISHES = (
    {"temperature": 0.8}, {"repetition_penalty": 1.3, "frequency_penalty": 0.2}, {"presence_penalty": 1.5},
    {"logit_bias": {5: 3.0}}, {"bad_words": [[token, 9] for token in range(0, 256, 3)]}, {"min_tokens": 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Backbone:
    home = tmp_path_factory.mktemp("random")
    made = write_backbone(home, tokenizer=byte_tokenizer(), vocab_size=VOCAB)
    made.adapters[11] = activated(made, home, 11, INVOCATION)
    return made


@pytest.fixture(scope="module")
def plain(world) -> Engine:
    return world.engine(tokenizer=byte_tokenizer(), max_batch_size=1)


def random_engine(world: Backbone, chance: Random) -> Engine:
    """An engine whose cache holds NaN."""
    size, rule = chance.choice((1, 2, 4, 16)), chance.choice(RULES)
    sizes = {"block_size": size, "max_batch_size": chance.choice((1, 2, 4)), "max_loras": chance.choice((1, 2, 3, 5))}
    sizes |= {"num_blocks": max(60 // size, -(-44 // size))} if chance.random() < 0.7 else {}
    sizes |= {"prefill_chunk": chance.choice((1, 3, 8, 40))} if rule == "chunked" else {}
    sizes |= {"prefix_cache": rule != "static_mixed" and chance.random() < 0.6}
    sizes |= {"speculate": chance.choice((1, 2, 4, 7))} if chance.random() < 0.5 else {}
    engine = world.engine(rule, tokenizer=byte_tokenizer(), **sizes)
    spoil(engine)
    return engine


def spoil(engine: Engine) -> None:
    """Write NaN into all blocks that no request owns and that are not found again."""
    size = engine.blocks.block_size
    free = [block * size + place for block, used in enumerate(engine.blocks._used) if not used for place in range(size)]
    for cache in (*engine.runner.attention.cache.keys, *engine.runner.attention.cache.values):
        cache[free] = float("nan")


def random_request(world: Backbone, chance: Random, name: str, states: list[RequestState], slots: int) -> Request:
    """A prompt that begins as others do, or is the next turn of one that ended; seeded: numbers of arrival differ."""
    ended = [state for state in states if state.status is RequestStatus.FINISHED and state.num_tokens < 32]
    if ended and chance.random() < 0.3:
        before = chance.choice(ended)
        prompt, adapter = before.token_ids, before.adapter
    else:
        mixture = {world.adapters[1]: 0.5, world.adapters[2]: 0.25} if slots > 2 else None
        prompt = [*chance.choice(STEMS)[: chance.randint(1, 20)]]
        adapter = chance.choice((None, None, mixture, *(world.adapters[number] for number in (1, 2, 4, 11))))
    prompt += chance.choice(((), INVOCATION[1:], chance.choices(range(VOCAB), k=chance.randint(1, 4))))
    stops = {"stop": [chr(code) for code in chance.sample(range(33, 120), 9)]}
    params = {"max_new_tokens": chance.randint(1, 12), "seed": chance.randrange(99)}
    for wish in (*WISHES, {"logprobs": 2}, stops, {"stop_token_ids": chance.sample(range(256), 10)}):
        params |= wish if chance.random() < 0.15 else {}
    return Request(name, prompt, SamplingParams(**params), adapter, chance.choice(("", "", "salt")))


def drafts_of(known: dict[str, list[int]], right: float, chance: Random, looked_up: float = 0.0):
    """Drafts of the tokens that a request will have, each right by chance; or the look-up's; or fewer, beside those."""

    def draft(request: RequestState, most: int) -> tuple[int, ...]:
        if chance.random() < looked_up:
            return look_up(request, most)
        ahead = known[request.request_id][request.num_generated :][: chance.randint(0, most) if looked_up else most]
        return tuple(one if chance.random() < right else chance.randrange(VOCAB) for one in ahead)

    return draft


def fail(*_: object) -> None:
    raise KeyError


def step_or_fail(engine: Engine, chance: Random, monkeypatch: pytest.MonkeyPatch) -> StepOutput | None:
    """Make a step; None: one that was not planned or launched, or whose tokens could not be read."""
    place = FAILURES.get(chance.randrange(40))
    with monkeypatch.context() as patched:
        if place is not None:
            patched.setattr(f"punica.{place}", fail)
        try:
            return engine.step()
        except KeyError:
            assert place is not None
            return None


def disturb(world: Backbone, engine: Engine, chance: Random) -> None:
    """Do what an owner may do between two steps: abort, drop the step ahead, load or remove an adapter, move a pin."""
    manager, unfinished = engine.manager, [*engine._requests]
    if chance.random() < 0.05 and unfinished:
        engine.abort_request(chance.choice(unfinished))
    if chance.random() < 0.05:
        engine.forget_next()
    if chance.random() < 0.1:
        manager.add_adapter(world.adapters[chance.choice((1, 2, 4, 5))])
    if chance.random() < 0.1:
        manager.remove_adapter(chance.choice(list(world.adapters)))
    if chance.random() < 0.1 and manager.lora_slots in (2, 5):  # a mixture needs two of the others
        for number in [*manager.pinned_adapters]:
            manager.unpin_adapter(number)
        if (number := chance.choice(list(world.adapters))) in manager.list_adapters():
            manager.pin_adapter(number)


def check_state(engine: Engine) -> None:
    """Check that blocks are counted as they are owned, that none is shared that is being computed, and pins."""
    tables = [engine.blocks.block_table(owner) for owner in engine.blocks._tables]
    scheduler = engine.scheduler
    assert engine.blocks._tables.keys() <= {one.request_id for one in (*scheduler.running, *scheduler.leaving)}
    places = [*scheduler.waiting, *scheduler.running, *scheduler.leaving]
    assert all(places.count(request) == 1 for request in engine._requests.values())
    assert engine.blocks.num_free == engine.blocks.num_blocks - len({block for table in tables for block in table})
    assert engine.manager.pinned_adapters <= {*engine.manager.lora_index_to_id}
    if engine.blocks.is_shared:
        assert {len(tokens) for _, tokens, _ in engine.blocks._entries} <= {engine.blocks.block_size}
    if (state := engine.scheduler.partial) is not None:
        table, size = engine.blocks.block_table(state.request_id), engine.blocks.block_size
        last = table[(state.num_tokens - 1) // size : -(-state.num_tokens // size)]
        assert all(sum(block in other for other in tables) == 1 for block in last)


def check_results(engine: Engine, plain: Engine, states: list[RequestState], expected: dict) -> None:
    for state in states:
        result = expected[state.request_id]
        if state.status is RequestStatus.ABORTED:
            assert state.output_token_ids == result.token_ids[: state.num_generated]
            continue
        found = engine.result_of(state)
        assert (found.token_ids, found.text, found.error) == (result.token_ids, result.text, None)
        assert found.finish_reason == result.finish_reason
        for one, other in zip(found.logprobs or (), result.logprobs or (), strict=True):
            assert one == pytest.approx(other, abs=1e-3)


def seeds(fast: int, slow: int) -> pytest.MarkDecorator:
    rest = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(fast, slow))
    return pytest.mark.parametrize("seed", [*range(fast), *rest])


def run(world: Backbone, plain: Engine, chance: Random, step: Callable[[Engine], object]) -> list[RequestState]:
    """Serve random requests by ``step`` on a random engine; check it after each step, and all results."""
    states, expected, known = [], {}, {}
    engine = random_engine(world, chance)
    engine.scheduler.draft = drafts_of(known, chance.choice((0.0, 0.7, 1.0)), chance, chance.choice((0.2, 1.0)))
    while len(states) < 10 or engine.has_unfinished():
        for _ in range(chance.randrange(3) if len(states) < 10 else 0):
            request = random_request(world, chance, f"{len(states)}", states, engine.manager.lora_slots)
            result = plain.generate([request.prompt_token_ids], [request.adapter], [request.params])[0]
            expected[request.request_id], known[request.request_id] = result, result.token_ids
            states.append(engine.add_request(request))
        disturb(world, engine, chance)
        step(engine)
        check_state(engine)
        spoil(engine)
    check_results(engine, plain, states, expected)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert engine.scheduler.partial is None
    assert [*engine.manager._held, *engine._residency._users, *engine._residency._waiting] == []
    return states


@seeds(30, 200)
def test_random_runs(world, plain: Engine, monkeypatch, seed: int) -> None:
    chance, seen = Random(seed), {}
    monkeypatch.setattr(ModelRunner, "works_ahead", chance.random() < 0.6)

    def step(engine: Engine) -> None:
        output = step_or_fail(engine, chance, monkeypatch)
        for name, token in ({} if output is None else output.tokens).items():
            seen.setdefault(name, []).extend((*output.earlier.get(name, ()), token))
        if output is None:
            engine.forget_next()

    states = run(world, plain, chance, step)
    assert seen == {state.request_id: state.output_token_ids for state in states if state.output_token_ids}


@contextmanager
def interrupted(engine: Engine, line: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before that line of the rooms engine and scheduling, if a call of the engine gets so far.

    None in the lock of the engine, nor before the call has begun to change anything or after it has its result.
    """

    def trace(frame: FrameType, event: str, _: object) -> Callable | None:
        nonlocal line
        room = frame.f_globals["__name__"].startswith(("punica.engine", "punica.scheduling"))
        if not room or frame.f_code.co_qualname.startswith("Turns."):
            return None
        line -= event == "line" and engine._is_torn
        if line == 0:
            line = -1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@seeds(6, 60)
def test_interrupted_runs(world, plain: Engine, monkeypatch, seed: int) -> None:
    """Each request is reported once, with the tokens of an undisturbed run; check_state looks for lost blocks."""
    chance, reported = Random(seed), Counter()
    monkeypatch.setattr(ModelRunner, "works_ahead", chance.random() < 0.6)

    def step(engine: Engine, chances: tuple[float, ...] = (0.2, 0.5, 0.0)) -> None:
        """Make a step that may be interrupted, as may be the next call, which mends what is left of it."""
        call = engine.step if chances[0] == 0.2 or chance.random() < 0.5 else engine.forget_next
        try:
            with interrupted(engine, int(10 ** chance.uniform(0, 3.3)) if chance.random() < chances[0] else -1):
                output = call()
        except KeyboardInterrupt:
            step(engine, chances[1:])
        else:
            reported.update(one.request_id for one in ((*output.finished, *output.failed) if output else ()))

    states = run(world, plain, chance, step)
    assert reported == Counter(state.request_id for state in states if state.status is not RequestStatus.ABORTED)
