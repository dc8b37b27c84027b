"""Trials of what a cluster keeps: rows and fetched adapters on a full disk, and requests of runners that are killed."""

import os
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from experiments.measure.records import Row, RowFile, RowsError, read_rows
from punica.cluster.adapter_files import AdapterFolderCache, StoredFiles, digest_of, read_adapter_files
from tests.reliability.trial import Trial, sized
from tests.reliability.world import make_world

LARGEST_FILE = 4096
"""Bytes; a file of rows or an adapter needs more."""


@contextmanager
def full_disk(trial: Trial) -> Iterator[bool]:
    """Let no file grow beyond a random size, so that what writes one is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (trial.choose.randrange(LARGEST_FILE), hard))
    trial.injected += 1
    try:
        yield True
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@sized("faults", 2, 60, 1_000, seconds=5, tiny=1)
def test_disk_full(trial: Trial) -> None:
    """Files that may not grow: rows stay whole, an adapter is not fetched in part, and a later try works."""
    world = make_world(trial, 4)
    for number in range(trial.count):
        write_rows(trial, trial.folder / "rows" / "rows.csv", number)
        adapter = trial.choose.choice(world.adapters)
        files = read_adapter_files(adapter)
        cache, stored = AdapterFolderCache(lambda content: content, 2), StoredFiles(digest_of(files), files)
        with full_disk(trial) as refused, suppress(OSError):
            cache.local(adapter, stored)
            refused = False
        home = Path(cache.local(adapter, stored).lora_path)
        left = sorted(path.name for path in home.parent.iterdir() if path != home)
        trial.expect(refused and not left, f"fetched: refused {refused}, left over: {left}")
        trial.expect(read_adapter_files(cache.local(adapter, stored)) == files, "a fetched adapter is another one")


def write_rows(trial: Trial, path: Path, number: int) -> None:
    """Write rows to a full disk: one `RowsError`, the rows of before, and no other file; then to one with room."""
    file = RowFile(path)
    before = list(file.rows)
    rows = [Row("", "", f"{number} {n}", "", "", "", None, None, None, "", n, "") for n in range(40)]
    with full_disk(trial) as refused, suppress(RowsError):
        file.replace(rows)
        refused = False
    kept = read_rows(path) if path.exists() else []
    litter = sorted(path.parent.glob("*.tmp"))
    trial.expect(refused and kept == before and not litter, f"rows: refused {refused}, {len(kept)} {litter}")
    file.replace(rows)
    trial.expect(read_rows(path) == [*before, *rows], "rows are not those that were written")


@sized("faults", 1, 3, 100, seconds=80)
def test_killed_runner(trial: Trial) -> None:
    """A runner of two that is killed at a random token; the other finishes its requests, and it is started again."""
    ray = pytest.importorskip("ray", reason="needs the extra cluster: pip install 'punica[cluster]'")
    from punica.cluster.ray_cluster import RayCluster

    world = make_world(trial, 6)
    expected, choose = world.undisturbed(24), trial.choose
    with RayCluster(world.builder(), 2) as cluster:
        for turn in range(trial.count):
            wishes = {f"{turn}-{number}": choose.choice(list(expected)) for number in range(12)}
            for name, wish in wishes.items():
                cluster.add_request(world.request(name, wish))
            results: dict[str, Any] = {}
            ended, at, seen = Counter[str](), choose.randrange(1, 40), 0
            while cluster.has_unfinished():
                output = cluster.step()
                for result in (*output.finished, *output.failed):
                    results[result.request_id] = result
                    ended[result.request_id] += 1
                before, seen = seen, seen + len(output.tokens)
                if before < at <= seen:
                    actor = choose.choice(list(cluster.runners.values())).actors[0]
                    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
                    trial.injected += 1
            for name, wish in wishes.items():
                right = ended[name] == 1 and results[name].token_ids == expected[wish].token_ids
                trial.expect(right, f"{name} ended {ended[name]} times: {results.get(name)}")
            while len(cluster.working_sets) < 2:
                cluster.step()
