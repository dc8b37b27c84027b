"""Faults beside requests that are served: damaged files, full disks, lack of memory, interrupts, broken text."""

import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from experiments.benches.engine_steps import lora_manager
from experiments.reliability.trial import Outcome, Setting, trial
from experiments.reliability.world import Wish, draw_wishes, is_right, kept_by, make_world, poisoned
from punica.adapters import LoRARequest
from punica.adapters.read import WEIGHTS_FILE
from punica.engine import Engine, GenerationResult
from punica.scheduling import RequestState

ADAPTERS, TRIED = 6, 10_001
"""Adapters of the world, and the id of the one that a trial damages."""
INTERRUPTED = 0.3
"""Part of the steps that are interrupted."""
BESIDE = 3
"""Requests beside each fault."""
LARGEST, SMALLEST = 1 << 29, 512
"""Bytes of blocks that take what memory a GPU has: the first tried, and the smallest that torch's allocator has."""
CLEAR = ("ValueError", "TypeError", "FileNotFoundError", "NotADirectoryError", "OSError", "RuntimeError")
"""Documented exceptions of an adapter that cannot be read."""


class Victims:
    """An engine with requests beside which faults happen, and the tokens that they must get."""

    def __init__(self, setting: Setting, **sizes: Any) -> None:
        self.choose, self.outcome = random.Random(setting.seed), Outcome()
        self.world = make_world(setting.folder, ADAPTERS, setting.seed, setting.device)
        self.expected = self.world.undisturbed(draw_wishes(self.world, 24, self.choose))
        self.engine = self.world.engine(**sizes)
        self.count = 0

    def add(self, wish: Wish | None = None, adapter: LoRARequest | None = None) -> tuple[Wish, RequestState]:
        """Add a request for a wish, or for any; ``adapter`` instead of its own."""
        wish = wish or self.choose.choice(list(self.expected))
        self.count += 1
        return wish, self.engine.add_request(self.world.request(f"request-{self.count}", wish, adapter))

    def beside(self) -> list[tuple[Wish, RequestState]]:
        """Add the requests beside a fault and run a step, so that they are in the batch."""
        added = [self.add() for _ in range(BESIDE)]
        self.engine.step()
        return added

    def finish(self) -> dict[str, GenerationResult]:
        """Run until no request is left; return the results that come."""
        return finish(self.engine)

    def judge(self, added: list[tuple[Wish, RequestState]]) -> None:
        """Count requests, each right where it has the tokens of an undisturbed engine."""
        for wish, state in added:
            result = self.engine.result_of(state)
            right = result.error is None and is_right(result, self.expected[wish])
            self.outcome.expect(right, f"{state.request_id}: {result.finish_reason} {result.error} {result.token_ids}")

    def judge_fault(self, state: RequestState | None, wish: Wish, refused: Exception | None = None) -> None:
        """Count the request of a fault: right tokens, or one clear error."""
        self.outcome.injected += 1
        if state is None:
            self.outcome.expect(type(refused).__name__ in CLEAR and bool(str(refused)), repr(refused))
            return
        result = self.engine.result_of(state)
        clear = result.error is not None and result.error.partition(":")[0] in CLEAR
        self.outcome.expect(clear or is_right(result, self.expected[wish]), f"{result.error} {result.token_ids}")

    def ended(self) -> Outcome:
        """Count what is left in the engine; return the outcome."""
        for name, kept in kept_by(self.engine).items():
            self.outcome.expect(kept == 0, f"{name} {kept}")
        return self.outcome


def finish(engine: Engine) -> dict[str, GenerationResult]:
    """Step until no request is left; return all results."""
    results: dict[str, GenerationResult] = {}
    while engine.has_unfinished():
        output = engine.step()
        results |= {result.request_id: result for result in (*output.finished, *output.failed)}
    return results


def damaged_reads(setting: Setting, damage: Callable[[Victims, Path], None], *, during: bool) -> Outcome:
    """Ask for an adapter whose folder is damaged in a thread ``during`` its reading, or between arrival and joining."""
    victims = Victims(setting)
    for number in range(setting.count):
        beside = victims.beside()
        wish = victims.choose.choice([wish for wish in victims.expected if wish.adapter >= 0])
        adapter = victims.world.copy(wish.adapter, f"damaged-{number}", TRIED + number)
        thread = threading.Thread(target=damage, args=(victims, Path(adapter.lora_path)))
        state, refused = None, None
        if during:
            thread.start()
        try:
            _, state = victims.add(wish, adapter)
        except (OSError, TypeError, ValueError) as error:
            refused = error
        if not during:
            thread.start()
            thread.join()
        victims.finish()
        thread.join()
        victims.judge_fault(state, wish, refused)
        victims.judge(beside)
        lora_manager(victims.engine).remove_adapter(adapter.lora_int_id)
        shutil.rmtree(adapter.lora_path, ignore_errors=True)
    return victims.ended()


