"""Tidy rows on disk: one measured quantity and statistic per CSV row, one file per figure, never half written; runs
that write one take turns by a lock. What is damaged is one `RowsError`.
"""

import csv
import errno
import fcntl
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from glob import escape
from math import inf
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

Kind = Literal["measured", "simulated", "paper", "datasheet"]
Statistic = Literal["median", "p10", "p90", "count", "value"]
TIMERS = ("cuda_graph", "host_clock")
"""The clocks of `experiments.measure.timing`, first the one to prefer where a point has rows of several: `cuda_graph`
tells what a call itself costs, `host_clock` (the paper artifact's protocol) counts launch and wait as well."""
DIFFERENCES = ("added_latency", "added_per_token", "stall")
"""Metrics of one time minus another, which may be zero or less."""


class RowsError(RuntimeError):
    """A rows file or its folder cannot be used; the message names the path, the line and the remedy."""


def disk_is_full(error: BaseException | None) -> bool:
    """Check for an error of a disk, a quota or a largest file that is full, or one that is raised from it."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return error is not None and (getattr(error, "errno", None) in full or disk_is_full(error.__cause__))


class ImpossibleRow(RowsError):
    """A row that no measurement can give."""


@dataclass(frozen=True)
class Row:
    """One quantity and statistic, and where it came from, by the spellings of `paper_results/` and the names of
    `conf/`; `None` means "does not apply" and is an empty cell.
    """

    figure: str
    panel: str
    system: str
    workload: str
    model: str
    hardware: str
    batch_size: int | None
    seq_len: int | None
    rank: int | None
    metric: str
    value: float
    unit: str
    kind: Kind = "measured"
    statistic: Statistic = "value"
    timer: str = ""
    scale: str = ""
    config_hash: str = ""
    source_hash: str = ""  # of the code that decided the number; empty in files written before rows knew it
    commit: str = ""
    date: str = ""
    device: str = ""
    python: str = ""
    torch: str = ""
    triton: str = ""
    driver: str = ""
    transformers: str = ""
    peft: str = ""
    numa_nodes: int | None = None
    l3_mib: float | None = None
    repeat: int | None = None  # which of the repeats that are spread in time, 0 first
    disturbed: bool | None = None  # other work on the machine spoilt the interval of this measurement
    other_cpu: float | None = None  # share of CPU time of other processes, and of steal, over that interval
    calib_gemm_us: float | None = None  # a short product and a copy, mean of before and after
    calib_copy_us: float | None = None
    sm_clock_mhz: float | None = None  # of the GPU's multiprocessors, at the end of that interval
    t_s: float | None = None  # of a series over time: seconds from its start
    gpu: int | None = None  # of a quantity of one GPU among many: its number from 0
    cost_model: str = ""  # of a simulated row: what told it the time of a step
    engine: str = ""  # of an engine in another process: its versions and settings
    host_cpu: str = ""  # processor of the host, on a GPU as on a CPU
    cuda: str = ""  # version that torch was built for; empty without a GPU
    power_limit_w: float | None = None  # of the first visible GPU
    calib_launch_us: float | None = None  # of the host per launch of a tiny kernel, mean of before and after

    @property
    def point(self) -> tuple[object, ...]:
        """Identity without settings: a new measurement of the same point replaces the old rows."""
        return (
            self.figure, self.panel, self.system, self.workload, self.model, self.hardware,
            self.batch_size, self.seq_len, self.rank, self.timer,
        )  # fmt: skip


COLUMNS = tuple(field.name for field in fields(Row))
_LATER = ("source_hash", *COLUMNS[COLUMNS.index("transformers") :])
"""Columns that files written before rows knew them may lack: such a row has their default, which is "not known"."""
_TEXTS = {field.name for field in fields(Row) if field.type not in (int | None, float | None, float, bool | None)}
_ROW = TypeAdapter(Row)


def read_rows(path: str | Path) -> list[Row]:
    """All rows of the CSV file `path`, in file order; `RowsError` when it is absent or cannot be read."""
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            return _parse(path, csv.reader(stream, strict=True))
    except FileNotFoundError:
        raise RowsError(f"{path}: no such rows file; measure it first (make figure FIG={path.stem})") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowsError(f"{path}: cannot be read as CSV ({error}); {_remedy(path)}") from None


def _parse(path: Path, lines: Iterator[list[str]]) -> list[Row]:
    header = tuple(next(lines, []))
    if header != tuple(name for name in COLUMNS if name in header or name not in _LATER):
        missing = [name for name in COLUMNS if name not in header and name not in _LATER]
        reason = f"misses the columns {', '.join(missing)}" if missing else f"has the columns {', '.join(header)}"
        raise RowsError(f"{path}, line 1: the header {reason}; {_remedy(path)}")
    rows = []
    for number, cells in enumerate(lines, start=2):
        where = f"{path}, line {number}"
        if len(cells) != len(header):
            raise RowsError(f"{where}: {len(cells)} cells instead of {len(header)}; {_remedy(path)}")
        pairs = zip(header, cells, strict=True)
        try:
            rows.append(_ROW.validate_python({name: cell if cell or name in _TEXTS else None for name, cell in pairs}))
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{first['loc'][0]} is {first['input']!r} ({first['msg']})"
            raise RowsError(f"{where}: {what}; {_remedy(path)}") from None
    return rows


def _remedy(path: Path) -> str:
    return f"repair that line, or delete {path} and measure again (nothing else is lost)"


def write_rows(path: str | Path, rows: Sequence[Row]) -> None:
    """Write `rows` in one step: a reader sees the old file or the new one; `RowsError` keeps the old one."""
    path = Path(path)
    ensure_writable(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            for row in rows:
                writer.writerow(["" if (cell := getattr(row, name)) is None else cell for name in COLUMNS])
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise RowsError(
            f"{path}: {len(rows)} rows cannot be written ({error.strerror or error}), what the file held is kept: make "
            "room there, or choose another folder with paths.outputs=<folder>"
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def ensure_writable(folder: str | Path) -> None:
    """Create `folder` if needed and prove that a file can be written in it; `RowsError` names folder and remedy."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "make room" if disk_is_full(error) else "give yourself write permission"
        raise RowsError(
            f"cannot write in {folder} ({reason}): {remedy} there, or choose another folder with paths.outputs=<folder>"
        ) from error


