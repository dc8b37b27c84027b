"""Sampling parameters: what is accepted, what is normalised, one clear error for each mistake."""

import dataclasses

import numpy as np
import pytest
import torch

from punica.scheduling import SamplingParams, as_sampling_params


def test_default_is_greedy_and_frozen() -> None:
    params = SamplingParams()
    assert (params.max_new_tokens, params.is_greedy, params.logprobs) == (16, True, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_numbers_of_other_libraries_become_numbers() -> None:
    params = SamplingParams(
        np.int64(7), np.float32(0.5), torch.tensor(3), torch.tensor(0.5), seed=np.uint64(2**64 - 1),
        stop_token_ids=torch.tensor([4, 5]), stop="end",
    )  # fmt: skip
    assert params == SamplingParams(7, 0.5, 3, 0.5, seed=2**64 - 1, stop_token_ids=[4, 5], stop=["end"])
    assert type(params.max_new_tokens) is int
    assert params.stop_token_ids == (4, 5)


def test_adjustments_are_normalised_and_comparable() -> None:
    params = SamplingParams(logit_bias={np.int64(9): 1, 2: -3}, bad_words="no", min_tokens=np.int32(2))
    assert (params.logit_bias, params.bad_words, params.min_tokens) == (((2, -3.0), (9, 1.0)), ("no",), 2)
    again = dataclasses.replace(params, max_new_tokens=5)
    assert dataclasses.replace(again, max_new_tokens=16) == params
    assert hash(params) == hash(SamplingParams(logit_bias=[(9, 1), (2, -3)], bad_words=["no"], min_tokens=2))
    assert SamplingParams(logit_bias=None) == SamplingParams(logit_bias={}) == SamplingParams()


def test_choices_count_their_seeds_up() -> None:
    params = SamplingParams(temperature=1.0, seed=2**64 - 1, n=2)
    assert [(one.n, one.seed) for one in params.choices()] == [(1, 2**64 - 1), (1, 0)]
    assert [one.seed for one in SamplingParams(temperature=1.0, n=3).choices()] == [None] * 3
    assert SamplingParams().choices() == [SamplingParams()]


@pytest.mark.parametrize(
    "params", [{"top_k": 1, "temperature": 1.0}, {"temperature": 0}, {"temperature": 1e-9}, {"top_p": 0.5}], ids=str
)
def test_what_is_greedy(params) -> None:
    assert SamplingParams(**params).is_greedy


@pytest.mark.parametrize("params", [{"temperature": 1e-5}, {"repetition_penalty": 1.1}], ids=str)
def test_what_is_not_greedy(params) -> None:
    assert not SamplingParams(**params).is_greedy


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens must be an int, got bool True"),
        ({"max_new_tokens": torch.tensor(True)}, TypeError, "must be an int, got Tensor"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an int, got float"),
        ({"temperature": -1}, ValueError, "temperature is -1.0"),
        ({"temperature": -1e-9}, ValueError, "temperature is -1e-09"),
        ({"temperature": float("nan")}, ValueError, "temperature is nan"),
        ({"temperature": 10**400}, ValueError, "temperature is inf"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got str"),
        ({"temperature": False}, TypeError, "temperature must be a number, got bool"),
        ({"top_p": 0}, ValueError, "top_p is 0.0"),
        ({"top_p": 1.5}, ValueError, "top_p is 1.5"),
        ({"min_p": -0.1}, ValueError, "min_p is -0.1"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty is 0.0"),
        ({"top_k": 0}, ValueError, "top_k is 0.*None switches it off"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"seed": 2**64}, ValueError, "seed is 18446744073709551616, must be at most"),
        ({"logprobs": 21}, ValueError, "logprobs is 21, must be at most 20"),
        ({"stop_token_ids": [3, -1]}, ValueError, r"stop_token_ids\[1\] is -1"),
        ({"stop_token_ids": "ab"}, TypeError, "stop_token_ids must be a list, got str"),
        ({"stop_token_ids": 3}, TypeError, "stop_token_ids must be a list, got int"),
        ({"stop_token_ids": range(65)}, ValueError, "stop_token_ids has 65 entries"),
        ({"stop": [""]}, ValueError, r"stop\[0\] has 0 characters"),
        ({"stop": ["x" * 5000]}, ValueError, r"stop\[0\] has 5000 characters"),
        ({"stop": [b"x"]}, TypeError, r"stop\[0\] must be a str, got bytes"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos must be a bool, got int 1"),
        ({"skip_special_tokens": None}, TypeError, "skip_special_tokens must be a bool"),
        ({"min_tokens": -1}, ValueError, "min_tokens is -1"),
        ({"min_tokens": 17}, ValueError, "min_tokens is 17, must be at most max_new_tokens, 16"),
        ({"presence_penalty": 2.1}, ValueError, r"presence_penalty is 2.1, must be in \[-2, 2\]"),
        ({"frequency_penalty": -3}, ValueError, r"frequency_penalty is -3.0, must be in \[-2, 2\]"),
        ({"frequency_penalty": "much"}, TypeError, "frequency_penalty must be a number"),
        ({"logit_bias": {3: 101}}, ValueError, r"logit_bias\[3\] is 101.0, must be in \[-100, 100\]"),
        ({"logit_bias": {3: float("nan")}}, ValueError, r"logit_bias\[3\] is nan"),
        ({"logit_bias": {-3: 1}}, ValueError, "a token id of logit_bias is -3"),
        ({"logit_bias": {"a": 1}}, TypeError, "a token id of logit_bias must be an int"),
        ({"logit_bias": [1, 2]}, TypeError, "logit_bias must be a dict of token ids and biases, got list"),
        ({"logit_bias": {token: 1 for token in range(1025)}}, ValueError, "logit_bias has 1025 entries"),
        ({"bad_words": [""]}, ValueError, r"bad_words\[0\] has 0 characters"),
        ({"bad_words": ["a", []]}, ValueError, r"bad_words\[1\] is empty"),
        ({"bad_words": [[1, -1]]}, ValueError, r"bad_words\[0\]\[1\] is -1"),
        ({"bad_words": [3]}, TypeError, r"bad_words\[0\] must be a list, got int"),
        ({"bad_words": ["\ud800"]}, ValueError, r"bad_words\[0\] has the lone surrogate U\+D800"),
        ({"stop": ["a\udfff"]}, ValueError, r"stop\[0\] has the lone surrogate U\+DFFF at character 1"),
        ({"n": 0}, ValueError, "n is 0"),
        ({"n": 129}, ValueError, "n is 129, must be at most 128"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_mistakes(fields, error, message) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**fields)


def test_a_number_stands_for_greedy_tokens() -> None:
    assert as_sampling_params(np.int32(5)) == SamplingParams(5)
    assert as_sampling_params(SamplingParams(3, 1.0)) == SamplingParams(3, 1.0)
    with pytest.raises(TypeError, match="params must be a SamplingParams or a number of new tokens, got str 'x'"):
        as_sampling_params("x")
