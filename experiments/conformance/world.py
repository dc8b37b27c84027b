"""A tiny model and adapters, seeded, every number exact in bfloat16; and each one's right greedy tokens: by PEFT in
float32, only where no 16-bit rounding could turn one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.harness.schema import ConfigError
from punica.adapters.synthetic import LLAMA_LORA_MODULES as ALL
from punica.adapters.synthetic import write_random_adapter

BASE, FILE = "base", "expected.json"
WARMER = "tenant-0"  # adapter that is the first to use the shared prefix
COUNT = 8  # tokens of an answer
SAFETY = 4  # least margin of each token over the largest 16-bit error of a logit; two errors of twice that turn none
LENGTHS, PER_LENGTH = (5, 23, 60), 24  # of prompts, in tokens, and how many of each
PREFIX, SUFFIX, SHARING = 64, 4, 96  # of prompts with a shared prefix, whole blocks of a cache, and how many
Tokens = tuple[int, ...]
WORDS = 62
"""Tokens ``w0`` to ``w61``, each a word of a text; two more are the end and unknown words."""
LIVE = 8  # words that the model can say: fewer candidates leave larger margins between the best two
END, HIDDEN, HEAD, MAX_LEN = WORDS, 128, 64, 512  # head sizes below 64 are unknown to some attention kernels
SUBSETS = (ALL, ALL[:3:2], ALL[4:], ALL[:4])  # layers that adapters change: all, q and v, the MLP, attention
SCALINGS = (4, 5, 3)  # alpha / rank of one adapter after the other; with 4 its change is as large as the layer
# adapters that spoil whatever reads their weights: name and value of their B matrices
POISONS = {"poison-nan": math.nan, "poison-inf": math.inf, "poison-huge": 1e38}
CHECKPOINT, ADAPTERS = "checkpoint", "adapters"


@dataclass(frozen=True)
class Prompt:
    """A prompt, what each model says to it, and the models that are ``sure``: their tokens keep the margin, and are no
    other model's, nor those over `WARMER`'s keys and values of a shared prefix. Only these are asked.
    """

    ids: Tokens
    answers: Mapping[str, Tokens]
    sure: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(f"w{token}" for token in self.ids)


@dataclass(frozen=True)
class World:
    """Folder with a checkpoint and adapters, and the right tokens of these models, the base first."""

    folder: Path
    models: list[str]
    prompts: list[Prompt] = field(default_factory=list)

    def adapter(self, name: str) -> Path:
        return (self.folder / ADAPTERS / name).resolve()

    def sure(self, *models: str, shares: bool = False) -> list[Prompt]:
        """Return the prompts that all ``models`` are sure of, those with the shared prefix or those without."""
        return [one for one in self.prompts if {*models} <= {*one.sure} and (len(one.ids) > PREFIX) == shares]


def loaded(world: World, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model: merged in float32, with its adapter beside the weights in bfloat16."""
    model: Any = LlamaForCausalLM.from_pretrained(world.folder / CHECKPOINT, dtype=dtype).eval()
    if name == BASE:
        return model
    is_full = dtype is torch.float32
    model = PeftModel.from_pretrained(model, world.adapter(name), autocast_adapter_dtype=is_full)
    return model.merge_and_unload() if is_full else model


