"""A tiny checkpoint with adapters on disk, engines of it, and the tokens that an undisturbed engine gives."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from experiments.conformance.weights import (
    ADAPTERS,
    CHECKPOINT,
    POISONS,
    WORDS,
    Tenant,
    tenants,
    write_adapter,
    write_checkpoint,
)
from punica.adapters import LoRARequest
from punica.engine import Engine, GenerationResult, Request, SamplingParams

RANKS = (1, 8, 16, 5)
MAX_RANK, MAX_LEN, BATCH = 16, 64, 8
LONGEST_PROMPT, LONGEST_OUTPUT = 12, 12


@dataclass(frozen=True)
class Wish:
    """A prompt, the number of its adapter (-1: none), and the number of new tokens."""

    prompt: tuple[int, ...]
    adapter: int
    new: int


@dataclass(frozen=True)
class World:
    """Folder with a checkpoint, and its adapters, each with an id of its own."""

    folder: Path
    adapters: Sequence[LoRARequest]
    device: str

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint."""
        return self.folder / CHECKPOINT

    def engine(self, slots: int | None = None, admission: str = "fcfs", **sizes: Any) -> Engine:
        """Build an engine in float32 with adapter slots for a full batch, or ``slots``."""
        sizes = {"max_batch_size": BATCH, "max_model_len": MAX_LEN, **sizes}
        return Engine.from_pretrained(
            self.checkpoint, dtype="float32", device=self.device, admission=admission, max_lora_rank=MAX_RANK,
            max_loras=slots or sizes["max_batch_size"] + 1, **sizes,
        )  # fmt: skip

    def adapter(self, wish: Wish) -> LoRARequest | None:
        """Return the adapter of a wish."""
        return None if wish.adapter < 0 else self.adapters[wish.adapter]

    def request(self, name: str, wish: Wish, adapter: LoRARequest | None = None) -> Request:
        """Build a greedy request for a wish, which ends at its length alone; ``adapter`` instead of its own."""
        params = SamplingParams(wish.new, ignore_eos=True)
        return Request(name, list(wish.prompt), params, adapter or self.adapter(wish))

    def undisturbed(self, wishes: Sequence[Wish]) -> dict[Wish, GenerationResult]:
        """Return the result of each wish from an engine that has room for all it is given."""
        engine, asked = self.engine(), list(dict.fromkeys(wishes))
        results = engine.generate(
            [list(wish.prompt) for wish in asked], [self.adapter(wish) for wish in asked],
            [SamplingParams(wish.new, ignore_eos=True) for wish in asked],
        )  # fmt: skip
        return dict(zip(asked, results, strict=True))

    def copy(self, number: int, name: str, adapter_id: int) -> LoRARequest:
        """Copy the folder of an adapter, for a trial to damage."""
        folder = shutil.copytree(self.adapters[number].lora_path, self.folder / name, dirs_exist_ok=True)
        return LoRARequest(name, adapter_id, str(folder))


def make_world(folder: Path, count: int, seed: int, device: str) -> World:
    """Write the checkpoint and ``count`` adapters."""
    checkpoint = write_checkpoint(folder / CHECKPOINT, seed)
    config = AutoConfig.from_pretrained(checkpoint)
    adapters = []
    for number, tenant in enumerate(tenants(count, RANKS), start=1):
        path = write_adapter(folder / ADAPTERS / tenant.name, config, tenant, 1000 * (seed + 1) + number)
        adapters.append(LoRARequest(tenant.name, number, str(path)))
    return World(folder, adapters, device)


def poisoned(world: World) -> list[LoRARequest]:
    """Write the adapters whose weights are NaN, infinite or so large that products overflow."""
    config = AutoConfig.from_pretrained(world.checkpoint)
    made = []
    for number, (name, value) in enumerate(POISONS.items(), start=10_000):
        tenant = Tenant(name, MAX_RANK, "all")
        path = write_adapter(world.folder / ADAPTERS / name, config, tenant, number, value)
        made.append(LoRARequest(name, number, str(path)))
    return made


def draw_wishes(world: World, count: int, choose: random.Random) -> list[Wish]:
    """Draw prompts of 1 to 12 tokens with any adapter or none, and 1 to 12 new tokens."""

    def one() -> Wish:
        prompt = tuple(choose.randrange(WORDS) for _ in range(choose.randint(1, LONGEST_PROMPT)))
        return Wish(prompt, choose.randrange(-1, len(world.adapters)), choose.randint(1, LONGEST_OUTPUT))

    return [one() for _ in range(count)]


def kept_by(engine: Engine) -> dict[str, int]:
    """Count what requests that have ended left in an engine: pages, requests, and pins."""
    manager = engine.manager
    return {
        "pages_kept": engine.blocks.num_blocks - engine.blocks.num_free,
        "requests_kept": len(engine.scheduler.running) + len(engine.scheduler.waiting),
        "pins_kept": 0 if manager is None else len(manager.pinned_adapters),
    }


def is_right(result: GenerationResult, expected: GenerationResult) -> bool:
    """Check that the tokens of a result are those of the undisturbed one; of one that was cut short, the first."""
    tokens = expected.token_ids
    if result.finish_reason in ("aborted", "failed"):
        tokens = tokens[: len(result.token_ids)]
    return result.token_ids == tokens
