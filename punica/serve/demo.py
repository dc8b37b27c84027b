"""Checkpoint of ``--demo``: a tiny Llama of random weights whose tokens are bytes, and adapters of three ranks."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from punica.adapters import write_random_adapter


def write_demo(checkpoint: str, adapters: Sequence[tuple[str, str]]) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(checkpoint)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=257, max_position_embeddings=1024, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(checkpoint)
    for number, (_, folder) in enumerate(adapters):
        write_random_adapter(Path(folder), config, rank=8 << number, seed=number)
