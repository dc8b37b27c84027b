"""Mixtures of experts in the engine on two ranks, cut (TP) or shared out (EP), with slots in 32 bits and in FP8: every
rank generates the tokens of one rank, which are those of models with the adapters in their weights.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from punica.adapters import LoRARequest
from punica.engine import Engine, EngineConfig
from punica.models import MixtureOfExpertsForCausalLM
from punica.ops.quant import Fp8Matrix
from punica.parallel import spawn_tensor_parallel
from tests.models.moe_world import CONFIGS, factors, greedy, hugging_face, merged, write_per_expert, write_stacked
from tests.parallel.progress import told
from tests.parallel.thread_ranks import on_threads
from tests.world import tokens_of

E4M3 = torch.float8_e4m3fn
NEW = 6
PROMPTS = [[5, 9, 2, 6], [3, 1, 4], [8, 9, 7, 9, 3]]
CASES: dict[str, tuple[str, bool, Any]] = {
    "mixtral, tp": ("mixtral", False, None),
    "mixtral, ep, FP8": ("mixtral", True, E4M3),
    "qwen3, ep": ("qwen3", True, None),
    "qwen3, tp, FP8": ("qwen3", False, E4M3),
}
"""Backbone, whether experts are shared out, slots: each way beside both slots, and both backbones."""


def write_world(folder: Path, name: str) -> None:
    """A model, an adapter per expert and one for all of its experts."""
    theirs = hugging_face(CONFIGS[name])
    theirs.save_pretrained(folder)
    config = theirs.config
    write_per_expert(folder / "0", config, factors(config, 4, 5), 4, 4)
    write_stacked(folder / "1", factors(config, 2, 6), 2, 4)


def wanted(name: str, fp8: Any) -> list[list[int]]:
    """Greedy tokens of the two tenants and of the backbone, through merged weights."""
    theirs = hugging_face(CONFIGS[name])
    models = []
    for rank, seed, scaling in ((4, 5, 1.0), (2, 6, 2.0)):
        layers = factors(theirs.config, rank, seed)
        if fp8 is not None:
            layers = {
                i: {which: tuple(Fp8Matrix.of(w, fp8).real() for w in pair) for which, pair in of_layer.items()}
                for i, of_layer in layers.items()
            }
        models.append(merged(theirs, layers, scaling))
    return [greedy(model, prompt, NEW) for model, prompt in zip([*models, theirs], PROMPTS, strict=True)]


def serve(rank: int, folder: Path, device: str) -> dict[str, list[list[int]]]:
    """Generate on this rank of the current group, case by case."""
    found = {}
    for name, (backbone, shared_out, fp8) in CASES.items():
        with told(rank, name):
            model = MixtureOfExpertsForCausalLM(folder / backbone, device=device, expert_parallel=shared_out)
            model.load_weights(folder / backbone)
            config = EngineConfig(max_batch_size=4, max_model_len=32)
            engine = Engine(model, config.lora_config(max_lora_rank=4, fp8=fp8, target_modules=["experts"]), config)
            adapters = [LoRARequest(str(i), i + 1, str(folder / backbone / str(i))) for i in (0, 1)]
            found[name] = tokens_of(engine.generate(PROMPTS, [*adapters, None], NEW))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    for name in {backbone for backbone, _, _ in CASES.values()}:
        write_world(home / name, name)
    return home


@pytest.fixture(scope="module")
def merged_tokens() -> dict[str, list[list[int]]]:
    return {name: wanted(backbone, fp8) for name, (backbone, _, fp8) in CASES.items()}


def test_one_rank_equals_merged_models(folder, merged_tokens):
    assert serve(0, folder, "cpu") == merged_tokens
    assert len({str(tokens) for tokens in merged_tokens["mixtral, tp"]}) == len(PROMPTS)  # adapters change something


@pytest.mark.slow
def test_two_ranks_equal_merged_models(folder, merged_tokens):
    assert spawn_tensor_parallel(serve, 2, folder, "cpu", backend="gloo") == [merged_tokens] * 2


@pytest.mark.parametrize("fields", [{}, {"alora_invocation_tokens": [PROMPTS[1][-1]]}], ids=["plain", "activated"])
def test_an_adapter_of_one_rank(folder, fields):
    """Of two ranks one has the adapter's experts, 2 and 3: both serve it alone, and both refuse it in a mixture."""
    where, experts = folder / "mixtral", "base_model.model.model.layers.0.block_sparse_moe.experts"
    factors = torch.arange(96.0).sin().view(4, 24), 4 * torch.arange(128.0).cos().view(32, 4)
    sides = [*zip("AB", factors, strict=True)]
    tensors = {f"{experts}.{expert}.w2.lora_{side}.weight": factor for expert in (2, 3) for side, factor in sides}
    alone = LoRARequest("alone", tensors=tensors, config={"r": 4, "lora_alpha": 8, "target_modules": ["w2"], **fields})

    def serve_it(_: int) -> tuple[str, list[list[int]]]:
        model = MixtureOfExpertsForCausalLM(where, expert_parallel=True)
        model.load_weights(where)
        config = EngineConfig(max_batch_size=4, max_model_len=32, block_size=2, prefix_cache=True)
        engine = Engine(model, config.lora_config(max_lora_rank=4), config)
        mixed, plain = engine.generate(PROMPTS[:2], [{alone: 0.5}, None], NEW)
        return str(mixed.error), [plain.token_ids, *tokens_of(engine.generate(PROMPTS[1:2] * 2, [alone, None], NEW))]

    error, tokens = serve_it(0)
    assert re.search("'alone' .*(tokens|experts).*, and cannot be mixed", error)
    assert tokens[0] == tokens[2] != tokens[1]
    for found in on_threads(2, serve_it):
        assert found == (error.replace("adapter", "rank 1 of 2: adapter", 1), tokens)


@pytest.mark.multi_gpu
def test_two_gpus_equal_merged_models(folder, merged_tokens):
    assert spawn_tensor_parallel(serve, 2, folder, "cuda") == [merged_tokens] * 2
