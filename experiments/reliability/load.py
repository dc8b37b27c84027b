"""Load: an engine alone, with more adapters than slots, cancellations, reloads, and pages that run out."""

import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

from experiments.reliability.trial import Outcome, Setting, trial
from experiments.reliability.use import Use, drift
from experiments.reliability.world import BATCH, Wish, World, draw_wishes, is_right, kept_by, make_world
from punica.engine import Engine, GenerationResult

SLOTS, ADAPTERS, KINDS = 4, 40, 160
PAGES, PAGE = 24, 2
"""Pages, and tokens of one; a full batch of the longest requests needs 96."""
WAITING = 3 * BATCH
WINDOWS = 40
"""Most parts of the requests; after a fifth of them the use of memory and the throughput are compared."""


@dataclass
class Soak:
    """Requests that are in an engine, and how often each one ended."""

    engine: Engine
    world: World
    choose: random.Random
    expected: dict[Wish, GenerationResult]
    outcome: Outcome
    wishes: dict[str, Wish] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0

    def add(self, number: int) -> None:
        """Add one request; one in twenty with an adapter reads its folder again."""
        name, wish = f"request-{number}", self.choose.choice(list(self.expected))
        adapter = self.world.adapter(wish)
        if adapter is not None and self.choose.random() < 0.05:
            adapter = replace(adapter, load_inplace=True)
            self.outcome.injected += 1
        self.wishes[name] = wish
        self.engine.add_request(self.world.request(name, wish, adapter))

    def cancel(self) -> None:
        """Abort one unfinished request."""
        name = self.choose.choice(list(self.wishes))
        self.outcome.injected += 1
        self.end(self.engine.abort_request(name))

    def end(self, result: GenerationResult) -> None:
        """Count an end: right where it is the only one and the tokens are those of an undisturbed engine."""
        name = result.request_id
        self.ended[name] += 1
        wish = self.wishes.pop(name, None)
        if wish is None:
            self.outcome.expect(False, f"{name} ended {self.ended[name]} times")
            return
        right = result.error is None and is_right(result, self.expected[wish])
        self.outcome.expect(right, f"{name}: {result.finish_reason} {result.error} {result.token_ids}")

    def step(self) -> int:
        """Run one step; return its number of tokens."""
        output = self.engine.step()
        self.preemptions += output.statistics.num_preempted
        for result in (*output.finished, *output.failed):
            self.end(result)
        return len(output.tokens)

    def run(self, first: int, count: int) -> float:
        """Send ``count`` requests beside those that are unfinished; return token/s."""
        begun, tokens = time.perf_counter(), 0
        for number in range(first, first + count):
            self.add(number)
            if self.choose.random() < 0.05:
                self.cancel()
            while len(self.wishes) >= WAITING and self.engine.has_unfinished():
                tokens += self.step()
        return tokens / (time.perf_counter() - begun)


@trial("load", smoke=200, laptop=3_000, full=20_000, seconds=90)
def engine_soak(setting: Setting) -> Outcome:
    """Requests over ten times more adapters than slots, with cancellations, reloads and few pages."""
    choose, outcome = random.Random(setting.seed), Outcome()
    world = make_world(setting.folder, ADAPTERS, setting.seed, setting.device)
    expected = world.undisturbed(draw_wishes(world, min(KINDS, setting.count), choose))
    engine = world.engine(slots=SLOTS, admission="resident_first", num_blocks=PAGES, block_size=PAGE)
    soak, windows = Soak(engine, world, choose, expected, outcome), max(1, min(WINDOWS, setting.count // (2 * WAITING)))
    starts = [setting.count * window // windows for window in range(windows + 1)]
    soak.run(0, starts[windows // 5])
    before = Use.of()
    rates = [soak.run(start, end - start) for start, end in pairwise(starts[windows // 5 :])]
    while engine.has_unfinished():
        soak.step()
    for name in soak.wishes:
        outcome.expect(False, f"{name} never ended")
    for name, kept in kept_by(engine).items():
        outcome.expect(kept == 0, f"{name} {kept}")
    after = Use.of()
    outcome.expect(not after.leaks(before), f"left over: {after.leaks(before)}")
    outcome.values |= after.growth(before) | {
        "preemptions": (soak.preemptions, "count"), "throughput": (statistics.median(rates), "token/s"),
        "throughput_drift": (drift(rates), "%"),
    }  # fmt: skip
    return outcome
