"""A tiny checkpoint with adapters on disk, engines of it, and the tokens that an undisturbed engine gives."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from punica.adapters import LoRARequest
from punica.engine import Engine, GenerationResult, Request, SamplingParams
from tests.reliability.trial import Trial
from tests.world import LAYERS, VOCAB, Backbone, byte_tokenizer, write_backbone

RANKS = (1, 8, 16, 5)
MAX_RANK, MAX_LEN, BATCH = 16, 64, 8


class Wish(NamedTuple):
    """A prompt, the number of its adapter (-1: none), and the number of new tokens."""

    prompt: tuple[int, ...]
    adapter: int
    new: int


@dataclass(frozen=True)
class World:
    """A checkpoint, its adapters, each with an id of its own, and the trial that wrote them."""

    backbone: Backbone
    trial: Trial

    @property
    def adapters(self) -> list[LoRARequest]:
        return [*self.backbone.adapters.values()]

    def engine(self, slots: int | None = None, **sizes: Any) -> Engine:
        """An engine in float32 with adapter slots for a full batch, or ``slots``."""
        sizes = {"max_batch_size": BATCH, "max_model_len": MAX_LEN, "max_lora_rank": MAX_RANK, **sizes}
        sizes |= {"dtype": "float32", "max_loras": slots or sizes["max_batch_size"] + 1}
        return Engine.from_pretrained(self.backbone.folder, device=self.trial.device, **sizes)

    def adapter(self, wish: Wish) -> LoRARequest | None:
        return None if wish.adapter < 0 else self.adapters[wish.adapter]

    def request(self, name: str, wish: Wish, adapter: LoRARequest | None = None) -> Request:
        """Build a greedy request that only its length ends; with ``adapter`` instead of the one that is wished."""
        params = SamplingParams(wish.new, ignore_eos=True)
        return Request(name, list(wish.prompt), params, adapter or self.adapter(wish))

    def wishes(self, count: int) -> list[Wish]:
        """Draw prompts of 1 to 12 tokens with any adapter or none, and 1 to 12 new tokens."""
        choose, drawn = self.trial.choose, []
        for _ in range(count):
            prompt = tuple(choose.randrange(256) for _ in range(choose.randint(1, 12)))
            drawn.append(Wish(prompt, choose.randrange(-1, len(self.adapters)), choose.randint(1, 12)))
        return drawn

    def undisturbed(self, count: int) -> dict[Wish, GenerationResult]:
        """Draw wishes; return the result of each from an engine that has room for all of them."""
        engine = self.engine()
        states = {wish: engine.add_request(self.request(str(wish), wish)) for wish in dict.fromkeys(self.wishes(count))}
        while engine.has_unfinished():
            engine.step()
        return {wish: engine.result_of(state) for wish, state in states.items()}


def make_world(trial: Trial, count: int) -> World:
    adapters = {number: (RANKS[(number - 1) % 4], LAYERS) for number in range(1, count + 1)}
    sizes = {"vocab_size": VOCAB, "seed": trial.seed}
    return World(write_backbone(trial.folder / "checkpoint", adapters, byte_tokenizer(), **sizes), trial)


def expect_nothing_kept(trial: Trial, engine: Engine) -> None:
    """Count what requests that have ended left in an engine: pages, requests, and pins."""
    assert engine.manager is not None
    pages, requests = engine.blocks.num_blocks - engine.blocks.num_free, engine.scheduler
    kept = {"pages": pages, "requests": len(requests.running) + len(requests.waiting)}
    for name, number in (kept | {"pins": len(engine.manager.pinned_adapters)}).items():
        trial.expect(number == 0, f"{number} {name} kept")


def is_right(result: GenerationResult, expected: GenerationResult) -> bool:
    """Check that the tokens of a result are those of the undisturbed one; of one that was cut short, the first."""
    end = len(result.token_ids) if result.finish_reason in ("aborted", "failed") else None
    return result.token_ids == expected.token_ids[:end]
