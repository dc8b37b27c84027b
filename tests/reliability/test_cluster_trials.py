"""Trials of what a cluster keeps: rows and fetched adapters on a full disk, and requests of runners that are killed."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
