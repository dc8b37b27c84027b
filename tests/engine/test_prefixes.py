"""Chunks of prompts and cached prefixes: an engine with them generates the tokens of one without."""

from contextlib import suppress
from unittest.mock import Mock

import pytest

from punica.adapters import LoRAModel, LoRARequest, write_random_adapter
from punica.engine import Engine, EngineConfig, Request
from punica.engine.runner import ModelRunner
from punica.engine.text import GrowingText
from punica.parallel import spawn_tensor_parallel
from punica.scheduling import SamplingParams
from tests.world import are_served, byte_tokenizer, finish, tokens_of

PREFIX = tuple(range(40, 72))


def totals(steps) -> tuple[int, int, int]:
    return tuple(
        sum(getattr(step, name) for step in steps)
        for name in ("num_hit_tokens", "num_missed_tokens", "num_evicted_blocks")
    )


def run(engine: Engine, *requests: Request) -> tuple[list[list[int]], list]:
    states, steps = [engine.add_request(request) for request in requests], []
    while engine.has_unfinished():
        steps.append(engine.step().statistics)
    return [state.output_token_ids for state in states], steps


# --- chunks ---------------------------------------------------------------------------------------------------------


def test_prompts_share_the_rows_of_a_step_and_decode_rows_never_wait(backbone, ahead) -> None:
    engine = backbone.engine("chunked", prefill_chunk=8)
    assert engine.config.max_num_batched_tokens == 8 + 8, "rows staged are bound by the chunk, not by prompts"
    prompts = [PREFIX[:3], PREFIX[:20], PREFIX[5:10], PREFIX[:2]]
    states = [engine.add_request(Request(str(i), p, 6, backbone.adapters.get(i))) for i, p in enumerate(prompts)]
    rows, tokens = [], []
    while engine.has_unfinished() and len(rows) < 20:
        output = engine.step()
        rows.append(output.statistics.num_prefill_tokens)
        tokens.append(sorted(output.tokens))
        engine.manager.add_adapter(backbone.adapters[1])  # so a step launched ahead is planned again, from its pieces
    assert rows[:5] == [8, 8, 8, 6, 0]
    assert tokens[:4] == [["0"], ["0"], ["0", "1"], ["0", "1", "2", "3"]]
    for i, (state, prompt) in enumerate(zip(states, prompts, strict=True)):
        assert state.output_token_ids == backbone.generate_merged(prompt, i, 6)


def test_pieces_of_a_prompt_outlive_errors_of_steps_and_observers(backbone, monkeypatch) -> None:
    engine, launch, launched = backbone.engine("chunked", prefill_chunk=2), ModelRunner.launch, []
    engine.on_step = Mock(side_effect=KeyError("observer"))
    state = engine.add_request(Request("long", PREFIX, 3))

    def often_fails(*given):
        launched.append(given)
        if len(launched) % 4 == 0:
            raise MemoryError
        return launch(*given)

    monkeypatch.setattr(ModelRunner, "launch", often_fails)
    while not state.has_ended and len(launched) < 60:
        with suppress(KeyError, MemoryError):
            engine.step()
    assert state.output_token_ids == backbone.generate_merged(PREFIX, 0, 3)
    engine.on_step = None
    assert [result.request_id for result in engine.step().finished] == ["long"]


def test_a_request_that_cannot_resume_is_not_there(backbone, monkeypatch) -> None:
    engine = backbone.engine(tokenizer=byte_tokenizer(), cuda_graphs=False)
    monkeypatch.setattr(GrowingText, "append", Mock(side_effect=ValueError("no text")))
    with pytest.raises(ValueError, match="no text"):
        engine.add_request(Request("torn", [1, 2], SamplingParams(max_new_tokens=4, stop=["q"])), [77])
    assert not engine.has_unfinished()
    state = engine.add_request(Request("whole", [1, 2], 4))
    engine.forget_next()
    finish(engine)
    assert state.num_generated == 4


