"""Speculation: several tokens a step, the same as without; by drafts that are right, wrong or both."""

from random import Random

import pytest
import torch

from punica.cluster.runner import Runner
from punica.engine import Engine, EngineConfig, Request
from punica.engine.runner import ModelRunner
from punica.engine.speculation import verified
from punica.scheduling import ADMISSION_RULES, BlockManager, RequestState, SamplingParams, Scheduler
from punica.scheduling.layout import Span, StepLayout
from punica.scheduling.lookup import look_up
from tests.engine.test_random_runs import drafts_of
from tests.world import VOCAB, Backbone, adapter_of_the_ends, byte_tokenizer, finish, write_backbone

STEM = tuple(range(60, 72))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Backbone:
    return write_backbone(tmp_path_factory.mktemp("speculation"), tokenizer=byte_tokenizer(), vocab_size=VOCAB)


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


def test_a_tokenizer_that_raises_at_an_accepted_token(world, monkeypatch) -> None:
    tokens, engine = world.generate_merged(STEM, 1, 8), world.engine(speculate=7, tokenizer=byte_tokenizer())
    engine.scheduler.draft = lambda request, most: tokens[request.num_generated :][:most]
    state = world.ask(engine, "a", STEM, 1, SamplingParams(8, stop=("zzz",), ignore_eos=True))
    engine.step()
    monkeypatch.setattr(state.text, "append", lambda _: {1: 1, 2: 2, 3: 3, 4: 4}[state.num_generated])
    output = engine.step()
    assert [*output.earlier["a"], output.tokens["a"]] == output.failed[0].token_ids[1:] == tokens[1:5]


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
