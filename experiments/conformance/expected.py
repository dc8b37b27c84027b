"""Right greedy tokens of each model, as a file: by PEFT in float32, only where no 16-bit rounding could turn one."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from pydantic import TypeAdapter
from torch import Tensor
from transformers import AutoConfig, DynamicCache, LlamaForCausalLM

from experiments.conformance import weights
from experiments.harness.schema import ConfigError

BASE, FILE = "base", "expected.json"
WARMER = "tenant-0"  # adapter that is the first to use the shared prefix
COUNT = 8  # tokens of an answer
SAFETY = 4  # least margin of each token over the largest 16-bit error of a logit; two errors of twice that turn none
LENGTHS, PER_LENGTH = (5, 23, 60), 24  # of prompts, in tokens, and how many of each
PREFIX, SUFFIX, SHARING = 64, 4, 96  # of prompts with a shared prefix, whole blocks of a cache, and how many
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt and what each model says to it."""

    ids: Tokens
    answers: Mapping[str, Tokens]  # by model
    sure: tuple[str, ...]  # models whose tokens keep the margin and are no other model's; only these are asked
    leaked: Mapping[str, Tokens]  # answers where keys and values of the prefix are `WARMER`'s; empty: shares no prefix

    @property
    def text(self) -> str:
        """The prompt as text, a word for each token."""
        return " ".join(f"w{token}" for token in self.ids)


@dataclass(frozen=True)
class World:
    """Folder with a checkpoint and adapters, and their right tokens."""

    folder: Path
    tenants: Sequence[weights.Tenant]
    prompts: Sequence[Prompt] = ()

    @property
    def models(self) -> list[str]:
        return [BASE, *(tenant.name for tenant in self.tenants)]

    def adapter(self, name: str) -> Path:
        return (self.folder / weights.ADAPTERS / name).resolve()

    def sure(self, model: str, shares: bool = False) -> list[Prompt]:
        """Return the prompts that a model's tokens are sure for, those with the shared prefix or those without."""
        return [prompt for prompt in self.prompts if model in prompt.sure and bool(prompt.leaked) == shares]


class Oracle:
    """The base model and its adapters, by name: merged in float32, and beside the weights in bfloat16."""

    def __init__(self, checkpoint: Path, adapters: Mapping[str, Path]) -> None:
        full: Any = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        half: Any = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        self.full, self.half = {BASE: full}, {BASE: half}
        for name, folder in adapters.items():
            self.full[name] = PeftModel.from_pretrained(copy.deepcopy(full), folder).merge_and_unload()
            self.half[name] = PeftModel.from_pretrained(copy.deepcopy(half), folder, autocast_adapter_dtype=False)

    @torch.inference_mode()
    def answers(self, name: str, prompts: Tensor) -> tuple[list[Tokens], list[bool]]:
        """Compute the tokens after each of `prompts` `[prompts, length]`, and whether 16 bits keep them for sure."""
        tokens, logits = _greedy(self.full[name], prompts)
        best, second = logits.topk(2, -1).values.unbind(-1)
        error = self.half[name](torch.cat([prompts, tokens], 1)).logits[:, -COUNT - 1 : -1].float() - logits
        safe = (best - second).amin(1) > SAFETY * error.abs().amax((1, 2))
        return _tuples(tokens), (safe & (tokens < weights.END).all(1)).tolist()  # no end of a text, no unknown word

    @torch.inference_mode()
    def leaked(self, name: str, other: str, prompts: Tensor) -> list[Tokens]:
        """Compute the tokens over keys and values of the shared prefix that are `other`'s."""
        cache = DynamicCache(config=self.full[BASE].config)
        self.full[other](prompts[:, :PREFIX], past_key_values=cache)
        return _tuples(_greedy(self.full[name], prompts, past_key_values=cache)[0])


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
    checkpoint = weights.write_checkpoint(folder / weights.CHECKPOINT, seed)
    config, world = AutoConfig.from_pretrained(checkpoint), World(folder, weights.tenants(count, ranks))
    for number, tenant in enumerate(world.tenants):
        weights.write_adapter(world.adapter(tenant.name), config, tenant, 1000 * (seed + 1) + number)
    for name, value in weights.POISONS.items():
        weights.write_adapter(world.adapter(name), config, weights.Tenant(name, max(ranks), "all"), seed, value)
    oracle = Oracle(checkpoint, {name: world.adapter(name) for name in world.models[1:]})
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(weights.WORDS, (PER_LENGTH, length), generator=generator) for length in LENGTHS]
    prefix = torch.randint(weights.WORDS, (1, PREFIX), generator=generator).expand(SHARING, -1)
    drawn.append(torch.cat([prefix, torch.randint(weights.WORDS, (SHARING, SUFFIX), generator=generator)], 1))
    world = replace(world, prompts=[one for prompts in drawn for one in _answered(oracle, world.models, prompts)])
    for name in world.models:
        sure, sharing = len(world.sure(name)), len(world.sure(name, shares=True))
        if sure < 2 or not sharing:
            raise ConfigError(
                f"{name} is sure of {sure} prompts and {sharing} with the shared prefix "
                f"of {len(world.prompts)}, needs 2 and 1: choose another seed= or fewer tenants="
            )
    (folder / FILE).write_bytes(TypeAdapter(World).dump_json(world))
    return world


def _answered(oracle: Oracle, models: Sequence[str], prompts: Tensor) -> list[Prompt]:
    """Have all models answer prompts `[prompts, length]`; those longer than `PREFIX` share it."""
    answers = {name: oracle.answers(name, prompts) for name in models}
    shares = prompts.shape[1] > PREFIX
    leaks = {name: oracle.leaked(name, WARMER, prompts) for name in models if shares and name != WARMER}
    made = []
    for number, ids in enumerate(_tuples(prompts)):
        said = {name: tokens[number] for name, (tokens, _) in answers.items()}
        leaked = {name: tokens[number] for name, tokens in leaks.items()}
        own = [name for name in models if [*said.values(), leaked.get(name)].count(said[name]) == 1]
        made.append(Prompt(ids, said, tuple(name for name in own if answers[name][1][number]), leaked))
    return made


def read(folder: Path) -> World:
    """Read what :func:`make` wrote. Raises `ConfigError`: not there, or damaged."""
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"folder={folder} has no {FILE}: write it with make={folder}, and start the server on it")
    try:  # the folder may have moved
        return TypeAdapter(World).validate_python({**json.loads(path.read_text(encoding="utf-8")), "folder": folder})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({str(error).splitlines()[0]}): write it anew with make=") from None
