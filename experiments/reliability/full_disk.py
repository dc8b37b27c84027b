"""A full disk, as a limit of the size of files: rows, adapters that are read, and adapters that a runner fetches."""

import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.measure.records import RowFile, RowsError, read_rows
from experiments.reliability.faults import TRIED, Victims
from experiments.reliability.trial import Outcome, Setting, trial
from experiments.reliability.writer import row
from punica.adapters import LoRARequest
from punica.cluster.adapter_files import AdapterFolderCache, StoredFiles, digest_of, read_adapter_files

LARGEST = 4096
"""Bytes; a file of rows, a header or an adapter needs more."""


@contextmanager
def full_disk(choose: random.Random) -> Iterator[None]:
    """Let no file grow beyond a random size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (choose.randrange(LARGEST), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@trial("faults", smoke=2, laptop=60, full=1_000, seconds=15)
def disk_full(setting: Setting) -> Outcome:
    """Files that may not grow: an adapter fails alone, rows stay whole, nothing is left over, a later try works."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    victims = Victims(setting)
    for number in range(setting.count):
        beside = victims.beside()
        wish = victims.choose.choice([wish for wish in victims.expected if wish.adapter >= 0])
        adapter = victims.world.copy(wish.adapter, f"full-{number}", TRIED + number)
        state, refused = None, None
        with full_disk(victims.choose):
            try:
                _, state = victims.add(wish, adapter)
                victims.finish()
            except (OSError, TypeError, ValueError) as error:
                refused = error
        victims.finish()
        victims.judge_fault(state, wish, refused)
        victims.judge(beside)
        write_rows_to(setting.folder / "rows", number, victims)
        fetch(setting.folder, adapter, victims)
    return victims.ended()


def write_rows_to(folder: Path, number: int, victims: Victims) -> None:
    """Write rows to a full disk: one `RowsError`, the rows of before, and no other file; then to one with room."""
    file = RowFile(folder / "rows.csv")
    before = list(file.rows)
    rows = [row(f"{number} {index}") for index in range(40)]
    refused = ""
    with full_disk(victims.choose):
        try:
            file.replace(rows)
        except RowsError as error:
            refused = str(error)
        except OSError as error:
            victims.outcome.notes.append(f"rows: {error!r}")
    victims.outcome.injected += 1
    kept = read_rows(file.path) if file.path.exists() else []
    litter = sorted(path.name for path in folder.iterdir() if path.suffix == ".tmp")
    victims.outcome.expect(bool(refused) and kept == before and not litter, f"rows: {refused} {len(kept)} {litter}")
    file.replace(rows)
    victims.outcome.expect(read_rows(file.path) == [*before, *rows], "rows are not those that were written")


def fetch(folder: Path, adapter: LoRARequest, victims: Victims) -> None:
    """Fetch an adapter to a full disk: an OSError, and no folder; then to one with room."""
    files = read_adapter_files(adapter)
    cache, stored = AdapterFolderCache(lambda content: content, 2), StoredFiles(digest_of(files), files)
    error = None
    with full_disk(victims.choose):
        try:
            cache.local(adapter, stored)
        except OSError as caught:
            error = caught
    victims.outcome.injected += 1
    home = Path(cache.local(adapter, stored).lora_path)
    left = sorted(path.name for path in home.parent.iterdir() if path != home)
    victims.outcome.expect(error is not None and not left, f"fetched: {error!r}, left over: {left}")
    same = read_adapter_files(cache.local(adapter, stored)) == files
    victims.outcome.expect(same, "a fetched adapter is not the stored one")
