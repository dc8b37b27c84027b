"""Checkpoint, adapters and right tokens that the conformance test writes."""

import json

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from experiments.conformance.world import COUNT, PREFIX, WARMER, World, leaked, loaded


@torch.inference_mode()
def test_right_tokens_are_those_of_models_merged_by_hand(world: World) -> None:
    for tenant in world.models[1:3]:
        model = LlamaForCausalLM.from_pretrained(world.folder / "checkpoint", dtype=torch.float64)
        tensors = load_file(world.adapter(tenant) / "adapter_model.safetensors")
        config = json.loads((world.adapter(tenant) / "adapter_config.json").read_text())
        for key, weight in model.named_parameters():
            name = f"base_model.model.{key.removesuffix('.weight')}.lora_"
            if f"{name}A.weight" in tensors:
                change = tensors[f"{name}B.weight"].double() @ tensors[f"{name}A.weight"].double()
                weight.data += config["lora_alpha"] / config["r"] * change
        for prompt in [*world.sure(tenant)[:2], world.sure(tenant, shares=True)[0]]:
            ids = list(prompt.ids)
            for _ in range(COUNT):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            assert tuple(ids[len(prompt.ids) :]) == prompt.answers[tenant]


@torch.inference_mode()
def test_sure_tokens_survive_16_bits_and_unsure_ones_were_left_out(world: World) -> None:
    model = LlamaForCausalLM.from_pretrained(world.folder / "checkpoint", dtype=torch.float16)
    for prompt in world.sure("base"):
        whole = torch.tensor([prompt.ids + prompt.answers["base"]])
        assert tuple(model(whole).logits[0, -COUNT - 1 : -1].argmax(-1).tolist()) == prompt.answers["base"]
    assert any("base" not in prompt.sure for prompt in world.prompts)


def test_sure_tokens_are_one_models_and_leaks_show(world: World) -> None:
    full = {name: loaded(world, name) for name in world.models}
    sharing = [prompt for prompt in world.prompts if len(prompt.ids) > PREFIX]
    for prompt in world.prompts:
        for model in prompt.sure:
            assert list(prompt.answers.values()).count(prompt.answers[model]) == 1
    for model in world.models[2:]:
        found = leaked(full[model], full[WARMER], torch.tensor([prompt.ids for prompt in sharing])).tolist()
        for prompt, tokens in zip(sharing, map(tuple, found), strict=True):
            assert model not in prompt.sure or tokens != prompt.answers[model]
    assert len({prompt.ids[:PREFIX] for prompt in sharing}) == 1
