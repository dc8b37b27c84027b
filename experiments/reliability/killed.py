"""Processes that are killed: writers of rows, a server, a tensor-parallel rank; and a clock that jumps."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from typing import IO, cast
from unittest.mock import patch

import httpx2
import torch

from experiments.harness.schema import REPOSITORY
from experiments.measure.records import RowFile, read_rows
from experiments.reliability.faults import BESIDE, Victims
from experiments.reliability.server import BASE, Served, serving
from experiments.reliability.trial import Outcome, Setting, trial
from experiments.reliability.world import make_world
from experiments.reliability.writer import POINTS, row

WRITERS = 2
RANKS = 2
RANK_LIMIT_S = 90.0


@trial("faults", smoke=2, laptop=25, full=500, seconds=30)
def killed_writers(setting: Setting) -> Outcome:
    """Two processes that write rows to one file, one of them killed at random moments; no finished row is lost."""
    choose, outcome = random.Random(setting.seed), Outcome()
    file, acknowledged = setting.folder / "rows.csv", set()
    for turn in range(setting.count):
        words = [sys.executable, "-m", "experiments.reliability.writer", str(file)]
        writers = [
            subprocess.Popen([*words, f"{turn}-{number}"], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
            for number in range(WRITERS)
        ]
        cast(IO[str], writers[0].stdout).readline()
        time.sleep(choose.random() * 0.2)
        writers[0].kill()
        outcome.injected += 1
        for writer in writers:
            said, _ = writer.communicate()
            acknowledged |= {line for line in said.splitlines() if line}
        outcome.expect(writers[1].returncode == 0, f"the other writer ended with {writers[1].returncode}")
        rows = read_rows(file)
        names = Counter(one.system for one in rows)
        outcome.expect(not acknowledged - set(names), f"lost: {sorted(acknowledged - set(names))[:3]}")
        outcome.expect(max(names.values()) == 1, f"twice: {names.most_common(1)}")
        whole = all(one.value == POINTS for one in rows)
        outcome.expect(whole, "a row has another value than was written")
    RowFile(file).replace([row("last")])
    left = [path.name for path in setting.folder.iterdir() if path.suffix == ".tmp"]
    outcome.expect(not left, f"left over: {left}")
    return outcome


@trial("faults", smoke=1, laptop=4, full=50, seconds=60)
def signalled_server(setting: Setting) -> Outcome:
    """SIGINT and SIGTERM to a server at random moments of its requests; it ends, and every client gets an end."""
    choose, outcome = random.Random(setting.seed), Outcome()
    world = make_world(setting.folder, 4, setting.seed, setting.device)
    for number in range(setting.count):
        with serving(world, "--drain=1") as served:
            ends: list[str] = []
            threads = [threading.Thread(target=_ask, args=(served, ends)) for _ in range(BESIDE)]
            for thread in threads:
                thread.start()
            time.sleep(choose.random())
            sent = (signal.SIGINT, signal.SIGTERM)[number % 2]
            served.process.send_signal(sent)
            outcome.injected += 1
            try:
                code = served.process.wait(60)
            except subprocess.TimeoutExpired:
                code = None
            for thread in threads:
                thread.join(60)
            outcome.expect(code in (0, -sent, 128 + sent), f"{sent.name}: exit code {code}")
            said = served.output.read_text()
            outcome.expect("Traceback" not in said, f"{sent.name}: {said}")
            for thread in threads:
                outcome.expect(not thread.is_alive(), f"{sent.name}: a client waits for ever")
    return outcome


def _ask(served: Served, ends: list[str]) -> None:
    """Send requests until the server is gone."""
    body = {"model": BASE, "prompt": [1, 2, 3], "max_tokens": 50, "ignore_eos": True, "stream": True}
    while True:
        try:
            with httpx2.stream("POST", f"{served.url}/v1/completions", json=body, trust_env=False) as answer:
                ends.append(answer.read().decode()[-20:])
        except (httpx2.HTTPError, OSError):
            return


@trial("faults", smoke=1, laptop=4, full=50, seconds=40)
def killed_rank(setting: Setting) -> Outcome:
    """A tensor-parallel rank that is killed between two collectives; the others stop, with one clear error."""
    from punica.parallel import spawn_tensor_parallel

    choose, outcome = random.Random(setting.seed), Outcome()
    for _ in range(setting.count):
        victim, at, begun, error = choose.randrange(RANKS), choose.randrange(1, 50), time.monotonic(), None
        try:
            spawn_tensor_parallel(partial(add_until_killed, victim, at), RANKS, backend="gloo")
        except RuntimeError as caught:
            error = caught
        outcome.injected += 1
        took, named = time.monotonic() - begun, f"rank {victim}" in str(error)
        outcome.expect(named and took < RANK_LIMIT_S, f"{took:.0f} s: {error!r}")
    return outcome


def add_until_killed(victim: int, at: int, rank: int) -> None:
    """Add numbers over the ranks; rank ``victim`` kills itself after ``at`` sums."""
    from punica.parallel import tensor_model_parallel_all_reduce

    for number in range(1000):
        if number == at and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        tensor_model_parallel_all_reduce(torch.ones(4))


@trial("faults", smoke=3, laptop=100, full=2_000, seconds=15)
def clock_backwards(setting: Setting) -> Outcome:
    """A wall clock that jumps back, and files with times of the past; requests and rows are as without."""
    victims = Victims(setting)
    now = [time.time()]

    def jumping() -> float:
        now[0] -= victims.choose.random() * 3600
        victims.outcome.injected += 1
        return now[0]

    files = [RowFile(setting.folder / "rows.csv") for _ in range(WRITERS)]
    with patch("time.time", jumping):
        for number in range(setting.count):
            added = [victims.add() for _ in range(BESIDE)]
            victims.finish()
            victims.judge(added)
            writer = files[number % WRITERS]
            writer.replace([row(str(number))])
            os.utime(writer.path, (now[0] - number, jumping()))
    names = [one.system for one in read_rows(setting.folder / "rows.csv")]
    victims.outcome.expect(names == [str(number) for number in range(setting.count)], f"rows: {names}")
    return victims.ended()
