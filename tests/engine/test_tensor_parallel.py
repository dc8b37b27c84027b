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
from punica.models import LlamaForCausalLM
from punica.parallel import spawn_tensor_parallel
from tests.parallel.progress import told
from tests.world import tokens_of

SLOTS = 3


def generate(
    rank: int, folder: Path, prompts: list, adapters: list[LoRARequest | None], new: list[int], device: str
) -> dict[str, tuple[list, int]]:
    """The tokens, and this rank's kv heads, with plain and with fully sharded adapters."""
    found = {}
    for kind in ("plain", "fully sharded"):
        with told(rank, f"{kind} adapters on {device}"):
            model = LlamaForCausalLM(folder, device=device)
            model.load_weights(folder)
            config = EngineConfig(max_batch_size=8, max_model_len=64)
            lora = config.lora_config(16, max_loras=SLOTS, fully_sharded_loras=kind == "fully sharded")
            found[kind] = tokens_of(Engine(model, lora, config).generate(prompts, adapters, new)), model.num_kv_heads
    return found


def check(backbone, wishes: list, tp_size: int, device: str) -> None:
    prompts, new = [wish.prompt for wish in wishes], [wish.new for wish in wishes]
    adapters = [backbone.adapters.get(wish.adapter_id) for wish in wishes]
    arguments = (backbone.folder, prompts, adapters, new, device)
    if tp_size == 1:
        ranks = [generate(0, *arguments)]
    else:
        ranks = spawn_tensor_parallel(generate, tp_size, *arguments, backend="gloo" if device == "cpu" else None)
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in wishes]
    kv_heads = max(1, backbone.config.num_key_value_heads // tp_size)
    assert ranks == [dict.fromkeys(("plain", "fully sharded"), (expected, kv_heads))] * tp_size


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
"""Whoever holds an engine when its group ends holds its graphs, for which NCCL would wait."""


def generate_with_graphs_and_without(
    rank: int, folder: Path, prompts: list, adapters: list[LoRARequest | None], new: list[int], dtype: torch.dtype
) -> dict:
    """Tokens both ways, and the shapes that this rank captured, in order."""
    found = {}
    for graphs in (False, True):
        with told(rank, f"{dtype}, {'graphs' if graphs else 'launched by the host'}"):
            model = LlamaForCausalLM(folder, dtype, "cuda")
            model.load_weights(folder)
            config = EngineConfig(max_batch_size=8, max_model_len=64, cuda_graphs=graphs)
            engine = Engine(model, config.lora_config(16, max_loras=SLOTS), config, warm_up=False)
            found[graphs] = tokens_of(engine.generate(prompts, adapters, new))
            outlives.append(engine)
    with told(rank, "all graphs"):
        engine.capture_graphs()
    return {"tokens": found, "shapes": [tuple(shape) for shape in engine.runner.graphs._captured]}


@pytest.mark.multi_gpu
def test_graphs_with_collectives_generate_what_launched_steps_do_and_end_with_their_group(
    backbone, mixed_wishes
) -> None:
    prompts, new = [wish.prompt for wish in mixed_wishes], [wish.new for wish in mixed_wishes]
    adapters = [backbone.adapters.get(wish.adapter_id) for wish in mixed_wishes]
    arguments = (backbone.folder, prompts, adapters, new, torch.float32)
    first, second = spawn_tensor_parallel(generate_with_graphs_and_without, 2, *arguments)
    assert first == second
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in mixed_wishes]
    assert first["tokens"] == {False: expected, True: expected}
    assert len(first["shapes"]) > 10


def generate_beside_damage(rank: int, folder: Path, adapters: dict[int, LoRARequest], places: dict[str, list]) -> dict:
    """Each rank has its own disk: the folders of an adapter are what `places` says for it."""
    model = LlamaForCausalLM(folder)
    model.load_weights(folder)
    config = EngineConfig(max_batch_size=4, max_model_len=64)
    engine = Engine(model, config.lora_config(16, max_loras=SLOTS), config)
    good = engine.add_request(Request("good", [5, 6], 12, adapters[1]))
    refused, failed = {}, {}
    for number, (name, paths) in enumerate(places.items(), start=10):
        try:
            state = engine.add_request(Request(name, [1, 2], 4, LoRARequest(name, number, str(paths[rank]))))
        except (OSError, ValueError) as error:
            refused[name] = str(error)
        else:
            failed[name] = state
    later = engine.add_request(Request("later", [7, 8], 5, adapters[3]))
    while engine.has_unfinished():
        engine.step()
    return {
        "served": [good.output_token_ids, later.output_token_ids],
        "refused": refused,
        "failed": {name: state.error for name, state in failed.items()},
    }


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
    first, second = spawn_tensor_parallel(
        generate_beside_damage, 2, backbone.folder, backbone.adapters, places, backend="gloo"
    )
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
        assert f"rank {rank} of 2" in text
        assert repr(name) in text
        assert reason in text
