"""Prompts with each model's right tokens, as a file: only prompts whose tokens no 16-bit rounding could turn."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from experiments.conformance.oracle import BASE, Answers, Oracle
from experiments.conformance.weights import (
    ADAPTERS,
    CHECKPOINT,
    END,
    POISONS,
    WARMER,
    WORDS,
    Tenant,
    tenants,
    write_adapter,
    write_checkpoint,
)
from experiments.harness.schema import ConfigError

COUNT = 8
"""Tokens of an answer."""
SAFETY = 4
"""Least margin of each token over the largest 16-bit error of a logit; two errors of twice that size turn none."""
LENGTHS = (5, 23, 60)
"""Lengths of prompts, in tokens."""
PREFIX, SUFFIX = 64, 4
"""Lengths of what some prompts share, whole blocks of a prefix cache, and of the rest."""
PER_LENGTH, SHARING = 24, 96
"""Prompts that are drawn for each length, and with the shared prefix."""
FILE = "expected.json"
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt and what each model says to it.

    Args:
        ids: token ids; as a text, the words ``w<id>``.
        answers: tokens by model.
        sure: models whose tokens keep the margin and are no other model's; only these are asked.
        leaked: tokens by model where the shared prefix's keys and values are `WARMER`'s; empty: shares no prefix.
    """

    ids: Tokens
    answers: Mapping[str, Tokens]
    sure: frozenset[str]
    leaked: Mapping[str, Tokens] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt as text."""
        return " ".join(f"w{token}" for token in self.ids)


@dataclass(frozen=True)
class World:
    """Folder with a checkpoint and adapters, and their right tokens."""

    folder: Path
    tenants: Sequence[Tenant]
    prompts: Sequence[Prompt]

    @property
    def models(self) -> list[str]:
        """Names of the base model and the adapters."""
        return [BASE, *(tenant.name for tenant in self.tenants)]

    def adapter(self, name: str) -> Path:
        """Return an adapter's folder."""
        return (self.folder / ADAPTERS / name).resolve()

    def sure(self, model: str) -> list[Prompt]:
        """Return the prompts without a shared prefix that a model's tokens are sure for."""
        return [prompt for prompt in self.prompts if model in prompt.sure and not prompt.leaked]

    def sharing(self, model: str) -> list[Prompt]:
        """Return the prompts with the shared prefix that a model's tokens are sure for, and would show a leak."""
        return [prompt for prompt in self.prompts if model in prompt.sure and prompt.leaked]


def make(folder: Path, count: int, ranks: Sequence[int], seed: int) -> World:
    """Write checkpoint, `count` adapters, poisoned ones and the right tokens into `folder`.

    Raises `ConfigError` where a model has too few sure prompts, before the file of tokens is written.
    """
    found = tenants(count, ranks)
    checkpoint = write_checkpoint(folder / CHECKPOINT, seed)
    config = AutoConfig.from_pretrained(checkpoint)
    folders = {
        tenant.name: write_adapter(folder / ADAPTERS / tenant.name, config, tenant, 1000 * (seed + 1) + number)
        for number, tenant in enumerate(found)
    }
    for name, value in POISONS.items():
        write_adapter(folder / ADAPTERS / name, config, Tenant(name, max(ranks), "all"), seed, value)
    world = World(folder, found, list(_prompts(Oracle(checkpoint, folders), [BASE, *folders], seed)))
    check(world)
    (folder / FILE).write_text(json.dumps(_as_json(world)), encoding="utf-8")
    return world


def _prompts(oracle: Oracle, models: Sequence[str], seed: int) -> Iterator[Prompt]:
    """Draw prompts of each length, then those with a shared prefix, and have all models answer them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(number: int, length: int) -> Tensor:
        return torch.randint(WORDS, (number, length), generator=generator)

    for length in LENGTHS:
        yield from _answered(oracle, models, draw(PER_LENGTH, length))
    prompts = torch.cat([draw(1, PREFIX).expand(SHARING, -1), draw(SHARING, SUFFIX)], 1)
    leaked = {name: oracle.leaked(name, WARMER, prompts, PREFIX, COUNT) for name in models if name != WARMER}
    for number, prompt in enumerate(_answered(oracle, models, prompts)):
        others = {name: _tuple(tokens[number]) for name, tokens in leaked.items()}
        shown = frozenset(name for name in prompt.sure if others.get(name) != prompt.answers[name])
        yield Prompt(prompt.ids, prompt.answers, shown, others)


def _answered(oracle: Oracle, models: Sequence[str], prompts: Tensor) -> Iterator[Prompt]:
    """Yield prompts `[prompts, length]` with the answers of all models."""
    answers = {name: oracle.answers(name, prompts, COUNT) for name in models}
    for number, ids in enumerate(prompts):
        tokens = {name: _tuple(answer.tokens[number]) for name, answer in answers.items()}
        said = list(tokens.values())
        sure = (name for name in models if _is_safe(answers[name], number) and said.count(tokens[name]) == 1)
        yield Prompt(_tuple(ids), tokens, frozenset(sure))


def _is_safe(answers: Answers, number: int) -> bool:
    ends = bool((answers.tokens[number] >= END).any())  # the end of a text, or no word
    return not ends and bool(answers.margin[number] > SAFETY * answers.error[number])


def _tuple(tokens: Tensor) -> Tokens:
    return tuple(map(int, tokens))


def check(world: World) -> None:
    """Raise `ConfigError` where a model has no sure prompt of either kind: no case could tell it from others."""
    for name in world.models:
        sure, sharing = len(world.sure(name)), len(world.sharing(name))
        if sure < 2 or not sharing:
            raise ConfigError(
                f"{name} is sure of {sure} prompts and {sharing} with the shared prefix "
                f"of {len(world.prompts)}, needs 2 and 1: choose another seed= or fewer tenants="
            )


def _as_json(world: World) -> dict[str, object]:
    prompts = [{**vars(prompt), "sure": sorted(prompt.sure)} for prompt in world.prompts]
    return {"tenants": [vars(tenant) for tenant in world.tenants], "prompts": prompts}


def read(folder: Path) -> World:
    """Read what :func:`make` wrote. Raises `ConfigError`: not there, or damaged."""
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"folder={folder} has no {FILE}: write it with make={folder}, and start the server on it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        prompts = [
            Prompt(tuple(one["ids"]), _tuples(one["answers"]), frozenset(one["sure"]), _tuples(one["leaked"]))
            for one in content["prompts"]
        ]
        return World(folder, [Tenant(**one) for one in content["tenants"]], prompts)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}): write it anew with make=") from None


def _tuples(answers: Mapping[str, Sequence[int]]) -> dict[str, Tokens]:
    return {name: tuple(tokens) for name, tokens in answers.items()}
