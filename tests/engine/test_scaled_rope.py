"""RoPE scaling beside an unchanged ``max_position_embeddings`` is served up to its length; autocast reaches no step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from punica.engine import Engine, SamplingParams
from tests.world import finish, tokens_of

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 64, "initializer_range": 0.3, "max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip


def folder_of(home: Path, kind: str, rope: dict[str, Any], **fields: Any) -> Path:
    """A checkpoint whose config.json has the scaling as model cards write it."""
    config_class = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config,
                    "llama": transformers.LlamaConfig}[kind]  # fmt: skip
    given = {**SIZES, "head_dim": 16, **fields} if kind == "qwen3" else {**SIZES, **fields}
    config = config_class(**given, rope_scaling=rope, rope_theta=10000.0)
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home)
    return home


@pytest.mark.parametrize(
    ("kind", "rope", "fields", "length"),
    [
        ("qwen3", YARN, {}, 128), ("llama", LLAMA3, {}, 128), ("llama", {"type": "yarn", "factor": 2.0}, {}, 64),
        ("llama", {"rope_type": "linear", "factor": 3.0}, {}, 96),
        ("qwen2", {**YARN, "original_max_position_embeddings": 24}, {}, 96),
        ("qwen2", {**YARN, "original_max_position_embeddings": 8}, {}, 32),  # the config says more than the scaling
        ("qwen2", YARN, {"max_position_embeddings": 128}, 128), ("qwen2", {"rope_type": "default"}, {}, 32),
    ],
)  # fmt: skip
def test_the_scaled_length_is_served(tmp_path, kind, rope, fields, length) -> None:
    folder = folder_of(tmp_path, kind, rope, **fields)
    engine = Engine.from_pretrained(folder, device="cpu", num_blocks=32)
    assert engine.config.max_model_len == length
    prompt = torch.randint(1, 64, (length - 8,), generator=torch.Generator().manual_seed(2))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = reference(prompt[None]).logits[0, -1]
    (result,) = engine.generate([prompt], None, SamplingParams(8, ignore_eos=True))
    assert (result.token_ids[0], len(result.token_ids)) == (int(logits.argmax()), 8)
    with pytest.raises(ValueError, match=f"{length + 1}, the model has {length} positions"):
        Engine.from_pretrained(folder, device="cpu", max_model_len=length + 1)


@pytest.mark.parametrize("way", ["generate", "stream", "step"])
def test_autocast_around_a_call_changes_no_token(backbone, way) -> None:
    prompts, engine = [[1, 2, 3], [4]], backbone.engine()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if way == "generate":
            found = tokens_of(engine.generate(prompts, backbone.adapters[1], 10))
        elif way == "stream":
            chunks = [chunk.result for chunk in engine.stream(prompts, backbone.adapters[1], 10)]
            found = tokens_of([result for result in chunks if result is not None])
        else:
            states = [backbone.ask(engine, str(prompt), prompt, 1, 10) for prompt in prompts]
            finish(engine)
            found = [state.output_token_ids for state in states]
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16  # the caller's own work keeps it
    assert found == [backbone.generate_merged(prompt, 1, 10) for prompt in prompts]
