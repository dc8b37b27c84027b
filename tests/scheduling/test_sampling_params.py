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
    ("fields", "greedy"),
    [({"top_k": 1, "temperature": 1.0}, True), ({"temperature": 1e-9}, True), ({"top_p": 0.5}, True),
     ({"temperature": 1e-5}, False), ({"repetition_penalty": 1.1}, False), ({"presence_penalty": -2}, False),
     ({"frequency_penalty": 0.7}, False), ({"logit_bias": {5: -3.5}}, False), ({"bad_words": [[33]]}, False),
     ({"min_tokens": 9}, False),  # load generators ask for as many as they get: no token is to be banned
     ({"min_tokens": 9, "ignore_eos": True}, True),
     ({"min_tokens": 9, "ignore_eos": True, "stop_token_ids": [3]}, False)],
    ids=str,
)  # fmt: skip
def test_what_is_greedy(fields, greedy) -> None:
    assert SamplingParams(**fields).is_greedy == greedy


RANGES = {
    "max_new_tokens": [0], "temperature": [-1, -1e-9, float("nan"), 10**400], "top_p": [0, 1.5], "min_p": [-0.1],
    "repetition_penalty": [0], "top_k": [0], "seed": [-1, 2**64], "logprobs": [21], "stop_token_ids": [range(65)],
    "min_tokens": [-1, 17], "presence_penalty": [2.1], "frequency_penalty": [-3], "n": [0, 129],
    "logit_bias": [dict.fromkeys(range(1025), 1)],
}  # fmt: skip
TYPES = {
    "max_new_tokens": [True, torch.tensor(True), 2.0], "temperature": ["hot", False], "stop_token_ids": ["ab", 3],
    "ignore_eos": [1], "skip_special_tokens": [None], "frequency_penalty": ["much"], "logit_bias": [[1, 2]],
}  # fmt: skip
MISTAKES = [
    *(({name: value}, error, name) for error, values in ((ValueError, RANGES), (TypeError, TYPES))
      for name, several in values.items() for value in several),
    ({"stop_token_ids": [3, -1]}, ValueError, r"stop_token_ids\[1\] is -1"),
    ({"stop": [""]}, ValueError, r"stop\[0\] has 0 characters"),
    ({"stop": ["x" * 5000]}, ValueError, r"stop\[0\] has 5000 characters"),
    ({"stop": [b"x"]}, TypeError, r"stop\[0\] must be a str, got bytes"),
    ({"stop": ["a\udfff"]}, ValueError, r"stop\[0\] .*U\+DFFF at character 1"),
    ({"logit_bias": {3: 101}}, ValueError, r"logit_bias\[3\] is 101.0"),
    ({"logit_bias": {3: float("nan")}}, ValueError, r"logit_bias\[3\] .*nan"),
    ({"logit_bias": {-3: 1}}, ValueError, "logit_bias is -3"),
    ({"logit_bias": {"a": 1}}, TypeError, "logit_bias must be an int"),
    ({"bad_words": [""]}, ValueError, r"bad_words\[0\] has 0 characters"),
    ({"bad_words": ["a", []]}, ValueError, r"bad_words\[1\] is empty"),
    ({"bad_words": [[1, -1]]}, ValueError, r"bad_words\[0\]\[1\] is -1"),
    ({"bad_words": [3]}, TypeError, r"bad_words\[0\] must be a list, got int"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes(fields, error, message) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**fields)


def test_a_number_stands_for_greedy_tokens() -> None:
    assert as_sampling_params(np.int32(5)) == SamplingParams(5)
    assert as_sampling_params(SamplingParams(3, 1.0)) == SamplingParams(3, 1.0)
    with pytest.raises(TypeError, match="params must be a SamplingParams or a number of new tokens, got str 'x'"):
        as_sampling_params("x")
