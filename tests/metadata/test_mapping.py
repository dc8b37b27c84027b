"""Mappings and segments against slow, independent definitions."""

import numpy as np
import pytest
import torch

from punica.metadata import LoRAMapping, compute_meta, convert_mapping


@pytest.mark.parametrize(
    "ids",
    [[3, 0, 7], (3, 0, 7), torch.tensor([3, 0, 7]), np.array([3, 0, 7], dtype=np.uint8), [np.int32(3), 0, 7]],
    ids=["list", "tuple", "tensor", "numpy", "mixed"],
)
def test_mapping_stores_tuples_of_int(ids) -> None:
    mapping = LoRAMapping(ids, ids)
    assert mapping.index_mapping == (3, 0, 7)
    assert {type(i) for i in mapping.index_mapping} == {int}
    assert mapping == LoRAMapping((3, 0, 7), [3, 0, 7])
    assert mapping != LoRAMapping((3, 0, 7), [3, 0, 7], is_prefill=True)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, True], TypeError, r"\[1\].*True"),
        ([1, np.bool_(True)], TypeError, r"\[1\]"),
        ([1.0], TypeError, r"\[0\].*1.0"),
        ([2, None], TypeError, r"\[1\].*None"),
        (torch.tensor([True]), TypeError, r"\[0\]"),
        (5, TypeError, "5"),
        ([4, 0, -1], ValueError, r"\[2\] is -1"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, "1-D"),
    ],
)
def test_bad_ids_raise_with_position_and_value(ids, error, message) -> None:
    with pytest.raises(error, match=f"index_mapping.*{message}"):
        LoRAMapping(ids, (1,))
    with pytest.raises(error, match="prompt_mapping"):
        LoRAMapping((), ids)
    with pytest.raises(TypeError, match="is_prefill"):
        LoRAMapping((1,), (1,), is_prefill=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [0, 1, 1000])
def test_convert_mapping_equals_a_search_per_token(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    slots = [int(i) if i % 5 else None for i in rng.permutation(np.arange(1, 40))]
    choices = [0] + [i for i in slots if i is not None]
    index = rng.choice(choices, size=tokens).tolist()
    prompt = rng.choice(choices, size=tokens // 3).tolist()
    vocab, extra, max_loras = 1000, 8, len(slots) + 1

    mapping = LoRAMapping(index, prompt)
    base, sampler, padded, embeddings, lengths = convert_mapping(mapping, slots, max_loras, vocab, extra, "cpu")

    def slot(adapter: int) -> int:
        return slots.index(adapter) if adapter else -1

    expected = [slot(i) for i in index]
    sampled = [slot(i) for i in prompt]
    assert base.tolist() == expected
    assert sampler.tolist() == sampled
    assert padded.tolist() == [row + len(prompt) * (s if s >= 0 else max_loras - 1) for row, s in enumerate(sampled)]
    assert embeddings[0].tolist() == [max(s, 0) * extra for s in expected]
    assert embeddings[1].tolist() == [max(s, 0) * (vocab + extra) for s in expected]
    assert lengths == [tokens, len(prompt), len(prompt), tokens]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mapping": LoRAMapping((9, 3, 8, 9), (3,))}, ValueError, r"index_mapping.*9 .*0\), 8 .*2.*\[3\]"),
        ({"mapping": LoRAMapping((3,), (3, 5))}, ValueError, r"prompt_mapping.*5 .*1\)"),
        ({"mapping": ((3,), (3,))}, TypeError, "LoRAMapping"),
        ({"lora_index_to_id": [3, 3]}, ValueError, "slots 0 and 1"),
        ({"lora_index_to_id": [3, 0]}, ValueError, r"lora_index_to_id\[1\] is 0"),
        ({"lora_index_to_id": [3, "4"]}, TypeError, r"lora_index_to_id\[1\]"),
        ({"lora_index_to_id": 3}, TypeError, "lora_index_to_id"),
        ({"max_loras": 1}, ValueError, "max_loras is 1.* 2"),
        ({"max_loras": 0, "lora_index_to_id": [], "mapping": LoRAMapping((), ())}, ValueError, "max_loras is 0"),
        ({"vocab_size": 0}, ValueError, "vocab_size is 0"),
        ({"extra_vocab_size": -1}, ValueError, "extra_vocab_size is -1"),
    ],
)  # fmt: skip
def test_convert_mapping_errors(arguments: dict, error: type[Exception], message: str) -> None:
    call = {
        "mapping": LoRAMapping((3, 0), (3,)), "lora_index_to_id": [3, None], "max_loras": 3, "vocab_size": 10,
        "extra_vocab_size": 0, "device": "cpu",
    }  # fmt: skip
    convert_mapping(**call)
    with pytest.raises(error, match=message):
        convert_mapping(**{**call, **arguments})


def test_segments_example() -> None:
    starts, lengths, slots, *rest = compute_meta(torch.tensor([2, 2, 2, -1, -1, 0, 0, 2]))
    assert (starts.tolist(), lengths.tolist(), slots.tolist()) == ([0, 3, 5, 7], [3, 2, 2, 1], [2, -1, 0, 2])
    assert rest == [4, 3, 8, False]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_segments_of_no_tokens_and_of_no_adapter(dtype: torch.dtype) -> None:
    starts, lengths, slots, *rest = compute_meta(torch.empty(0, dtype=dtype))
    assert (starts.numel(), lengths.numel(), slots.numel(), *rest) == (0, 0, 0, 0, 0, 0, True)
    assert compute_meta(torch.full((5,), -1, dtype=dtype))[3:] == (1, 5, 5, True)
    with pytest.raises(ValueError, match=r"\[1\] is -2"):
        compute_meta(torch.tensor([0, -2]))
