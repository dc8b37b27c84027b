"""The same engine on several tensor-parallel ranks: every rank generates the tokens of the merged models.

With fewer slots than adapters, so that adapters move in and out while requests run; on GPUs beside the steps.
"""

import pytest
import torch

from punica.engine import Engine, EngineConfig
from punica.parallel import spawn_tensor_parallel
from tests.parallel.progress import told
from tests.world import Backbone, Wish

SLOTS = 3


def engine_of(backbone: Backbone, device: str, sharded: bool = False, **sizes) -> Engine:
    config = EngineConfig(**{"max_batch_size": 8, "max_model_len": 64, **sizes})
    lora = config.lora_config(16, max_loras=SLOTS, fully_sharded_loras=sharded)
    return Engine(backbone.model(device, torch.float32), lora, config, warm_up=False)


def generate(rank: int, backbone: Backbone, wishes: list[Wish], device: str) -> list[tuple[list, int]]:
    """The tokens, and this rank's kv heads, with plain and with fully sharded adapters."""
    found = []
    for sharded in (False, True):
        with told(rank, f"{'fully sharded' if sharded else 'plain'} adapters on {device}"):
            engine = engine_of(backbone, device, sharded)
            found.append((backbone.serve(engine, wishes), engine.runner.model.num_kv_heads))
    return found


def check(backbone: Backbone, wishes: list[Wish], tp_size: int, device: str) -> None:
    if tp_size == 1:
        ranks = [generate(0, backbone, wishes, device)]
    else:
        backend = "gloo" if device == "cpu" else None
        ranks = spawn_tensor_parallel(generate, tp_size, backbone, wishes, device, backend=backend)
    expected = [backbone.generate_merged(*wish) for wish in wishes]
    kv_heads = max(1, backbone.config.num_key_value_heads // tp_size)
    assert ranks == [[(expected, kv_heads)] * 2] * tp_size


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_equal_merged_models(backbone, mixed_wishes, tp_size) -> None:
    check(backbone, mixed_wishes[:8], tp_size, "cpu")


@pytest.mark.gpu
def test_one_gpu_equals_merged_models(backbone, mixed_wishes) -> None:
    check(backbone, mixed_wishes, 1, "cuda")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_on_gpus_equal_merged_models(backbone, mixed_wishes, tp_size) -> None:
    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} GPUs, this machine has {torch.cuda.device_count()}")
    check(backbone, mixed_wishes[:8], tp_size, "cuda")


outlives: list[Engine] = []
"""Engines that are held when their group ends, with their graphs, for which NCCL would wait."""


def generate_with_graphs_and_without(rank: int, backbone: Backbone, wishes: list[Wish]) -> dict:
    """Tokens both ways, and the shapes that this rank captured, in order."""
    found = {}
    for graphs in (False, True):
        with told(rank, "graphs" if graphs else "launched by the host"):
            engine = engine_of(backbone, "cuda", cuda_graphs=graphs)
            found[graphs] = backbone.serve(engine, wishes)
            outlives.append(engine)
    with told(rank, "all graphs"):
        engine.capture_graphs()
    return {"tokens": found, "shapes": [tuple(shape) for shape in engine.runner.graphs._captured]}


@pytest.mark.multi_gpu
def test_graphs_with_collectives_generate_what_launched_steps_do_and_end_with_their_group(
    backbone, mixed_wishes, mixed_tokens
) -> None:
    first, second = spawn_tensor_parallel(generate_with_graphs_and_without, 2, backbone, mixed_wishes)
    assert first == second
    assert first["tokens"] == {False: mixed_tokens, True: mixed_tokens}
    assert len(first["shapes"]) > 10
