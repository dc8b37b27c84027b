"""The same engine on several tensor-parallel ranks: every rank generates the tokens of the merged models.

With fewer slots than adapters, so that adapters move in and out while requests run; on GPUs beside the steps.
"""

from pathlib import Path

import pytest
import torch

from punica.adapters import LoRARequest
from punica.engine import Engine, EngineConfig
from punica.models import LlamaForCausalLM
from punica.parallel import spawn_tensor_parallel
from tests.engine.helpers import tokens_of

SLOTS = 3


def generate(
    rank: int,
    folder: Path,
    prompts: list,
    adapters: list[LoRARequest | None],
    new: list[int],
    device: str,
    sharded: bool,
) -> tuple[list, int]:
    """The tokens, and this rank's kv heads."""
    model = LlamaForCausalLM(folder, device=device)
    model.load_weights(folder)
    config = EngineConfig(max_batch_size=8, max_model_len=64)
    lora = config.lora_config(16, max_loras=SLOTS, fully_sharded_loras=sharded)
    return tokens_of(Engine(model, lora, config).generate(prompts, adapters, new)), model.num_kv_heads


def check(backbone, wishes: list, tp_size: int, device: str, sharded: bool) -> None:
    prompts, new = [wish.prompt for wish in wishes], [wish.new for wish in wishes]
    adapters = [backbone.adapters.get(wish.adapter_id) for wish in wishes]
    arguments = (backbone.folder, prompts, adapters, new, device, sharded)
    if tp_size == 1:
        ranks = [generate(0, *arguments)]
    else:
        ranks = spawn_tensor_parallel(generate, tp_size, *arguments, backend="gloo" if device == "cpu" else None)
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in wishes]
    kv_heads = max(1, backbone.config.num_key_value_heads // tp_size)
    assert ranks == [(expected, kv_heads)] * tp_size


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fully sharded"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_equal_merged_models(backbone, mixed_wishes, tp_size, sharded) -> None:
    check(backbone, mixed_wishes[:8], tp_size, "cpu", sharded)


@pytest.mark.gpu
def test_one_gpu_equals_merged_models(backbone, mixed_wishes) -> None:
    check(backbone, mixed_wishes, 1, "cuda", sharded=False)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fully sharded"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_on_gpus_equal_merged_models(backbone, mixed_wishes, tp_size, sharded) -> None:
    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} GPUs, this machine has {torch.cuda.device_count()}")
    check(backbone, mixed_wishes[:8], tp_size, "cuda", sharded)
