"""The same engine on two tensor-parallel ranks (gloo): every rank generates the tokens of the merged models."""

from pathlib import Path

import pytest

from punica.adapters import LoRARequest
from punica.engine import Engine, EngineConfig
from punica.models import LlamaForCausalLM
from punica.parallel import spawn_tensor_parallel


def generate(rank: int, folder: Path, prompts: list, adapters: list[LoRARequest | None], new: list[int]) -> list:
    model = LlamaForCausalLM(folder)
    assert model.num_kv_heads == 1  # of two: the model is split
    model.load_weights(folder)
    config = EngineConfig(max_batch_size=8, max_model_len=64)
    return Engine(model, config.lora_config(16), config).generate(prompts, adapters, new)


@pytest.mark.slow
def test_two_ranks_equal_merged_models(backbone, mixed_wishes) -> None:
    wishes = mixed_wishes[:8]
    prompts, new = [wish.prompt for wish in wishes], [wish.new for wish in wishes]
    adapters = [backbone.adapters.get(wish.adapter_id) for wish in wishes]
    ranks = spawn_tensor_parallel(generate, 2, backbone.folder, prompts, adapters, new, backend="gloo")
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in wishes]
    assert ranks == [expected, expected]
