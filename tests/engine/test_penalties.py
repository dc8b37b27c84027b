"""Adjusted scores are those of a slow reference in floats and of transformers' processors, in mixed batches."""

from typing import Any

import pytest
import torch

from punica.engine import Engine, Request, SamplingParams
from punica.engine.pretrained import GenerationDefaults
from punica.engine.sampler import adjust_scores, choose_tokens
from tests.engine.test_prompt_forms import talker_with
from tests.engine.test_sampler import state
from tests.world import byte_tokenizer, tokens_of

VOCAB, ENDS = 53, (7, 50)  # the ends of `state`
OUTPUTS = [(), (5,), (40, 2, 40, 40, 5), (17, 33, 17, 33)]
SETTINGS = {
    "presence": {"presence_penalty": 1.5}, "presence, encouraged": {"presence_penalty": -2},
    "frequency": {"frequency_penalty": 0.7}, "both": {"presence_penalty": 0.4, "frequency_penalty": -0.9},
    "bias": {"logit_bias": {5: -3.5, 40: 100, 52: 2}}, "one bad word": {"bad_words": [[33]]},
    "bad words": {"bad_words": [[40], [60], [17, 33], [5, 40, 2], [33, 17, 33, 9], list(range(1, 13))]},
    "fewest": {"min_tokens": 4}, "repetition": {"repetition_penalty": 1.8},
    "all": {"presence_penalty": 1, "frequency_penalty": 0.3, "logit_bias": {40: 6, 7: 90}, "bad_words": [[40, 5]],
            "min_tokens": 5, "repetition_penalty": 0.7},
}  # fmt: skip


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(4)) * 3


def reference(row: list[float], request: Any) -> list[float]:
    """The definition, one token after another."""
    params, tokens = request.params, request.token_ids
    output = tokens[len(tokens) - request.num_generated :]
    scores = []
    for token, given in enumerate(row):
        score = given + dict(params.logit_bias).get(token, 0.0)
        if len(output) < params.min_tokens and token in ENDS:
            score = -torch.inf
        for word in params.bad_words:
            if word[-1] == token and (len(word) == 1 or tuple(tokens[-len(word) + 1 :]) == word[:-1]):
                score = -torch.inf
        if token in tokens:
            score = score * params.repetition_penalty if score < 0 else score / params.repetition_penalty
        if token in output:
            score -= params.presence_penalty + params.frequency_penalty * output.count(token)
        scores.append(score)
    return scores


def test_a_mixed_batch_equals_the_reference() -> None:
    requests = [
        state(SamplingParams(9, **fields), output=output)
        for output in OUTPUTS for fields in (*SETTINGS.values(), {}, {"temperature": 1.0})
    ]  # fmt: skip
    scores = logits_of(len(requests))
    expected = torch.tensor([reference(row.tolist(), one) for row, one in zip(scores, requests, strict=True)])
    adjust_scores(scores, requests)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    greedy = choose_tokens(logits_of(len(requests)), requests)
    drawn = [request.params.temperature > 0 for request in requests]
    best = expected.argmax(-1)
    assert all(drawn[row] or int(greedy[row]) == int(best[row]) for row in range(len(requests)))


def test_plain_greedy_requests_keep_their_path() -> None:
    """No table is made and nothing but the argmax decides, also beside requests that are adjusted."""
    best = torch.tensor([3, 4])
    assert choose_tokens(logits_of(2), [state(SamplingParams()), state(SamplingParams(logprobs=2))], best) is best
    found = choose_tokens(logits_of(2), [state(SamplingParams()), state(SamplingParams(presence_penalty=1))], best)
    assert int(found[0]) == 3


# --- in the engine ---------------------------------------------------------------------------------------------------


def test_tokens_of_a_batch_are_those_of_the_reference(backbone) -> None:
    settings = [
        {"presence_penalty": 2.0, "frequency_penalty": 1.0}, {"logit_bias": {9: 20.0}, "frequency_penalty": 2.0}, {},
        {"bad_words": [[9], [4, 5]], "repetition_penalty": 1.5}, {"presence_penalty": -2.0},
    ]  # fmt: skip
    params, prompts = [SamplingParams(10, **fields) for fields in settings], [[4, 4, number] for number in range(5)]
    model, wanted = backbone._merged_model(0), []
    for prompt, one in zip(prompts, params, strict=True):
        request = state(one)
        request.token_ids = list(prompt)
        for request.num_generated in range(10):
            with torch.inference_mode():
                row = model(torch.tensor([request.token_ids])).logits[0, -1]
            request.token_ids.append(int(torch.tensor(reference(row.tolist(), request)).argmax()))
        wanted.append(request.token_ids[3:])
    assert wanted[0] != backbone.generate_merged(prompts[0], 0, 10)
    assert tokens_of(backbone.engine().generate(prompts, None, params)) == wanted


