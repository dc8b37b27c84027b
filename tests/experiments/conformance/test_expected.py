"""Checkpoint, adapters and right tokens that the conformance test writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from experiments.conformance import expected
from experiments.conformance.expected import COUNT, PREFIX, World, read
from experiments.harness.schema import ConfigError


@torch.inference_mode()
def test_right_tokens_are_those_of_models_merged_by_hand(world: World) -> None:
    for tenant in world.tenants[:2]:
        model = LlamaForCausalLM.from_pretrained(world.folder / "checkpoint", dtype=torch.float64)
        tensors = load_file(world.adapter(tenant.name) / "adapter_model.safetensors")
        config = json.loads((world.adapter(tenant.name) / "adapter_config.json").read_text())
        for key, weight in model.named_parameters():
            name = f"base_model.model.{key.removesuffix('.weight')}.lora_"
            if f"{name}A.weight" in tensors:
                change = tensors[f"{name}B.weight"].double() @ tensors[f"{name}A.weight"].double()
                weight.data += config["lora_alpha"] / config["r"] * change
        for prompt in [*world.sure(tenant.name)[:2], world.sure(tenant.name, shares=True)[0]]:
            ids = list(prompt.ids)
            for _ in range(COUNT):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            assert tuple(ids[len(prompt.ids) :]) == prompt.answers[tenant.name]


@torch.inference_mode()
def test_sure_tokens_survive_16_bits_and_unsure_ones_were_left_out(world: World) -> None:
    model = LlamaForCausalLM.from_pretrained(world.folder / "checkpoint", dtype=torch.float16)
    for prompt in world.sure("base"):
        whole = torch.tensor([prompt.ids + prompt.answers["base"]])
        assert tuple(model(whole).logits[0, -COUNT - 1 : -1].argmax(-1).tolist()) == prompt.answers["base"]
    assert any("base" not in prompt.sure for prompt in world.prompts)


def test_sure_tokens_are_one_models_and_leaks_show(world: World) -> None:
    for prompt in world.prompts:
        for model in prompt.sure:
            assert list(prompt.answers.values()).count(prompt.answers[model]) == 1
            assert prompt.leaked.get(model) != prompt.answers[model]
    assert len({prompt.ids[:PREFIX] for prompt in world.prompts if prompt.leaked}) == 1


def test_the_margin_decides(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("SAFETY", 1e6), ("LENGTHS", (5,)), ("PER_LENGTH", 2), ("SHARING", 2)):
        monkeypatch.setattr(expected, name, value)
    with pytest.raises(ConfigError, match=r"base is sure of 0 prompts and 0 .* seed="):
        expected.make(tmp_path, 2, [1, 2], 0)
    assert not (tmp_path / expected.FILE).exists()


def test_the_file_is_read_as_it_was_written(world: World) -> None:
    assert read(world.folder) == world


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"tenants": [], "prompts": [{"ids": 3}]}'])
def test_a_damaged_file_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / expected.FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"^.* is damaged .*make=$"):
        read(tmp_path)


def test_text_and_ids_of_a_prompt_are_the_same(world: World) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(world.folder / "checkpoint")
    prompt = world.prompts[0]
    assert tuple(tokenizer(prompt.text)["input_ids"]) == prompt.ids
    assert tokenizer.decode(list(prompt.ids)) == prompt.text