def refuse_impossible(rows: Iterable[Row]) -> None:
    """Raise `ImpossibleRow` for a measured duration that is not above zero, as a placeholder is, or infinite."""
    for row in rows:
        timed = row.metric.endswith(("latency", "load_time")) and row.metric not in DIFFERENCES
        if timed and row.kind == "measured" and row.statistic != "count" and not 0 < row.value < inf:
            what = f"{row.metric}={row.value} {row.unit} of {row.system or row.panel}, figure {row.figure}"
            rule = "a measured duration must be above 0 and finite; leave out the row of what was not run"
            raise ImpossibleRow(f"{what}: {rule}")


class RowFile:
    """The rows of one figure, in memory and on disk after every point. `replace` drops older rows of the same points
    and repeats; what another process wrote meanwhile is read before a change and kept.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rows: list[Row] = []
        self._read: tuple[int, ...] = ()
        self._refresh()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file's lock, which other processes wait for, with the rows as they are on disk."""
        ensure_writable(self.path.parent)
        with self.path.with_name(f".{self.path.stem}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by the end of the process
            self._refresh()
            yield

    def replace(self, rows: Sequence[Row]) -> None:
        """Add `rows`. Of the same points go older rows of the repeat, and all of other settings or code; the new ones
        take the place of the first of these. `ImpossibleRow` before anything changes.
        """
        refuse_impossible(rows)
        new = {(row.point, row.repeat) for row in rows}
        origin = {row.point: (row.config_hash, row.source_hash) for row in rows}

        def stays(row: Row) -> bool:
            same_origin = origin.get(row.point) in (None, (row.config_hash, row.source_hash))
            return same_origin and (row.point, row.repeat) not in new

        with self.locked():
            place = next((index for index, row in enumerate(self.rows) if not stays(row)), len(self.rows))
            self._write([*self.rows[:place], *rows, *filter(stays, self.rows[place:])])

    def drop(self, points: Collection[tuple[object, ...]]) -> None:
        """Remove all rows of `points` (see `Row.point`), whatever their repeat, and write the file."""
        with self.locked():
            kept = [row for row in self.rows if row.point not in points]
            if len(kept) < len(self.rows):
                self._write(kept)

    def _write(self, rows: list[Row]) -> None:
        """Write the file, and remove what writers that were killed left beside it: the lock says that none writes."""
        for left in self.path.parent.glob(f".{escape(self.path.stem)}-????????.tmp"):
            left.unlink(missing_ok=True)
        write_rows(self.path, rows)
        self.rows, self._read = rows, self._version()

    def _refresh(self) -> None:
        """Read the file unless it is the one that was read or written last."""
        if (version := self._version()) != self._read:
            self.rows, self._read = read_rows(self.path) if version else [], version

    def _version(self) -> tuple[int, ...]:
        """Return inode, size and time of change of the file; empty without one."""
        with suppress(FileNotFoundError, NotADirectoryError):
            found = self.path.stat()
            return found.st_ino, found.st_size, found.st_mtime_ns
        return ()