@pytest.mark.parametrize(
    ("admission", "sizes"),
    [
        ("chunked", {}), ("fcfs", {"prefill_chunk": 8}), ("static", {"prefix_cache": True}),
        ("fcfs", {"prefix_cache": True, "adapter_index_rule": "last_admitted"}),
        ("chunked", {"prefill_chunk": 127, "batch_invariant": True}),
        ("fcfs", {"prefix_cache": True, "batch_invariant": True, "fp8_kv_cache": True}),
        ("chunked", {"prefill_chunk": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_do_not_fit_each_other(backbone, admission, sizes) -> None:
    with pytest.raises(ValueError, match=r"prefill_chunk|prefix_cache"):
        backbone.engine(admission, **sizes)


# --- prefixes -------------------------------------------------------------------------------------------------------


def test_a_prefix_is_computed_once_for_each_adapter_and_salt(backbone, ahead) -> None:
    engine = backbone.engine(prefix_cache=True, block_size=4)
    hits = []
    for name, adapter_id, salt in (
        ("a", 0, ""),
        ("b", 0, ""),
        ("c", 1, ""),
        ("d", 1, ""),
        ("e", 1, "tenant"),
        ("f", 1, "tenant"),
        ("g", 2, ""),
        ("h", 0, ""),
    ):
        prompt = (*PREFIX[:21], ord(name))
        (tokens,), steps = run(engine, Request(name, prompt, 3, backbone.adapters.get(adapter_id), salt))
        assert tokens == backbone.generate_merged(prompt, adapter_id, 3)
        hits.append(totals(steps)[:2])
    missed, hit = (0, 22), (20, 2)
    assert hits == [missed, hit, missed, hit, missed, hit, missed, hit]


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_calls_share_prefixes_with_those_of_an_equal_salt(backbone, way) -> None:
    engine, hits = backbone.engine(prefix_cache=True, block_size=4), []
    engine.on_step = lambda _, output: hits.append(output.statistics.num_hit_tokens)
    for salt in ("", "a", "a", ""):
        list(getattr(engine, way)([PREFIX[:21]], None, 1, cache_salt=salt))
    assert hits == [0, 0, 20, 20]


def test_turns_of_a_chat_take_what_was_generated(backbone, ahead) -> None:
    engine, prompt = backbone.engine(prefix_cache=True, block_size=4), PREFIX[:6]
    for turn, hit in enumerate((0, 12, 24)):
        (tokens,), steps = run(engine, Request(str(turn), prompt, 7, backbone.adapters[3]))
        assert tokens == backbone.generate_merged(prompt, 3, 7)
        assert totals(steps)[0] == hit
        prompt = (*prompt, *tokens, *PREFIX[turn : turn + 5])


def test_a_prompt_with_one_token_of_answer_is_kept(backbone, monkeypatch) -> None:
    monkeypatch.setattr(ModelRunner, "works_ahead", True)
    engine = backbone.engine(prefix_cache=True, block_size=4)
    for hit in (0, 16):
        _, steps = run(engine, Request("a", PREFIX[:20], 1))
        assert totals(steps)[0] == hit


def test_other_weights_under_the_same_name_never_hit(backbone, tmp_path) -> None:
    """Reloaded between turns, in place and by removal, and while another request waits to join."""
    adapter = LoRARequest("name", 9, str(tmp_path / "adapter"))
    engine, prompt, seen = backbone.engine(prefix_cache=True, block_size=4), PREFIX[:21], []
    for seed in (1, 2, 1, 3):
        write_random_adapter(tmp_path / "adapter", backbone.config, 8, seed)
        again = LoRARequest("name", 9, adapter.lora_path, load_inplace=True)
        outputs, steps = run(engine, Request("a", prompt, 4, again), Request("b", prompt, 4, adapter))
        plain = backbone.engine()
        expected = tokens_of(plain.generate([prompt], [again], 4))
        assert outputs == expected * 2
        seen.append(totals(steps)[0])
    assert seen == [20] * 4, "only the second of two"
    engine.manager.remove_adapter(9)
    write_random_adapter(tmp_path / "adapter", backbone.config, 8, 4)
    _, steps = run(engine, Request("a", prompt, 4, adapter))
    assert totals(steps)[0] == 0
    _, steps = run(engine, Request("a", prompt, 4, adapter))
    assert totals(steps)[0] == 20


def test_a_hit_of_other_weights_than_were_loaded_then_is_given_back(backbone, monkeypatch) -> None:
    engine, prompt = backbone.engine("fcfs_many", prefix_cache=True, block_size=4), PREFIX[:21]
    first = engine.add_request(Request("a", prompt, 2, backbone.adapters[1]))
    finish(engine)
    key_of = engine.scheduler.key_of
    monkeypatch.setattr(
        engine.scheduler, "key_of",
        lambda request, waits: first.prefix_key if request.weights is None else key_of(request, waits),
    )  # fmt: skip
    requests = [Request(name, prompt, 4, backbone.adapters[2]) for name in "bc"]
    states = [engine.add_request(request) for request in requests]
    engine.step()
    assert [*engine.scheduler.waiting] == states, "without a request, in their order"
    _, steps = run(engine)
    assert [state.output_token_ids for state in states] == [backbone.generate_merged(prompt, 2, 4)] * 2
    assert len(steps) == 4


@pytest.mark.parametrize(
    ("admission", "sizes"), [("fcfs_many", {}), ("chunked", {"prefill_chunk": 8})], ids=["joined", "under way"]
)
def test_an_interrupt_while_an_adapter_is_hashed(backbone, monkeypatch, ahead, admission, sizes) -> None:
    """It meets the queue's second request, where the first has joined, or its prompt's next piece is planned."""
    engine = backbone.engine(admission, prefix_cache=True, block_size=4, **sizes)
    engine.manager.add_adapter(backbone.adapters[1])
    first = engine.add_request(Request("a", PREFIX[:13], 5))
    if sizes:
        engine.step()
    second = engine.add_request(Request("b", PREFIX[:9], 5, backbone.adapters[1]))
    with monkeypatch.context() as patched:
        patched.setattr(LoRAModel, "content_hash", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
    finish(engine)
    assert are_served(backbone, first, second)


def test_a_preempted_request_gets_its_blocks_back(backbone) -> None:
    engine = backbone.engine(prefix_cache=True, block_size=2, num_blocks=14)
    outputs, steps = run(engine, *(Request(str(i), [i + 1] * 3, 17, backbone.adapters.get(i)) for i in range(3)))
    assert outputs == [backbone.generate_merged((i + 1,) * 3, i, 17) for i in range(3)]
    assert sum(step.num_preempted for step in steps) > 0
    assert totals(steps)[0] > 0


def test_fp8(backbone) -> None:
    """What is cached is rounded: a hit may differ from a miss, but hits from each other do not."""
    engine = backbone.engine(prefix_cache=True, block_size=4, fp8_kv_cache=True)
    outputs = [run(engine, Request(str(i), PREFIX[:21], 5, backbone.adapters[1]))[0] for i in range(3)]
    assert outputs[1] == outputs[2]


def test_under_batch_invariance_prompts_are_cut_at_tiles_of_the_attention(backbone, monkeypatch) -> None:
    """So sums have one order. What decode rows computed is not taken: a prompt's rows have other bits."""
    monkeypatch.setattr("punica.engine.engine.check_batch_invariant", lambda layers: None)  # of a GPU
    monkeypatch.setattr("punica.engine.config._TILE_TOKENS", 8)
    engine = backbone.engine("chunked", prefix_cache=True, prefill_chunk=12, block_size=4, batch_invariant=True)
    prompts = [PREFIX[:11], PREFIX[:30]]
    outputs, steps = run(engine, *(Request(str(i), prompt, 9) for i, prompt in enumerate(prompts)))
    assert outputs == [backbone.generate_merged(prompt, 0, 9) for prompt in prompts]
    assert [step.num_prefill_tokens for step in steps][:5] == [11, 8, 8, 6, 0]
    turns = [(*prompt, *output, 7, 8) for prompt, output in zip(prompts, outputs, strict=True)]
    outputs, steps = run(engine, *(Request(str(i), prompt, 3) for i, prompt in enumerate(turns)))
    assert outputs == [backbone.generate_merged(prompt, 0, 3) for prompt in turns]
    assert totals(steps)[0] == 8 + 24


def _on_a_rank(rank: int, backbone, expected: dict[str, list[int]]) -> tuple[list, int, int]:
    sizes = {"block_size": 4, "prefill_chunk": 7, "prefix_cache": True, "speculate": 3}
    config = EngineConfig(max_batch_size=4, max_model_len=64, **sizes)
    engine = Engine(backbone.model("cpu"), config.lora_config(16, max_loras=4), config, "chunked", warm_up=False)
    engine.scheduler.draft = lambda request, most: expected[request.request_id][request.num_generated :][:most]
    found, hits, accepted = [], 0, 0
    for _ in range(2):
        requests = [Request(str(i), PREFIX[: 17 + i], 5, backbone.adapters.get(i)) for i in range(4)]
        outputs, steps = run(engine, *requests)
        found.append(outputs)
        hits += totals(steps)[0]
        accepted += sum(step.num_accepted_tokens for step in steps)
    return found, hits, accepted


@pytest.mark.slow
def test_tensor_parallel_ranks_cut_hit_and_accept_alike(backbone) -> None:
    expected = {str(i): backbone.generate_merged(PREFIX[: 17 + i], i, 5) for i in range(4)}
    ranks = spawn_tensor_parallel(_on_a_rank, 2, backbone, expected, backend="gloo")
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == [list(expected.values())] * 2
    assert ranks[0][1] >= 4 * 16
    assert ranks[0][2] > 8
