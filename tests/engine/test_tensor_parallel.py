"""The same engine on several tensor-parallel ranks: every rank generates the tokens of the merged models.

With fewer slots than adapters, so that adapters move in and out while requests run; on GPUs beside the steps.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from punica.adapters import LoRARequest
from punica.engine import Engine, EngineConfig, Request
from punica.parallel import spawn_tensor_parallel
from tests.parallel.progress import told
from tests.world import Backbone, Wish, finish

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


def generate_beside_damage(rank: int, backbone: Backbone, places: dict[str, list]) -> dict:
    """Each rank has its own disk: the folders of an adapter are what `places` says for it."""
    engine = engine_of(backbone, "cpu", max_batch_size=4)
    good, refused, failed = backbone.ask(engine, "good", [5, 6], 1, 12), {}, {}
    for number, (name, paths) in enumerate(places.items(), start=10):
        try:
            failed[name] = engine.add_request(Request(name, [1, 2], 4, LoRARequest(name, number, str(paths[rank]))))
        except (OSError, ValueError) as error:
            refused[name] = str(error)
    later = backbone.ask(engine, "later", [7, 8], 3, 5)
    finish(engine)
    return {
        "served": [good.output_token_ids, later.output_token_ids], "refused": refused,
        "failed": {name: state.error for name, state in failed.items()},
    }  # fmt: skip


@pytest.mark.slow
def test_a_folder_that_one_rank_cannot_read_fails_on_all_and_only_its_requests(backbone, tmp_path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(backbone.adapters[2].lora_path, tmp_path / name))

    whole, cut, poisoned, wide = (copy(name) for name in ("whole", "cut", "poisoned", "wide"))
    weights = whole / "adapter_model.safetensors"
    (cut / weights.name).write_bytes(weights.read_bytes()[:-100])
    infinite = {name: tensor * float("inf") for name, tensor in load_file(weights).items()}
    save_file(infinite, poisoned / weights.name, metadata={"format": "pt"})  # the others' header
    (wide / "adapter_config.json").write_text('{"r": 99, "lora_alpha": 1, "target_modules": ["q_proj"]}')
    places = {
        "missing here": [whole, tmp_path / "nowhere"],
        "cut there": [cut, whole],
        "poisoned here": [whole, poisoned],
        "poisoned there": [poisoned, whole],
        "another config": [whole, wide],
    }
    first, second = spawn_tensor_parallel(generate_beside_damage, 2, backbone, places, backend="gloo")
    assert first == second
    assert first["served"] == [backbone.generate_merged((5, 6), 1, 12), backbone.generate_merged((7, 8), 3, 5)]
    assert set(first["refused"]) == {"missing here", "cut there", "another config"}
    assert set(first["failed"]) == {"poisoned here", "poisoned there"}
    for rank, name, reason in (
        (1, "missing here", "does not exist"),
        (0, "cut there", "not a valid safetensors file"),
        (1, "another config", "rank 99 exceeds"),
        (1, "poisoned here", "contains NaN or inf"),
        (0, "poisoned there", "contains NaN or inf"),
    ):
        text = (first["refused"] | first["failed"])[name]
        assert all(part in text for part in (f"rank {rank} of 2", repr(name), reason)), text
