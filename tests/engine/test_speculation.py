"""Speculation: several tokens a step, the same as without; by drafts that are right, wrong or both."""

from random import Random

import pytest
import torch

from punica.cluster.runner import Runner
from punica.engine import Engine, EngineConfig, Request
from punica.engine.runner import ModelRunner
from punica.engine.speculation import verified
from punica.parallel import spawn_tensor_parallel
from punica.scheduling import ADMISSION_RULES, BlockManager, RequestState, RequestStatus, SamplingParams, Scheduler
from punica.scheduling.layout import Span, StepLayout
from punica.scheduling.lookup import look_up
from tests.engine.test_activated_lora import INVOCATIONS, activated
from tests.world import VOCAB, Backbone, adapter_of_the_ends, byte_tokenizer, finish, write_backbone

STEM = tuple(range(60, 72))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Backbone:
    return write_backbone(tmp_path_factory.mktemp("speculation"), tokenizer=byte_tokenizer(), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def plain(world) -> Engine:
    return world.engine(tokenizer=byte_tokenizer())


def drafts_of(known: dict[str, list[int]], right: float, chance: Random, looked_up: float = 0.0):
    """Drafts of the tokens that a request will have, each right by chance; or the look-up's; or fewer, beside those."""

    def draft(request: RequestState, most: int) -> tuple[int, ...]:
        if chance.random() < looked_up:
            return look_up(request, most)
        ahead = known[request.request_id][request.num_generated :][: chance.randint(0, most) if looked_up else most]
        return tuple(one if chance.random() < right else chance.randrange(VOCAB) for one in ahead)

    return draft


def random_request(world, chance: Random, name: str, slots: int) -> Request:
    prompt = [*(STEM * 2)[: chance.randint(1, 16)], *(chance.randrange(VOCAB) for _ in range(chance.randint(0, 3)))]
    params = {"max_new_tokens": chance.randint(1, 16), "seed": chance.randrange(99)}
    stops = {"stop": [chr(code) for code in chance.sample(range(33, 120), 9)]}
    wishes = [{"temperature": 0.8}, {"repetition_penalty": 1.3, "frequency_penalty": 0.2}, {"logprobs": 2}, stops]
    for wish in (*wishes, {"stop_token_ids": chance.sample(range(256), 12)}, {"min_tokens": 1}):
        params |= wish if chance.random() < 0.2 else {}
    mixture = {world.adapters[1]: 0.5, world.adapters[2]: 0.25} if slots > 1 else None
    adapters = (None, mixture, *(world.adapters[number] for number in (1, 2, 4)))
    return Request(name, prompt, SamplingParams(**params), chance.choice(adapters))


def random_engine(world, chance: Random, drafts: int) -> Engine:
    """An engine whose cache holds NaN."""
    size = chance.choice((1, 2, 4, 16))
    sizes = {"block_size": size, "max_batch_size": chance.choice((1, 2, 4)), "max_loras": chance.choice((1, 2, 5))}
    sizes |= {"num_blocks": max(60 // size, -(-40 // size))} if chance.random() < 0.7 else {}
    rule = chance.choice(("fcfs", "fcfs_many", "chunked", "resident_first", "static_mixed"))
    sizes |= {"prefill_chunk": chance.choice((3, 8))} if rule == "chunked" else {}
    sizes |= {"prefix_cache": rule != "static_mixed" and chance.random() < 0.5}
    engine = world.engine(rule, speculate=drafts, max_model_len=48, tokenizer=byte_tokenizer(), **sizes)
    for cache in (*engine.runner.attention.cache.keys, *engine.runner.attention.cache.values):
        cache.fill_(float("nan"))
    return engine


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 200))])
def test_random_runs_have_the_tokens_of_an_engine_without(world, plain: Engine, monkeypatch, seed: int) -> None:
    """With preemptions, swapped adapters, stops, penalties, prefix cache, chunks, aborts and steps that fail."""
    chance = Random(seed)
    monkeypatch.setattr(ModelRunner, "works_ahead", chance.random() < 0.5)
    drafts = chance.choice((1, 2, 4, 7))
    engine = random_engine(world, chance, drafts)
    requests = [random_request(world, chance, f"{i}", engine.manager.lora_slots) for i in range(6)]
    prompts, adapters, params = zip(*((r.prompt_token_ids, r.adapter, r.params) for r in requests), strict=True)
    expected = dict(zip(map(str, range(6)), plain.generate(prompts, adapters, params), strict=True))
    known = {name: result.token_ids for name, result in expected.items()}
    right, looked_up = chance.choice((0.0, 0.7, 1.0)), chance.choice((0.2, 1.0))
    engine.scheduler.draft = drafts_of(known, right, chance, looked_up)
    states, seen = [], {}
    while requests or engine.has_unfinished():
        for _ in range(min(len(requests), chance.randrange(3))):
            states.append(engine.add_request(requests.pop()))
        running = [state for state in states if state.status is RequestStatus.RUNNING]
        if chance.random() < 0.04 and running:
            engine.abort_request(chance.choice(running).request_id)
        if chance.random() < 0.05:
            engine.forget_next()
        if (output := world.step_or_fail(engine, chance, monkeypatch)) is None:
            continue
        for name, token in output.tokens.items():
            seen.setdefault(name, []).extend((*output.earlier.get(name, ()), token))
        done = output.statistics
        assert done.num_accepted_tokens <= done.num_drafted_tokens <= drafts * done.batch_size
    for state in states:
        result = expected[state.request_id]
        if state.status is RequestStatus.ABORTED:
            assert state.output_token_ids == result.token_ids[: state.num_generated]
            continue
        found = engine.result_of(state)
        assert seen[state.request_id] == found.token_ids == result.token_ids
        assert (found.text, found.finish_reason) == (result.text, result.finish_reason)
        assert [list(one) for one in found.logprobs or ()] == [list(one) for one in result.logprobs or ()]
    assert engine.blocks.num_free == engine.blocks.num_blocks


