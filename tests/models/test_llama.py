"""The dense models compute what transformers computes with the same weights, also on ranks, with any launcher."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from punica.adapters import LoRAModelManager
from punica.config import LoRAConfig
from punica.metadata import LoRAMapping
from punica.models import LlamaForCausalLM, MixtureOfExpertsForCausalLM, load_model
from tests.models.moe_world import hugging_face, logits_of, wanted
from tests.parallel.thread_ranks import on_threads

# 4 heads and 2 kv heads, so that 4 ranks replicate the kv heads; a vocabulary that needs padding
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 77, "initializer_range": 0.2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def make_config(config_class: type[Any] = LlamaConfig, **changes: Any) -> Any:
    return config_class(**{**SIZES, **changes})


ODD = {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 101}
CONFIGS: dict[str, Any] = {
    "llama2": make_config(num_key_value_heads=4),
    "one kv head": make_config(num_key_value_heads=1),
    "llama3 rope": make_config(rope_parameters=LLAMA3_ROPE),
    "linear rope": make_config(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "yarn rope": make_config(rope_parameters=YARN_ROPE),
    "tied": make_config(tie_word_embeddings=True),
    "biases": make_config(attention_bias=True, mlp_bias=True),
    "odd sizes": make_config(**ODD),
    "own head size, swish is silu": make_config(head_dim=24, hidden_act="swish"),
    "mistral, window, own head size": make_config(MistralConfig, sliding_window=40, head_dim=24),
    "qwen2": make_config(Qwen2Config),
    "qwen2, tied, window in one layer": make_config(
        Qwen2Config, tie_word_embeddings=True, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "qwen2, window from a layer on that it has not": make_config(
        Qwen2Config, use_sliding_window=True, sliding_window=20, max_window_layers=2
    ),
    "qwen3": make_config(Qwen3Config, head_dim=32),
    "qwen3, biases": make_config(Qwen3Config, head_dim=16, attention_bias=True),
}
IDS = torch.randint(77, (40,), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_transformers(tmp_path, config) -> None:
    reference = hugging_face(config)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    assert type(model) is LlamaForCausalLM
    expected = wanted(reference, IDS)
    assert expected.std() > 0.5  # the comparison below is between numbers of this size
    torch.testing.assert_close(logits_of(model, IDS), expected, atol=1e-4, rtol=1e-4)
    if window := getattr(config, "sliding_window", None):
        assert model.max_context == (window if window == 40 else 64)


@pytest.mark.parametrize(("tp_size", "heads"), [(2, (2, 1)), (4, (1, 1))], ids=["tp2", "tp4"])
@pytest.mark.parametrize("name", ["yarn rope", "tied", "biases", "qwen2", "qwen3"])
def test_ranks_have_the_logits_of_transformers(tmp_path, name, tp_size, heads) -> None:
    reference = hugging_face(CONFIGS[name])
    reference.save_pretrained(tmp_path)

    def on_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
        model = load_model(tmp_path, torch.float32)
        loaded = logits_of(model, IDS)
        model.init_random_weights(3)
        attention = model.model.layers[0].self_attn
        return loaded, logits_of(model, IDS), (attention.num_heads, attention.num_kv_heads)

    _, alone, _ = on_rank(0)
    for loaded, random, rank_heads in on_threads(tp_size, on_rank):
        assert rank_heads == heads
        torch.testing.assert_close(loaded, wanted(reference, IDS), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(random, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["separate", "tied"])
def test_every_layer_can_carry_adapters_and_the_wrapped_model_still_loads(tmp_path, tied) -> None:
    reference = hugging_face(make_config(tie_word_embeddings=tied))
    reference.save_pretrained(tmp_path)
    model = LlamaForCausalLM(tmp_path)
    manager = LoRAModelManager(model, 1, 20, 77, LoRAConfig(), "cpu")
    suffixes = {name.rpartition(".")[2] for name in manager.modules}
    assert suffixes == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"}
    model.load_weights(tmp_path)
    manager.set_active_adapters([], LoRAMapping((0,) * 20, (0,) * 20, is_prefill=True))
    ids = torch.arange(20)
    torch.testing.assert_close(logits_of(model, ids), wanted(reference, ids), atol=1e-4, rtol=1e-4)


def test_checkpoint_in_several_files_and_in_bfloat16(tmp_path) -> None:
    reference, ids = hugging_face(make_config()), torch.arange(20)
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = wanted(reference, ids)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1 * float(expected.std()))):
        model = LlamaForCausalLM(make_config(), dtype)
        model.load_weights(tmp_path)
        assert (logits_of(model, ids).float() - expected).abs().mean() < tolerance


def test_random_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (LlamaForCausalLM(make_config()) for _ in range(3))
    first.init_random_weights(3)
    again.init_random_weights(3)
    other.init_random_weights(4)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    ids = torch.arange(9)
    assert not torch.allclose(logits_of(first, ids), logits_of(other, ids))
    assert abs(float(first.model.layers[0].mlp.down_proj.weight.std()) - 0.2) < 0.01


def test_wrong_checkpoint_changes_no_weight(tmp_path) -> None:
    hugging_face(make_config()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # of old checkpoints: ignored
    save_file({**tensors, "extra.weight": torch.zeros(3), "model.norm.weight": torch.zeros(5)}, file)
    model = LlamaForCausalLM(tmp_path)
    model.init_random_weights(0)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"2 problems.*unexpected extra\.weight.* shape \(5,\).*\(64,\)"):
        model.load_weights(tmp_path)
    save_file({name: one for name, one in tensors.items() if name != "model.norm.weight"}, file)
    with pytest.raises(ValueError, match=r"missing model\.norm\.weight"):
        model.load_weights(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    save_file(tensors, file)
    model.load_weights(tmp_path)


def test_missing_or_damaged_files(tmp_path) -> None:
    model = LlamaForCausalLM(make_config())
    with pytest.raises(FileNotFoundError, match="no_such_folder"):
        model.load_weights(tmp_path / "no_such_folder")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors' is missing"):
        model.load_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        model.load_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        model.load_weights(tmp_path)


def test_configs_of_other_models(tmp_path) -> None:
    for model_class, given in ((LlamaForCausalLM, {"hidden_size": 64}), (MixtureOfExpertsForCausalLM, 3)):
        with pytest.raises(TypeError, match=r"MixtralConfig|Qwen3Config"):
            model_class(given)
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            model_class(tmp_path)
    for model_class, kind in ((LlamaForCausalLM, "gpt2"), (MixtureOfExpertsForCausalLM, "llama")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ValueError, match=kind):
            model_class(tmp_path)
    for changes in (
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ):
        with pytest.raises(ValueError, match=r"'gelu'|'dynamic'"):
            LlamaForCausalLM(make_config(**changes))


def test_weights_that_are_no_numbers_are_refused_and_the_model_counts_as_empty(tmp_path) -> None:
    transformers.LlamaForCausalLM(make_config()).save_pretrained(tmp_path)
    model = LlamaForCausalLM(tmp_path)
    model.load_weights(tmp_path)
    assert model.has_weights
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight contains NaN or inf"):
        model.load_weights(tmp_path)
    assert not model.has_weights


ROOT = Path(__file__).resolve().parents[2]


def torchrun(ranks: int, program: Path) -> str:
    """Standard output of ranks that are started the way a user does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--log-dir", str(program.parent / "logs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, env=environment, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_program_of_the_docs_gives_the_same_tokens_on_one_and_two_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    match = re.search(r"cat > two_ranks\.py <<'EOF'\n(.*?)\nEOF\n\$ (.*?)\n", page, flags=re.DOTALL)
    assert match, "docs/distributed.md has no two_ranks.py"
    assert match.group(2) == "torchrun --nproc-per-node 2 two_ranks.py"
    program = tmp_path / "two_ranks.py"
    program.write_text(match.group(1))
    tokens = json.loads(torchrun(2, program))
    assert [len(generated) for generated in tokens] == [8, 8]
    assert tokens == json.loads(torchrun(1, program))
