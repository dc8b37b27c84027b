"""Trials of an engine: load and interrupts."""

import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType

from punica.engine import Engine, GenerationResult
from tests.reliability.trial import Trial, sized, use_of
from tests.reliability.world import BATCH, Wish, World, expect_nothing_kept, is_right, make_world

SLOTS, ADAPTERS, KINDS = 4, 40, 160
PAGES, PAGE = 24, 2
"""Pages, and tokens of one; a full batch of the longest requests needs 96."""


@dataclass
class Soak:
    """Requests that are in an engine, and how often each one ended."""

    engine: Engine
    world: World
    expected: dict[Wish, GenerationResult]
    wishes: dict[str, Wish] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0

    def add(self, number: int) -> None:
        """Add one request; one in twenty with an adapter reads its folder again."""
        trial, wish = self.world.trial, self.world.trial.choose.choice(list(self.expected))
        adapter = self.world.adapter(wish)
        if adapter is not None and trial.choose.random() < 0.05:
            adapter = replace(adapter, load_inplace=True)
            trial.injected += 1
        self.wishes[f"request-{number}"] = wish
        self.engine.add_request(self.world.request(f"request-{number}", wish, adapter))

    def end(self, result: GenerationResult) -> None:
        """Count an end: right where it is the only one and the tokens are those of an undisturbed engine."""
        self.ended[result.request_id] += 1
        wish = self.wishes.pop(result.request_id, None)
        right = wish is not None and result.error is None and is_right(result, self.expected[wish])
        self.world.trial.expect(right, f"ended {self.ended[result.request_id]} times: {result}")

    def step(self) -> int:
        output = self.engine.step()
        self.preemptions += output.statistics.num_preempted
        for result in (*output.finished, *output.failed):
            self.end(result)
        return len(output.tokens)

    def run(self, numbers: range) -> float:
        """Send requests beside those that are unfinished and cancel one in twenty; return token/s."""
        begun, tokens, choose = time.perf_counter(), 0, self.world.trial.choose
        for number in numbers:
            self.add(number)
            if choose.random() < 0.05:
                self.world.trial.injected += 1
                self.end(self.engine.abort_request(choose.choice(list(self.wishes))))
            while len(self.wishes) >= 3 * BATCH and self.engine.has_unfinished():
                tokens += self.step()
        return tokens / (time.perf_counter() - begun)


@sized("load", 200, 3_000, 20_000, seconds=90, tiny=50)
def test_engine_soak(trial: Trial) -> None:
    """Requests over ten times more adapters than slots, with cancellations, reloads and few pages."""
    world = make_world(trial, ADAPTERS)
    expected = world.undisturbed(min(KINDS, trial.count))
    engine = world.engine(slots=SLOTS, admission="resident_first", num_blocks=PAGES, block_size=PAGE)
    soak, (warm, rest) = Soak(engine, world, expected), trial.parts()
    for part in warm:
        soak.run(part)
    before = use_of()
    rates = [soak.run(part) for part in rest]
    while engine.has_unfinished():
        soak.step()
    for name in soak.wishes:
        trial.expect(False, f"{name} never ended")
    expect_nothing_kept(trial, engine)
    trial.note_growth(before, use_of())
    trial.values["preemptions"] = (soak.preemptions, "count")
    trial.note_rates(rates, "token/s")


@sized("faults", 5, 300, 5_000, seconds=25, tiny=3)
def test_interrupted_steps(trial: Trial) -> None:
    """SIGINT at random moments of three in ten of an engine's steps; no request loses a token."""
    world = make_world(trial, 6)
    expected, engine = world.undisturbed(24), world.engine(slots=2)
    main, inside, longest = threading.main_thread().ident, False, 0.01

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal inside
        if inside:
            inside = False
            trial.injected += 1
            raise KeyboardInterrupt

    def step() -> None:
        nonlocal inside, longest
        timer = threading.Timer(trial.choose.random() * longest, signal.pthread_kill, (main, signal.SIGINT))
        if trial.choose.random() < 0.3:
            timer.start()
        with suppress(KeyboardInterrupt):
            begun, inside = time.perf_counter(), True
            engine.step()
            inside, longest = False, time.perf_counter() - begun
        timer.cancel()
        if timer.is_alive():
            timer.join()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for turn in range(trial.count):
            wishes = trial.choose.choices(list(expected), k=3)
            states = [engine.add_request(world.request(f"{turn}-{n}", wish)) for n, wish in enumerate(wishes)]
            while not all(state.has_ended for state in states):
                step()
            for wish, state in zip(wishes, states, strict=True):
                result = engine.result_of(state)
                trial.expect(result.error is None and is_right(result, expected[wish]), str(result))
    finally:
        signal.signal(signal.SIGINT, before)
    while engine.has_unfinished():
        engine.step()
    expect_nothing_kept(trial, engine)