def run(engine: Engine, *requests: Request, right: float = 1.0) -> tuple[list[RequestState], list]:
    """Serve requests with drafts of the tokens that they have without, which stay; return states and statistics."""
    most, engine.scheduler.most_drafts = engine.scheduler.most_drafts, 0
    first, steps = [engine.add_request(request) for request in requests], []
    finish(engine)
    engine.scheduler.most_drafts, known = most, {state.request_id: state.output_token_ids for state in first}
    engine.scheduler.draft = drafts_of(known, right, Random(0))
    states = [engine.add_request(request) for request in requests]
    while engine.has_unfinished():
        steps.append(engine.step().statistics)
    assert {state.request_id: state.output_token_ids for state in states} == known
    return states, steps


def test_look_up() -> None:
    for tokens, expected in (
        ([1, 2, 3, 9, 1, 2, 3], (9, 1, 2, 3, 9, 1)),
        ([5, 1, 2, 7, 8, 1, 2, 9, 1, 2], (9, 1, 2, 9, 1, 2)),  # the latest
        ([0, 4, 1, 2, 7, 9, 1, 2, 8, 4, 1, 2], (7, 9, 1, 2, 8, 4)),  # more equal tokens before
        ([3, 3], ()),
        ([1, 2, 4, 3, 2], ()),  # one token is too little
        ([0xD800, 0x10FFFF, 0, 0xD800, 0x10FFFF], (0, 0xD800, 0x10FFFF) * 2),
    ):
        for split in range(1, len(tokens) + 1):  # of prompt and output, whose text grows
            state = RequestState(Request("a", tokens[:split], 99))
            look_up(state, 6)
            state.output_token_ids += tokens[split:]
            assert look_up(state, 6) == expected


def test_drafts_save_steps_and_none_is_past_the_last_token(world) -> None:
    _, steps = run(world.engine(speculate=3), Request("a", STEM, 12, world.adapters[2]))
    counts = [(one.num_prefill_tokens, one.num_drafted_tokens, one.num_accepted_tokens) for one in steps]
    assert counts == [(12, 0, 0), (0, 3, 3), (0, 3, 3), (0, 2, 2)], "a prompt, then 4, 4 and 3 tokens"


def test_no_step_is_launched_ahead_of_the_tokens_of_one_with_drafts(world, monkeypatch) -> None:
    """Not even of its last but one."""
    monkeypatch.setattr(ModelRunner, "works_ahead", True)
    _, steps = run(world.engine("fcfs_many", speculate=3), *(Request(name, STEM, 3) for name in "ab"), right=0.0)
    assert [step.num_drafted_tokens for step in steps] == [0, 2, 0]


