"""Tiny checkpoint and its adapters on disk: seeded, every number exact in bfloat16."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from punica.adapters.synthetic import llama_module_shapes

WORDS = 62
"""Tokens ``w0`` to ``w61``, each a word of a text; two more are the end and unknown words."""
LIVE = 8
"""Words that the model can say. Fewer candidates leave larger margins between the best two."""
END, UNKNOWN = WORDS, WORDS + 1
HIDDEN, INTERMEDIATE, HEAD, LAYERS = 128, 256, 64, 2  # head sizes below 64 are unknown to some attention kernels
MAX_LEN = 512
SUBSETS: Mapping[str, Sequence[str]] = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "q v": ("q_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
"""Linear layers that adapters change."""
SCALINGS = (2.0, 1.0, 0.5)
POISONS = {"poison-nan": math.nan, "poison-inf": math.inf, "poison-huge": 1e38}
"""Adapters that spoil whatever reads their weights: name and value of their B matrices."""
WARMER = "tenant-0"
"""Adapter that is the first to use the shared prefix."""
CHECKPOINT, ADAPTERS = "checkpoint", "adapters"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Tenant:
    """One adapter: its name, rank, the key of its layers in `SUBSETS`, and `lora_alpha / rank`."""

    name: str
    rank: int
    subset: str
    scaling: float = 1.0


def tenants(count: int, ranks: Sequence[int]) -> list[Tenant]:
    """Return `count` adapters, ``tenant-0`` and so on; ranks and layers vary from each to the next."""
    subsets = list(SUBSETS)
    return [
        Tenant(f"tenant-{n}", ranks[n % len(ranks)], subsets[(n + n // len(ranks)) % len(subsets)], SCALINGS[n % 3])
        for n in range(count)
    ]


def write_checkpoint(folder: Path, seed: int) -> Path:
    """Write model and tokenizer in the form of transformers."""
    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // HEAD, num_key_value_heads=1,
        intermediate_size=INTERMEDIATE, vocab_size=WORDS + 2, max_position_embeddings=MAX_LEN, eos_token_id=END,
        bos_token_id=None, tie_word_embeddings=False, head_dim=HEAD,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                spread = 1 if "embed" in name else _spread(name) / math.sqrt(weight.shape[1])
                weight.normal_(0, spread, generator=generator)
        model.lm_head.weight[LIVE:] = 0
    model.generation_config = GenerationConfig(eos_token_id=END)
    model.bfloat16().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def _spread(name: str) -> float:
    """Return the gain of a layer; attention that is less sharp passes on less of a rounding."""
    return 0.7 if "q_proj" in name or "k_proj" in name else 1


def word_tokenizer(words: int = WORDS) -> PreTrainedTokenizerFast:
    """Build the tokenizer whose text tells every token: id `n` is the word ``wn``; the end and unknown words follow."""
    vocabulary = {f"w{number}": number for number in range(words)} | {"</s>": words, "<unk>": words + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def write_adapter(folder: Path, config: LlamaConfig, tenant: Tenant, seed: int, value: float | None = None) -> Path:
    """Write an adapter in PEFT's form. Its change of a layer is as large as the layer; `value` fills B instead."""
    generator = torch.Generator().manual_seed(seed)
    layers, tensors = SUBSETS[tenant.subset], {}
    for module, (width, height) in llama_module_shapes(config, layers).items():
        a = torch.randn(tenant.rank, width, generator=generator) / math.sqrt(width)
        b = torch.randn(height, tenant.rank, generator=generator) / (tenant.scaling * math.sqrt(tenant.rank))
        b = b if value is None else torch.full_like(b, value)
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = b.to(torch.bfloat16)
    alpha = tenant.rank * tenant.scaling
    written = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "inference_mode": True,
        "r": tenant.rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha, "lora_dropout": 0.0,
        "bias": "none", "target_modules": list(layers),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