@pytest.mark.parametrize("kind", ["model's end", "stop token"])
def test_no_end_before_the_fewest_tokens(backbone, kind) -> None:
    free = backbone.generate_merged((5, 6, 7), 2, 12)
    end = free[2]
    engine = backbone.engine(defaults=GenerationDefaults((end,) if kind == "model's end" else ()))
    stops = () if kind == "model's end" else (end,)
    for fewest in (0, 2, 3, 6):
        params = SamplingParams(12, stop_token_ids=stops, min_tokens=fewest)
        (result,) = engine.generate([[5, 6, 7]], backbone.adapters[2], params)
        assert end not in result.token_ids[: max(fewest, 2)]
        assert len(result.token_ids) >= fewest
        if fewest <= 2:
            assert result.token_ids == free[:3]


def test_no_stop_string_before_the_fewest_tokens(talker) -> None:
    (free,) = talker.generate([[5, 6]], None, 20)
    letters = [place for place, token in enumerate(free.token_ids) if token < 94]
    place, last = letters[0], max(letters)
    for fewest in (0, place + 1, place + 2, 19):
        params = SamplingParams(20, stop=tuple({letter(talker, free, one) for one in (place, last)}), min_tokens=fewest)
        (result,) = talker.generate([[5, 6]], None, params)
        stops = [one for one in letters if letter(talker, free, one) in params.stop and one + 1 >= fewest]
        assert len(result.token_ids) == (stops[0] + 1 if stops else 20)
        assert "".join(chunk.text for chunk in talker.stream([[5, 6]], None, params)) == result.text


def letter(engine: Engine, result: Any, place: int) -> str:
    return engine.codec.decode([result.token_ids[place]])


@pytest.fixture
def talker(backbone) -> Engine:
    return talker_with(backbone, byte_tokenizer())


def test_bad_words_as_text_and_as_tokens(talker) -> None:
    (free,) = talker.generate([[5, 6]], None, 20)
    place = next(one for one, token in enumerate(free.token_ids) if token < 94)
    word, pair = letter(talker, free, place), free.token_ids[place : place + 2]
    (result,) = talker.generate([[5, 6]], None, SamplingParams(20, bad_words=[word]))
    assert word not in result.text
    assert result.token_ids[:place] == free.token_ids[:place]
    (result,) = talker.generate([[5, 6]], None, SamplingParams(20, bad_words=[pair]))
    assert result.token_ids[: place + 1] == free.token_ids[: place + 1]
    assert result.token_ids[place + 1] != free.token_ids[place + 1]


def test_special_tokens_stay_in_the_text_if_asked(backbone, talker) -> None:
    (free,) = talker.generate([[5, 6]], None, 12)
    place = next(one for one, token in enumerate(free.token_ids) if token < 94)
    tokenizer = byte_tokenizer()
    text = tokenizer.convert_ids_to_tokens(free.token_ids[place])
    tokenizer.add_special_tokens({"additional_special_tokens": [text]})
    engine = talker_with(backbone, tokenizer)
    hidden, shown = engine.generate([[5, 6]] * 2, None, [12, SamplingParams(12, skip_special_tokens=False)])
    assert shown.text == engine.codec.decode(free.token_ids, keeps_special=True) != hidden.text
    assert text in shown.text


def test_several_outputs_of_each_prompt(backbone) -> None:
    engine = backbone.engine()
    params = SamplingParams(8, temperature=1.3, seed=5, n=3)
    results = engine.generate([[1, 2], [3]], [backbone.adapters[1], None], [params, 8])
    assert [tuple(one.prompt_token_ids) for one in results] == [(1, 2)] * 3 + [(3,)]
    for place in range(3):
        alone = SamplingParams(8, temperature=1.3, seed=5 + place)
        assert tokens_of(engine.generate([[1, 2]], backbone.adapters[1], alone)) == [results[place].token_ids]
    assert len({tuple(one.token_ids) for one in results}) == 4
    found: dict[int, list[int]] = {}
    for chunk in engine.stream([[1, 2], [3]], [backbone.adapters[1], None], [params, 8]):
        found.setdefault(chunk.index, []).extend(chunk.token_ids)
    assert [found[index] for index in range(4)] == [one.token_ids for one in results]
    unseeded = engine.generate([[1, 2]], None, SamplingParams(8, temperature=1.5, n=2))
    assert unseeded[0].token_ids != unseeded[1].token_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {256: 1}}, "logit_bias .* 256, the vocabulary has 256 ids"),
        ({"bad_words": [[1, 300]]}, "bad_words .* 300"),
        ({"bad_words": ["x"]}, "no tokenizer"),
        ({"n": 2}, "n=2"),
    ],
)
def test_refused_on_arrival(backbone, fields, message) -> None:
    engine = backbone.engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request(Request("one", [1], SamplingParams(4, **fields)))
    assert not engine.has_unfinished()
