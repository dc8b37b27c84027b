"""Prompts in, results out: `generate`, `stream`, and what requests may ask for."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from punica.adapters import LoRARequest
from punica.engine import Engine, EngineConfig, SamplingParams
from punica.engine.pretrained import GenerationDefaults
from tests.world import are_served, byte_tokenizer, finish, tokens_of

PROMPT = (5, 6, 7)
SAMPLED = SamplingParams(12, temperature=1.2, top_p=0.95, seed=11)


@pytest.fixture
def talker(backbone) -> Engine:
    """An engine with a tokenizer whose bytes are the first 256 ids, all of the vocabulary."""
    return backbone.engine(tokenizer=byte_tokenizer())


def test_results_say_what_happened_and_steps_give_the_same(backbone) -> None:
    engine = backbone.engine()
    (result,) = engine.generate([PROMPT], backbone.adapters[1], 5)
    assert result.token_ids == backbone.generate_merged(PROMPT, 1, 5)
    assert (result.prompt_token_ids, result.finish_reason, result.error) == (PROMPT, "length", None)
    assert (result.text, result.logprobs) == (None, None)
    assert result.arrival_s < result.first_token_s < result.last_token_s
    state = backbone.ask(engine, "a", PROMPT, 0, 2)
    engine.step()
    with pytest.raises(RuntimeError, match="'a' has not ended"):
        engine.result_of(state)
    assert [result] != list(engine.step().finished) == [engine.result_of(state)]
    assert are_served(backbone, state)


def test_one_adapter_and_one_length_for_all_or_one_each(backbone) -> None:
    engine, prompts = backbone.engine(), [[1, 2], [3], [4, 5]]
    one = tokens_of(engine.generate(prompts, backbone.adapters[2], np.int64(4)))
    assert one == [backbone.generate_merged(prompt, 2, 4) for prompt in prompts]
    each = tokens_of(engine.generate(prompts, [backbone.adapters[2], None, backbone.adapters[3]], [4, None, SAMPLED]))
    assert each[0] == one[0]
    assert each[1] == backbone.generate_merged((3,), 0, 16)
    assert len(each[2]) == 12


def test_numbers_of_other_libraries(backbone) -> None:
    engine = Engine(backbone.model(), None, EngineConfig(np.int32(4), np.int64(8), torch.tensor(64)))
    expected = [backbone.generate_merged(PROMPT, 0, 6)]
    for prompt in (np.array(PROMPT), torch.tensor(PROMPT), [np.uint8(token) for token in PROMPT], iter(PROMPT)):
        assert tokens_of(engine.generate([prompt], None, torch.tensor(6))) == expected


def test_requests_without_a_seed_differ_and_repeat_with_the_engine(backbone) -> None:
    params = SamplingParams(12, temperature=1.5)
    runs = [
        tokens_of(backbone.engine(seed=seed).generate([PROMPT] * 3, None, params)) for seed in (0, 0, 1)
    ]  # fmt: skip
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


def test_logprobs_are_those_of_transformers(backbone) -> None:
    params = SamplingParams(6, temperature=0.9, seed=2, logprobs=4)
    (result,) = backbone.engine().generate([PROMPT], None, params)
    reference = transformers.LlamaForCausalLM.from_pretrained(backbone.folder).eval()
    with torch.inference_mode():
        logits = reference(torch.tensor([[*PROMPT, *result.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    for found, row, token in zip(result.logprobs, logits.log_softmax(-1), result.token_ids, strict=True):
        assert set(found) == {token, *row.topk(4).indices.tolist()}
        assert all(abs(float(row[one]) - value) < 1e-3 for one, value in found.items())


@pytest.mark.parametrize(
    ("model_ends", "fields", "ended"),
    [
        (True, {}, True), (True, {"ignore_eos": True}, False), (False, {"stop_token_ids": [0]}, False),
        (False, {"ignore_eos": True, "stop_token_ids": ["end"]}, True), (True, {"stop_token_ids": [0]}, True),
    ],
    ids=["model's end", "ignored", "another stop", "own stop", "both"],
)  # fmt: skip
def test_end_tokens_of_the_model_and_of_the_request(backbone, model_ends, fields, ended) -> None:
    tokens = backbone.generate_merged(PROMPT, 2, 12)
    end = tokens[2]
    stops = [end if one == "end" else one for one in fields.get("stop_token_ids", ())]
    engine = backbone.engine(defaults=GenerationDefaults((255, end) if model_ends else ()))
    params = SamplingParams(12, **{**fields, "stop_token_ids": stops})
    (result,) = engine.generate([PROMPT], backbone.adapters[2], params)
    assert result.finish_reason == ("stop" if ended else "length")
    assert result.token_ids == (tokens[: tokens.index(end) + 1] if ended else tokens)


def test_a_stop_string_ends_a_request_and_its_text(backbone, talker) -> None:
    (free,) = talker.generate([PROMPT], backbone.adapters[3], 30)
    stop = next(letter for letter in free.text if letter.isprintable() and letter != free.text[0])
    (ended,) = talker.generate([PROMPT], backbone.adapters[3], SamplingParams(30, stop=["never there", stop]))
    assert ended.finish_reason == "stop"
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
    assert len(ended.token_ids) < 30


def test_stream_brings_what_generate_brings(backbone, talker) -> None:
    prompts, adapters = [[1, 2], PROMPT, [9]], [backbone.adapters[1], None, backbone.adapters[3]]
    params = [3, SAMPLED, SamplingParams(9, stop="\n")]
    wanted = talker.generate(prompts, adapters, params)
    chunks = list(talker.stream(prompts, adapters, params))
    for index, result in enumerate(wanted):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert list(itertools.chain.from_iterable(chunk.token_ids for chunk in mine)) == result.token_ids
        assert "".join(chunk.text for chunk in mine) == result.text == mine[-1].result.text
        assert [chunk.result is None for chunk in mine] == [True] * (len(mine) - 1) + [False]
        assert len(mine) >= len(result.token_ids)
    firsts = [next(i for i, chunk in enumerate(chunks) if chunk.index == index) for index in range(3)]
    assert max(firsts) < len(chunks) - 1  # they come side by side


def test_streams_in_turn_and_one_that_is_given_up(backbone) -> None:
    engine = backbone.engine()
    one, other = engine.stream([PROMPT], None, 12), engine.stream([[1], [2]], backbone.adapters[1], 5)
    given_up = engine.stream([[3]], None, 40)
    next(given_up)
    tokens: dict[str, list[int]] = {"one": [], "other": []}
    for first, second in itertools.zip_longest(one, other):
        for name, chunk in (("one", first), ("other", second)):
            if chunk is not None and chunk.index == 0:
                tokens[name] += chunk.token_ids
    assert tokens == {"one": backbone.generate_merged(PROMPT, 0, 12), "other": backbone.generate_merged((1,), 1, 5)}
    assert engine.has_unfinished()
    given_up.close()
    assert not engine.has_unfinished()
    finish(engine)


@pytest.mark.parametrize("bad_at", [1, 6], ids=["first token", "last token"])
def test_a_tokenizer_error_in_a_stream_fails_its_request_only(backbone, talker, monkeypatch, bad_at) -> None:
    """A token that the tokenizer raises on, which only decoding reads."""
    prompts, new = [PROMPT, [9]], 6
    clean = talker.generate(prompts, None, new)
    poison, decode = clean[0].token_ids[bad_at - 1], talker.codec.decode
    at = clean[0].token_ids.index(poison)
    assert poison not in clean[1].token_ids

    def chokes(token_ids, **options) -> str:
        if poison in token_ids:
            raise KeyError(poison)
        return decode(token_ids, **options)

    monkeypatch.setattr(talker.codec, "decode", chokes)
    chunks = list(talker.stream(prompts, None, new))
    bad, good = ([chunk for chunk in chunks if chunk.index == index] for index in (0, 1))
    assert good[-1].result.token_ids == clean[1].token_ids
    assert "".join(chunk.text for chunk in good) == clean[1].text
    result = bad[-1].result
    assert (result.finish_reason, result.error) == ("failed", f"KeyError: {poison}")
    assert result.token_ids == clean[0].token_ids[: at + 1]
    assert list(itertools.chain.from_iterable(chunk.token_ids for chunk in bad)) == result.token_ids
    assert "".join(chunk.text for chunk in bad[:-1]) == decode(clean[0].token_ids[:at]).rstrip("\ufffd")
    assert (bad[-1].text, result.text) == (None, None)
    finish(talker)
    monkeypatch.undo()
    assert talker.generate(prompts, None, new)[0].token_ids == clean[0].token_ids


@pytest.mark.parametrize("when", ["on arrival", "later"])
def test_a_failing_adapter_fails_its_own_prompts_within_one_call(backbone, tmp_path, monkeypatch, when) -> None:
    folder = Path(shutil.copytree(backbone.adapters[2].lora_path, tmp_path / "adapter"))
    broken, engine = LoRARequest("broken", lora_path=folder), backbone.engine()
    file = folder / "adapter_model.safetensors"
    if when == "on arrival":
        file.write_bytes(b"damaged")
    else:
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: (file.write_bytes(b"damaged"), step())[1])
    prompts, adapters = [PROMPT] * 4, [backbone.adapters[1], broken, None, broken]
    good, bad, plain, bad_too = engine.generate(prompts, adapters, 6)
    assert good.token_ids == backbone.generate_merged(PROMPT, 1, 6)
    assert plain.token_ids == backbone.generate_merged(PROMPT, 0, 6)
    for result in (bad, bad_too):
        assert (result.finish_reason, result.token_ids, result.text) == ("failed", [], None)
        assert "'broken'" in result.error
    chunks = list(engine.stream(prompts, adapters, 6))
    assert {chunk.index for chunk in chunks if chunk.result and chunk.result.error} == {1, 3}
    assert not engine.has_unfinished()


def test_a_progress_bar_on_request(backbone, capsys) -> None:
    engine = backbone.engine()
    engine.generate([PROMPT] * 3, None, 4)
    assert capsys.readouterr().err == ""
    engine.generate([PROMPT] * 3, None, 4, progress=True)
    assert "3/3" in (shown := capsys.readouterr().err)
    assert "tokens=12" in shown


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("abc",), ValueError, "no tokenizer"), (([{"role": "user", "content": "abc"}],), ValueError, "no tokenizer"),
        ((None,), TypeError, "prompts must be a list"), ((b"text",), TypeError, "prompts must be a list"),
        (([[1]], 3), TypeError, "adapters must be a list"), (([[1]], "sql"), TypeError, "adapters must be a list"),
        (([[1]], None, 2.5), TypeError, "params must be a list"), (([5, 6],), TypeError, "a token id"),
        ((torch.tensor([5, 6]),), TypeError, r"prompts\[0\] is .*a token id"),
        (([[1], [2]], [None]), ValueError, "got 2 prompts, 1 adapters, 2 params"),
        (([[1], [2]], None, [1, 2, 3]), ValueError, "got 2 prompts, 2 adapters, 3 params"),
    ],
    ids=str,
)  # fmt: skip
def test_calls_that_are_refused(backbone, arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        backbone.engine().generate(*arguments)


def test_names_that_others_have_taken(backbone) -> None:
    engine = backbone.engine()
    backbone.ask(engine, "generate-0", [1], 0, 2)
    assert tokens_of(engine.generate([PROMPT], None, 3)) == [backbone.generate_merged(PROMPT, 0, 3)]
