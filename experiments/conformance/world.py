"""A tiny model and adapters, seeded, every number exact in bfloat16; and each one's right greedy tokens: by PEFT in
float32, only where no 16-bit rounding could turn one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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


class Tenant(NamedTuple):
    """One adapter: its name, rank, layers that it changes, and `lora_alpha / rank`."""

    name: str
    rank: int
    subset: tuple[str, ...] = ALL
    scaling: int = 1


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
    """Folder with a checkpoint and adapters, and their right tokens."""

    folder: Path
    tenants: Sequence[Tenant]
    prompts: Sequence[Prompt] = ()

    @property
    def models(self) -> list[str]:
        return [BASE, *(tenant.name for tenant in self.tenants)]

    def adapter(self, name: str) -> Path:
        return (self.folder / ADAPTERS / name).resolve()

    def sure(self, *models: str, shares: bool = False) -> list[Prompt]:
        """Return the prompts that all ``models`` are sure of, those with the shared prefix or those without."""
        return [one for one in self.prompts if {*models} <= {*one.sure} and (len(one.ids) > PREFIX) == shares]


class Oracle:
    """The models of a world by name: merged in float32, and with adapters beside the weights in bfloat16."""

    def __init__(self, world: World) -> None:
        self.full, self.half = (
            {name: _loaded(world, name, dtype) for name in world.models} for dtype in (torch.float32, torch.bfloat16)
        )

    @torch.inference_mode()
    def answers(self, name: str, prompts: Tensor) -> tuple[list[Tokens], list[bool]]:
        """Compute the tokens after each of `prompts` `[prompts, length]`, and whether 16 bits keep them for sure."""
        tokens, logits = _greedy(self.full[name], prompts)
        best, second = logits.topk(2, -1).values.unbind(-1)
        error = self.half[name](torch.cat([prompts, tokens], 1)).logits[:, -COUNT - 1 : -1].float() - logits
        safe = (best - second).amin(1) > SAFETY * error.abs().amax((1, 2))
        return _tuples(tokens), (safe & (tokens < END).all(1)).tolist()  # no end of a text, no unknown word

    @torch.inference_mode()
    def leaked(self, name: str, other: str, prompts: Tensor) -> list[Tokens]:
        """Compute the tokens over keys and values of the shared prefix that are `other`'s."""
        cache = DynamicCache(config=self.full[BASE].config)
        self.full[other](prompts[:, :PREFIX], past_key_values=cache)
        return _tuples(_greedy(self.full[name], prompts, past_key_values=cache)[0])

    def prompts(self, ids: Tensor) -> list[Prompt]:
        """Have all models answer prompts `[prompts, length]`; those longer than `PREFIX` share it."""
        answers = {name: self.answers(name, ids) for name in self.full}
        leaking = self.full if ids.shape[1] > PREFIX else ()
        leaked = {name: self.leaked(name, WARMER, ids) for name in leaking if name != WARMER}
        made = []
        for number, one in enumerate(_tuples(ids)):
            said = {name: tokens[number] for name, (tokens, _) in answers.items()}
            others = {name: [*said.values(), *([leaked[name][number]] if name in leaked else [])] for name in said}
            own = [name for name, (_, safe) in answers.items() if safe[number] and others[name].count(said[name]) == 1]
            made.append(Prompt(one, said, tuple(own)))
        return made


def _loaded(world: World, name: str, dtype: torch.dtype) -> Any:
    model: Any = LlamaForCausalLM.from_pretrained(world.folder / CHECKPOINT, dtype=dtype).eval()
    if name == BASE:
        return model
    is_full = dtype is torch.float32
    model = PeftModel.from_pretrained(model, world.adapter(name), autocast_adapter_dtype=is_full)
    return model.merge_and_unload() if is_full else model


def _greedy(model: Any, prompts: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Return greedy tokens `[prompts, COUNT]` and their logits `[prompts, COUNT, vocabulary]`."""
    made = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=COUNT, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True, **more,
    )  # fmt: skip
    return made.sequences[:, prompts.shape[1] :], torch.stack(made.logits, 1)


def _tuples(tokens: Tensor) -> list[Tokens]:
    return [tuple(row) for row in tokens.tolist()]


def make(folder: Path, count: int, ranks: Sequence[int], seed: int) -> World:
    """Write checkpoint, `count` adapters, poisoned ones and the right tokens; `ConfigError` for few sure prompts."""
    config = write_checkpoint(folder / CHECKPOINT, seed)
    kinds = [(SUBSETS[(n + n // len(ranks)) % len(SUBSETS)], SCALINGS[n % len(SCALINGS)]) for n in range(count)]
    world = World(folder, [Tenant(f"tenant-{n}", ranks[n % len(ranks)], *kind) for n, kind in enumerate(kinds)])
    for number, tenant in enumerate([*world.tenants, *(Tenant(name, max(ranks)) for name in POISONS)]):
        write_adapter(world.adapter(tenant.name), config, tenant, 1000 * (seed + 1) + number)
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(WORDS, (PER_LENGTH, length), generator=generator) for length in LENGTHS]
    prefix = torch.randint(WORDS, (1, PREFIX), generator=generator).expand(SHARING, -1)
    drawn.append(torch.cat([prefix, torch.randint(WORDS, (SHARING, SUFFIX), generator=generator)], 1))
    oracle = Oracle(world)
    world = replace(world, prompts=[one for ids in drawn for one in oracle.prompts(ids)])
    for name in world.models:
        sure, sharing = len(world.sure(name)), len(world.sure(name, shares=True))
        if sure < 2 or not sharing:
            raise ConfigError(
                f"{name} is sure of {sure} prompts and {sharing} with the shared prefix "
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


def write_checkpoint(folder: Path, seed: int) -> LlamaConfig:
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
    _, rank, layers, scaling = tenant
    alpha = rank * scaling
    write_random_adapter(folder, config, rank, seed, target_modules=layers, alpha=alpha, dtype=torch.bfloat16)
    if (value := POISONS.get(tenant.name)) is not None:
        file = folder / "adapter_model.safetensors"
        spoilt = {k: torch.full_like(v, value) if "lora_B" in k else v for k, v in load_file(file).items()}
        save_file(spoilt, file, metadata={"format": "pt"})
