"""Tiny checkpoint and its adapters on disk: seeded, every number exact in bfloat16."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from punica.adapters.synthetic import LLAMA_LORA_MODULES, write_random_adapter

WORDS = 62
"""Tokens ``w0`` to ``w61``, each a word of a text; two more are the end and unknown words."""
LIVE = 8  # words that the model can say: fewer candidates leave larger margins between the best two
END, HIDDEN, HEAD, MAX_LEN = WORDS, 128, 64, 512  # head sizes below 64 are unknown to some attention kernels
ALL = LLAMA_LORA_MODULES
SUBSETS = {"all": ALL, "q v": ("q_proj", "v_proj"), "mlp": ALL[4:], "attention": ALL[:4]}  # layers that adapters change
SCALINGS = (4, 5, 3)  # alpha / rank of one adapter after the other; with 4 its change is as large as the layer
# adapters that spoil whatever reads their weights: name and value of their B matrices
POISONS = {"poison-nan": math.nan, "poison-inf": math.inf, "poison-huge": 1e38}
CHECKPOINT, ADAPTERS = "checkpoint", "adapters"


class Tenant(NamedTuple):
    """One adapter: its name, rank, the key of its layers in `SUBSETS`, and `lora_alpha / rank`."""

    name: str
    rank: int
    subset: str
    scaling: int = 1


def tenants(count: int, ranks: Sequence[int]) -> list[Tenant]:
    """Return `count` adapters, ``tenant-0`` and so on; ranks, layers and scalings vary from each to the next."""
    subsets = list(SUBSETS)
    return [
        Tenant(f"tenant-{n}", ranks[n % len(ranks)], subsets[(n + n // len(ranks)) % len(subsets)], SCALINGS[n % 3])
        for n in range(count)
    ]


def write_checkpoint(folder: Path, seed: int) -> LlamaConfig:
    """Write model and tokenizer in the form of transformers."""
    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=HIDDEN // HEAD, num_key_value_heads=1,
        intermediate_size=256, vocab_size=WORDS + 2, max_position_embeddings=MAX_LEN, eos_token_id=END,
        bos_token_id=None, tie_word_embeddings=False, head_dim=HEAD,
    )  # fmt: skip
    generator, model = torch.Generator().manual_seed(seed), LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            gain = 0.7 if "q_proj" in name or "k_proj" in name else 1  # softer attention passes on less of a rounding
            spread = 1 if "embed" in name else gain / math.sqrt(weight.shape[1])
            torch.nn.init.normal_(weight, 0, spread, generator)
    model.lm_head.weight.data[LIVE:] = 0
    model.generation_config = GenerationConfig(eos_token_id=END)
    model.bfloat16().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return config


def word_tokenizer(words: int = WORDS) -> PreTrainedTokenizerFast:
    """Build the tokenizer whose text tells every token: id `n` is the word ``wn``; the end and unknown words follow."""
    vocabulary = {f"w{number}": number for number in range(words)} | {"</s>": words, "<unk>": words + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def write_adapter(folder: Path, config: LlamaConfig, tenant: Tenant, seed: int) -> None:
    """Write an adapter in PEFT's form; the B matrices of those of `POISONS` have one value."""
    layers, alpha = SUBSETS[tenant.subset], tenant.rank * tenant.scaling
    write_random_adapter(folder, config, tenant.rank, seed, target_modules=layers, alpha=alpha, dtype=torch.bfloat16)
    if (value := POISONS.get(tenant.name)) is not None:
        file = folder / "adapter_model.safetensors"
        spoilt = {k: torch.full_like(v, value) if "lora_B" in k else v for k, v in load_file(file).items()}
        save_file(spoilt, file, metadata={"format": "pt"})
