"""An engine under a default device is built and runs on the devices that are named, not on that one."""

import torch

from punica.engine import Engine, EngineConfig
from punica.models import LlamaForCausalLM
from tests.world import tokens_of

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]


def test_random_weights_under_a_default_device(backbone) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(backbone.folder)
        model.init_random_weights(3)
        engine = Engine(model, None, EngineConfig(max_model_len=64))
        tokens = tokens_of(engine.generate(PROMPTS, None, 5))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    plain = LlamaForCausalLM(backbone.folder)
    plain.init_random_weights(3)
    assert tokens == tokens_of(Engine(plain, None, EngineConfig(max_model_len=64)).generate(PROMPTS, None, 5))


def test_adapters_under_a_default_device(backbone) -> None:
    with torch.device("meta"):
        engine = backbone.engine(block_size=2, num_blocks=40, max_loras=2)
        tokens = tokens_of(engine.generate(PROMPTS, [backbone.adapters[1], None, backbone.adapters[3]], 5))
    expected = zip(PROMPTS, (1, 0, 3), strict=True)
    assert tokens == [backbone.generate_merged(tuple(prompt), adapter_id, 5) for prompt, adapter_id in expected]