@trial("faults", smoke=3, laptop=150, full=2_000, seconds=25)
def truncated_adapter(setting: Setting) -> Outcome:
    """An adapter's file that is cut at a random byte while it is checked, read and copied."""

    def cut(victims: Victims, folder: Path) -> None:
        time.sleep(victims.choose.random() * 0.004)
        file = folder / WEIGHTS_FILE
        with file.open("r+b") as opened:
            opened.truncate(victims.choose.randrange(file.stat().st_size))

    return damaged_reads(setting, cut, during=True)


@trial("faults", smoke=3, laptop=150, full=2_000, seconds=25)
def deleted_adapter(setting: Setting) -> Outcome:
    """An adapter's folder that is deleted between the request's arrival and the adapter's activation."""
    return damaged_reads(setting, lambda _, folder: shutil.rmtree(folder), during=False)


@trial("faults", smoke=3, laptop=100, full=2_000, seconds=20)
def poisoned_weights(setting: Setting) -> Outcome:
    """Adapters of NaN, infinite or overflowing weights, in one batch with others."""
    victims = Victims(setting)
    adapters = poisoned(victims.world)
    for number in range(setting.count):
        beside = victims.beside()
        wish, state = victims.add(adapter=adapters[number % len(adapters)])
        victims.finish()
        result = victims.engine.result_of(state)
        victims.outcome.injected += 1
        told = result.error is not None and ("NaN" in result.error or "inf" in result.error)
        victims.outcome.expect(told and result.token_ids == [], f"{wish}: {result.error} {result.token_ids}")
        victims.judge(beside)
    return victims.ended()


@trial("faults", smoke=5, laptop=200, full=2_000, seconds=20)
def tokenizer_that_raises(setting: Setting) -> Outcome:
    """A tokenizer that raises at random decodings; the requests that it decoded for fail alone, and once."""
    victims = Victims(setting)
    codec: Any = victims.engine.codec
    real, broken = codec.decode, [0]

    def decode(*given: Any, **options: Any) -> str:
        if victims.choose.random() < 0.2:
            broken[0] += 1
            raise KeyError("no such token")
        return real(*given, **options)

    codec.decode = decode
    for _ in range(setting.count):
        added = [victims.add() for _ in range(BESIDE)]
        results = victims.finish()
        for wish, state in added:
            result = results.get(state.request_id)
            told = result is not None and (result.error is None or "KeyError" in result.error)
            right = result is not None and told and is_right(result, victims.expected[wish])
            victims.outcome.expect(right, f"{state.request_id}: {result}")
    victims.outcome.injected = broken[0]
    return victims.ended()


@contextmanager
def _memory_that_runs_out(victims: Victims) -> Iterator[None]:
    """Let allocations fail: at the copy into a slot, at the model's start, or on a GPU wherever one is made."""
    places = ((victims.engine.runner, "launch"), (victims.engine.manager, "add_adapter"))
    place = victims.choose.choice((*places, None) if victims.world.device != "cpu" else places)
    if place is None:
        with _no_memory_left():
            yield
        return
    owner, name = place
    setattr(owner, name, _out_of_memory)
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def _no_memory_left() -> Iterator[None]:
    """Take all memory of the GPU that this process may have: a step replays what is captured, and allocates nothing."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    taken, size = [], LARGEST
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        while size >= SMALLEST:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("none left")


@trial("faults", smoke=5, laptop=200, full=2_000, seconds=20)
def out_of_memory(setting: Setting) -> Outcome:
    """Lack of memory at the allocation of a slot and in the middle of a step; the next step continues."""
    victims = Victims(setting, slots=2)
    for _ in range(setting.count):
        added = [victims.add() for _ in range(BESIDE)]
        while victims.engine.has_unfinished():
            if victims.choose.random() < 0.2:
                try:
                    with _memory_that_runs_out(victims):
                        victims.engine.step()
                except torch.OutOfMemoryError:
                    victims.outcome.injected += 1
            victims.engine.step()
        victims.judge(added)
    victims.outcome.expect(victims.outcome.injected > 0, "no step was ever without memory")
    return victims.ended()


@trial("faults", smoke=5, laptop=300, full=5_000, seconds=25)
def interrupted_steps(setting: Setting) -> Outcome:
    """SIGINT at random moments of an engine's steps; no request loses a token."""
    victims = Victims(setting, slots=2)
    inside = [False]

    def interrupt(_: int, frame: FrameType | None) -> None:
        if inside[0]:
            inside[0] = False
            victims.outcome.injected += 1
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    main, longest = threading.main_thread().ident, 0.01
    for _ in range(setting.count):
        added = [victims.add() for _ in range(BESIDE)]
        while any(not state.has_ended for _, state in added):
            timer = threading.Timer(victims.choose.random() * longest, signal.pthread_kill, (main, signal.SIGINT))
            if victims.choose.random() < INTERRUPTED:
                timer.start()
            begun, inside[0] = time.perf_counter(), True
            try:
                victims.engine.step()
                inside[0], longest = False, time.perf_counter() - begun
            except KeyboardInterrupt:
                pass
            timer.cancel()
        victims.judge(added)
    inside[0] = False
    victims.finish()
    return victims.ended()