def test_tokens_end_before_a_row_that_holds_nan() -> None:
    request = RequestState(Request("a", STEM, 9))
    layout = StepLayout((request,), (Span(0, 4, 15, (0,)),), (-1,), [], [], [], 4, drafts={request: (1, 2, 3)})
    for best, further in (([1, 2, 3, 4], [2, 3, 4]), ([1, 2, 9, 4], [2, 9]), ([1, -1, 3, 4], []), ([7, 2, 3, 4], [])):
        assert [token for token, _ in verified(layout, best, {}).further.get(request, [])] == further


def test_a_stop_among_accepted_tokens_ends_the_output(world) -> None:
    tokens = world.generate_merged(STEM, 1, 12)
    stop = next(place for place in range(2, 6) if tokens[place] not in tokens[:place])
    engine = world.engine(speculate=7)
    engine.scheduler.draft = lambda request, most: tokens[request.num_generated :][:most]
    ends = SamplingParams(12, stop_token_ids=[tokens[stop]], ignore_eos=True)
    chunks = [chunk.token_ids for chunk in engine.stream([STEM], world.adapters[1], ends)]
    assert chunks == [tokens[:1], tokens[1 : stop + 1]]


def test_a_tokenizer_that_raises_at_an_accepted_token(world, monkeypatch) -> None:
    tokens, engine = world.generate_merged(STEM, 1, 8), world.engine(speculate=7, tokenizer=byte_tokenizer())
    engine.scheduler.draft = lambda request, most: tokens[request.num_generated :][:most]
    state = world.ask(engine, "a", STEM, 1, SamplingParams(8, stop=("zzz",), ignore_eos=True))
    engine.step()
    monkeypatch.setattr(state.text, "append", lambda _: {1: 1, 2: 2, 3: 3, 4: 4}[state.num_generated])
    output = engine.step()
    assert [*output.earlier["a"], output.tokens["a"]] == output.failed[0].token_ids[1:] == tokens[1:5]


def test_drafts_that_raise_lose_no_prompt(world, monkeypatch) -> None:
    engine = world.engine(speculate=3)
    states = [world.ask(engine, f"{i}", STEM, i, 8) for i in range(2)]
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler, "draft", lambda *_: {}["a draft"])
        with pytest.raises(KeyError):
            engine.step()
    assert states[1].status is RequestStatus.WAITING
    finish(engine)
    assert [state.output_token_ids for state in states] == [world.generate_merged(STEM, i, 8) for i in range(2)]


def test_who_gets_drafts(world) -> None:
    """None whose tokens are drawn or adjusted; others do beside the rows of prompts."""
    engine, asked, steps = world.engine("chunked", speculate=2, prefill_chunk=4), set(), []
    engine.scheduler.draft = lambda request, most: asked.add((request.request_id, most)) or (1,)
    for name, wish in {"greedy": {}, "drawn": {"temperature": 1.0}, "penalised": {"presence_penalty": 1.0}}.items():
        engine.add_request(Request(name, STEM, SamplingParams(9, ignore_eos=True, **wish)))
    world.ask(engine, "last", STEM, 0, 2)
    while engine.has_unfinished():
        done = engine.step().statistics
        steps.append((done.num_prefill_tokens, done.num_drafted_tokens))
    assert asked == {("greedy", 1), ("greedy", 2)}, "nothing can follow the last token but one"
    assert steps[:5] == [(4, 0), (4, 0), (4, 0), (4, 1), (4, 1)]


@pytest.mark.parametrize(
    ("num_blocks", "max_tokens", "expected"),
    [(6, 16, [(0, 0), (3, 3)]), (7, 16, [(4, 0), (3, 3)]), (99, 16, [(7, 7)] * 2), (99, 13, [(7, 4)] * 2)],
)
def test_drafts_have_the_blocks_and_rows_that_others_leave(num_blocks, max_tokens, expected) -> None:
    """Two requests of 8 tokens and more, in blocks of 4."""
    scheduler = Scheduler(ADMISSION_RULES.get("fcfs_many")(), BlockManager(num_blocks, 4), 2, 16, most_drafts=7)
    scheduler.draft = lambda request, most: (1,) * most
    for name in "ab":
        scheduler.add(RequestState(Request(name, STEM[:7], 20)))
    states = scheduler.schedule().prefills
    scheduler.max_tokens, found = max_tokens, []
    for _ in expected:
        for state in states:
            state.append(3)
        plan = scheduler.schedule()
        found.append(tuple(len(plan.drafts.get(state, ())) for state in states))
    assert (found, plan.preempted) == (expected, ())


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_registered_blocks_hold_tokens_that_were_generated(world, right) -> None:
    engine = world.engine(speculate=4, prefix_cache=True, block_size=2)
    (state,), _ = run(engine, Request("a", STEM, 20, world.adapters[1]), right=right)
    cached, ids = {entry[1] for entry in engine.blocks._entries}, state.token_ids
    assert cached == {tuple(ids[at : at + 2]) for at in range(0, len(cached) * 2, 2)}
    (again,), _ = run(engine, Request("b", ids, 8, world.adapters[1]), right=right)
    assert again.hit >= 24
    assert again.output_token_ids == world.generate_merged(tuple(ids), 1, 8)


