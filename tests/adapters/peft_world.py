"""A tiny Llama in a Hugging Face folder, eight tenants trained (so to speak) and saved by the PEFT library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from punica.adapters import LoRARequest
from punica.engine import Engine, EngineConfig, Request
from punica.models import LlamaForCausalLM
from tests.world import logits_of

LAYERS, VOCAB = 2, 67
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "initializer_range": 0.2,
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "q and v": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all seven": {"r": 3, "lora_alpha": 6, "target_modules": SEVEN, "use_rslora": True},
    "all-linear": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear"},
    "regex": {"r": 5, "lora_alpha": 7.5, "target_modules": r".*\.layers\.1\.(self_attn\.[ko]_proj|mlp\.up_proj)"},
    "only mlp": {  # PEFT would mix up an adapter called mlp with the modules of that name
        "r": 1,
        "lora_alpha": 2,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "exclude_modules": r".*\.0\.mlp\.down_proj",
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "k_proj", "up_proj", "down_proj"],
        # two keys match layer 1's k_proj: the first counts; sorted, because PEFT sorts them when it saves
        "rank_pattern": {r"^model\.layers\.1\.self_attn\..*": 6, "k_proj": 1, "layers.0.mlp.up_proj": 8},
        "alpha_pattern": {r"1\.mlp\..*": 12, "^q_proj": 99, "q_proj|k_proj": 2.5},
    },
    "one layer": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["o_proj", "down_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
        "use_rslora": True,
        "rank_pattern": {"o_proj": 7},
    },
    "vocabulary": {"r": 6, "lora_alpha": 9, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
}


def hugging_face_model(**changes: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def lora_config(**fields: Any) -> peft.LoraConfig:
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**defaults, **fields})


def peft_model(base: torch.nn.Module, configs: dict[str, peft.PeftConfig]) -> Any:
    """One PEFT model around `base` with all the adapters, all their matrices random."""
    (name, config), *others = configs.items()
    model: Any = peft.get_peft_model(base, config, adapter_name=name)
    for name, config in others:
        model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model.eval()


class Ours:
    """This library's engine of a Hugging Face folder, and the requests for adapter folders beside it."""

    def __init__(self, base_folder: Path, adapters: dict[str, Path]) -> None:
        model, sizes = LlamaForCausalLM(base_folder, torch.float32), EngineConfig(max_batch_size=16, max_model_len=32)
        model.load_weights(base_folder)
        self.engine = Engine(model, sizes.lora_config(8, max_loras=max(1, len(adapters))), sizes, "fcfs_many")
        self.requests = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(adapters.items(), 1)}

    def logits(
        self, prompts: Sequence[Sequence[int]], names: Sequence[str | None]
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Return each prompt with a token, and logits `[2, VOCAB]`: after a prefill with others, and a decode row."""
        asked = [Request(f"{i}", prompt, 2, self.requests.get(names[i])) for i, prompt in enumerate(prompts)]
        rows = logits_of(self.engine, asked)
        longer = [[*prompt, int(rows[f"{i}"][0].argmax())] for i, prompt in enumerate(prompts)]
        return longer, [torch.stack(rows[f"{i}"]) for i in range(len(prompts))]


def round_to_bfloat16(model: Any, name: str, folder: Path) -> None:
    """Save one adapter's tensors in bfloat16, as after training in it; the model keeps the same numbers in float32."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                parameter.copy_(parameter.bfloat16())
    file = folder / "adapter_model.safetensors"
    save_file({key: t.bfloat16() for key, t in load_file(file).items()}, file, metadata={"format": "pt", "by": "us"})


def reference_logits(model: Any, prompts: Sequence[Sequence[int]], **kwargs: Any) -> list[torch.Tensor]:
    """Hugging Face's logits `[2, VOCAB]` of each prompt's last tokens, computed as one batch padded on the right."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in prompts])
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, **kwargs).logits
    return [rows[len(prompt) - 2 : len(prompt)] for rows, prompt in zip(logits, prompts, strict=True)]