def greedy(model: Any, prompts: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Return greedy tokens `[prompts, COUNT]` and their logits `[prompts, COUNT, vocabulary]`."""
    made = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=COUNT, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True, **more,
    )  # fmt: skip
    return made.sequences[:, prompts.shape[1] :], torch.stack(made.logits, 1)


@torch.inference_mode()
def leaked(model: Any, other: Any, prompts: Tensor) -> Tensor:
    """Compute the tokens `[prompts, COUNT]` of `model` over keys and values of the shared prefix that are `other`'s."""
    cache = DynamicCache(config=other.config)
    other(prompts[:, :PREFIX], past_key_values=cache)
    return greedy(model, prompts, past_key_values=cache)[0]


@torch.inference_mode()
def answers(world: World, name: str, batches: Sequence[Tensor], warmer: Any) -> Iterator[tuple[Tokens, bool]]:
    """Yield a model's tokens after each of `batches` `[prompts, length]`; and whether 16 bits keep them for sure, and
    keys and values of `warmer` would show in them.
    """
    full, half = loaded(world, name), loaded(world, name, torch.bfloat16)
    for prompts in batches:
        tokens, logits = greedy(full, prompts)
        best, second = logits.topk(2, -1).values.unbind(-1)
        error = half(torch.cat([prompts, tokens], 1)).logits[:, -COUNT - 1 : -1].float() - logits
        safe = (best - second).amin(1) > SAFETY * error.abs().amax((1, 2))
        safe &= (tokens < END).all(1)  # no end of a text, no unknown word
        if prompts.shape[1] > PREFIX and name != WARMER:
            safe &= (leaked(full, warmer, prompts) != tokens).any(1)
        yield from zip(map(tuple, tokens.tolist()), safe.tolist(), strict=True)


def make(folder: Path, count: int, ranks: Sequence[int], seed: int) -> World:
    """Write checkpoint, `count` adapters, poisoned ones and the right tokens; `ConfigError` for few sure prompts."""
    world = World(folder, [BASE, *(f"tenant-{number}" for number in range(count))])
    write_weights(world, ranks, seed)
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(WORDS, (PER_LENGTH, length), generator=generator) for length in LENGTHS]
    prefix = torch.randint(WORDS, (1, PREFIX), generator=generator).expand(SHARING, -1)
    drawn.append(torch.cat([prefix, torch.randint(WORDS, (SHARING, SUFFIX), generator=generator)], 1))
    warmer = loaded(world, WARMER)
    found = zip(*(answers(world, name, drawn, warmer) for name in world.models), strict=True)
    for ids, of_models in zip((tuple(one) for part in drawn for one in part.tolist()), found, strict=True):
        said = {name: tokens for name, (tokens, _) in zip(world.models, of_models, strict=True)}
        safe = {tokens for tokens, is_safe in of_models if is_safe and [*said.values()].count(tokens) == 1}
        world.prompts.append(Prompt(ids, said, tuple(name for name, tokens in said.items() if tokens in safe)))
    for name in world.models:
        sharing = len(world.sure(name, shares=True))
        if len(world.sure(name)) < 2 or not sharing:
            raise ConfigError(
                f"{name} is sure of {len(world.sure(name))} prompts and {sharing} with the shared prefix "
                f"of {len(world.prompts)}, needs 2 and 1: choose another seed= or fewer tenants="
            )
    (folder / FILE).write_bytes(TypeAdapter(World).dump_json(world))
    return world


def read(folder: Path) -> World:
    """Read what :func:`make` wrote. Raises `ConfigError`: not there, or damaged."""
    try:  # the folder may have moved
        return replace(TypeAdapter(World).validate_json((folder / FILE).read_bytes()), folder=folder)
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"folder={folder} cannot be read ({why}): write it with make={folder}") from None


def write_weights(world: World, ranks: Sequence[int], seed: int) -> None:
    """Write model and tokenizer, and adapters in PEFT's form, whose ranks, layers and scalings vary."""
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
    model.bfloat16().save_pretrained(world.folder / CHECKPOINT)
    word_tokenizer().save_pretrained(world.folder / CHECKPOINT)
    for number, name in enumerate([*world.models[1:], *POISONS]):
        rank, layers = ranks[number % len(ranks)], SUBSETS[(number + number // len(ranks)) % len(SUBSETS)]
        folder, alpha = world.adapter(name), rank * SCALINGS[number % len(SCALINGS)]
        where: Any = {"target_modules": layers, "alpha": alpha, "dtype": torch.bfloat16}
        write_random_adapter(folder, config, rank, 1000 * (seed + 1) + number, **where)
        if name in POISONS:
            tensors = load_file(file := folder / "adapter_model.safetensors")
            b = {key: torch.full_like(one, POISONS[name]) for key, one in tensors.items() if "lora_B" in key}
            save_file(tensors | b, file, metadata={"format": "pt"})


def word_tokenizer(words: int = WORDS) -> PreTrainedTokenizerFast:
    """Build the tokenizer whose text tells every token: id `n` is the word ``wn``; the end and unknown words follow."""
    vocabulary = {f"w{number}": number for number in range(words)} | {"</s>": words, "<unk>": words + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