def test_a_draft_that_holds_nan_spoils_no_request(world) -> None:
    engine = world.engine(speculate=3)
    embedding = engine.runner.model.model.embed_tokens
    getattr(embedding, "base_layer", embedding).weight.data[VOCAB - 1] = float("nan")
    engine.scheduler.draft = lambda request, most: (VOCAB - 1,) * most
    states = [world.ask(engine, f"{i}", STEM, i, 8) for i in (1, 2)]
    bad = world.ask(engine, "bad", [VOCAB - 1, 3], 0, 8)
    assert {name for name, result in finish(engine).items() if result.error} == {"bad"}
    assert [state.output_token_ids for state in states] == [world.generate_merged(STEM, i, 8) for i in (1, 2)]
    assert not states[0].may_draft
    assert "NaN" in bad.error


def test_activated_adapters(world, tmp_path) -> None:
    adapters = [activated(world, tmp_path, number, invocation) for number, invocation in INVOCATIONS.items()]
    requests = [Request(f"{i}", (*STEM, 5, 6, 7, 8, 8, 9, 1, *STEM), 10, one) for i, one in enumerate(adapters)]
    _, steps = run(world.engine(speculate=3), *requests, right=0.7)
    assert sum(step.num_accepted_tokens for step in steps) > 5


def _on_a_rank(_: int, world: Backbone) -> tuple[list[list[int]], int]:
    states, steps = run(world.engine(speculate=3), *(Request(f"{i}", STEM, 9, world.adapters.get(i)) for i in range(4)))
    return [state.output_token_ids for state in states], sum(step.num_accepted_tokens for step in steps)


@pytest.mark.slow
def test_tensor_parallel_ranks_accept_alike(world) -> None:
    expected = [world.generate_merged(STEM, i, 9) for i in range(4)]
    assert spawn_tensor_parallel(_on_a_rank, 2, world, backend="gloo") == [(expected, 4 * 6)] * 2


def test_refusals(world) -> None:
    batch, rule = ({"batch_invariant": True}, {"adapter_index_rule": "last_admitted"})
    for match, count, sizes in (("-1", -1, {}), ("at most 31", 32, {}), ("=False", 1, batch), ("per_request", 1, rule)):
        with pytest.raises(ValueError, match=match):
            world.engine(speculate=count, **sizes)
    with pytest.raises(ValueError, match="speculate"):
        Runner(lambda: world.engine(speculate=2), lambda key: None)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(world, tmp_path, graphs) -> None:
    """The warm-up captures all graphs but those for adapters of embedding and head."""
    config = EngineConfig(max_batch_size=6, max_model_len=64, speculate=5, cuda_graphs=graphs)
    engine = Engine(world.model("cuda", torch.float32), config.lora_config(16), config)
    captured = graphs and engine.runner.graphs.statistics.graphs
    requests = [Request(f"{i}", STEM[: 3 + i], 4 + 3 * i, world.adapters.get(i)) for i in range(7)]
    states, steps = run(engine, *requests, right=0.8)
    expected = [world.generate_merged(STEM[: 3 + i], i, 4 + 3 * i) for i in range(7)]
    assert [state.output_token_ids for state in states] == expected
    assert sum(step.num_accepted_tokens for step in steps) > 20
    assert captured == (graphs and engine.runner.graphs.statistics.graphs)
    ends, _ = adapter_of_the_ends(world, tmp_path)
    run(engine, *(Request(f"ends{i}", STEM[i:], 9, ends) for i in range(3)))
