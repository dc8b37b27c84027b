"""Machines: the rows of a folder with the verdicts on them, and the age of rows. One is older where today's tree would
not measure it so: by code or data (`harness.source`), and of recorded rows by settings of `conf/`, or torch and triton.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from experiments.claims import Verdict, judge
from experiments.claims.rows import Rows
from experiments.harness.catalogue import recorded_sets
from experiments.harness.counted import counted, frame_of, merged
from experiments.harness.schema import CONF, REPOSITORY
from experiments.harness.source import fingerprint
from experiments.measure.records import COLUMNS, read_rows

HERE = "this machine"
VERDICTS = "claims.csv"
"""Table of the verdicts beside the rows."""
TRIALS = "reliability.csv"
NO_SCRIPT = (VERDICTS, TRIALS)
"""Files beside the rows that are of no script of `experiments/`: verdicts, and trials, of `tests/reliability`."""
OPERATOR_TABLES = "operator tables"


@dataclass(frozen=True)
class Machine:
    """One machine: ``name`` (`HERE` for fresh rows), ``folder`` of rows and ``figures``, ``rows`` with ``older``,
    ``verdicts`` by the clock that decides each, ``paper``: ``paper_results``.
    """

    name: str
    folder: Path
    figures: Path
    rows: pd.DataFrame
    verdicts: Sequence[Verdict]
    paper: Path

    @cached_property
    def whose(self) -> str:
        """Text of ``FROM.md`` beside the rows: who measured them, where that was not this project. Else empty."""
        return " ".join(word for note in self.folder.glob("FROM.md") for word in note.read_text("utf-8").split())

    @cached_property
    def chosen(self) -> Rows:
        return Rows(self.rows)

    def points(self, figure: str) -> pd.DataFrame:
        """Return the rows of ``figure`` that count, one per point and statistic."""
        return merged(counted(self.rows[self.rows["figure"].eq(figure)]))


def machine_of(folder: Path, figures: Path, paper: Path, name: str = HERE) -> Machine:
    """Read and judge the rows in ``folder``; ``paper`` is ``paper_results``."""
    rows = read_folder(folder)
    return Machine(name, folder, figures, rows, judge(rows, paper), paper)


def recorded_machines(results: Path, figures: Path, paper: Path) -> list[Machine]:
    """Read and judge every folder of rows in ``results``, by name; ``figures`` has a folder of figures for each."""
    return [machine_of(folder, figures / folder.name, paper, folder.name) for folder in recorded_folders(results)]


def recorded_folders(results: Path) -> list[Path]:
    return sorted(path for path in results.glob("*") if path.is_dir() and rows_files(path))


def rows_files(folder: Path) -> list[Path]:
    """Return the files of figures' rows in ``folder``, by name: all tables but `NO_SCRIPT`."""
    return [path for path in sorted(folder.glob("*.csv")) if path.name not in NO_SCRIPT]


def read_folder(folder: Path) -> pd.DataFrame:
    """All rows of all figures in ``folder``, with a column ``older``; RowsError when a file is damaged."""
    read = {path: frame_of(read_rows(path)) for path in rows_files(folder)}
    frames = [rows.assign(older=older(rows, path)) for path, rows in read.items()]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*COLUMNS, "older"])


def older_share(rows: pd.DataFrame) -> str:
    """Return the number of rows that were measured by other code than is here now, and their share."""
    found = int(rows["older"].astype(bool).sum())
    return f"{found:,} of {len(rows):,} ({100 * found / len(rows):.1f} %)"


def said(value: float, digits: int = 3) -> str:
    """Write ``value`` with so many significant digits, whole numbers of more digits in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


RECORDED = REPOSITORY / "results"
NO_NUMBER = {"title", "minutes", "passes", "tries", "name"}
"""Settings that decide no number, or are a name of the others."""


def older(rows: pd.DataFrame, path: Path) -> pd.Series:
    """Tell which ``rows`` of the file ``path`` are older; all where its script was renamed or deleted."""
    script = REPOSITORY / "experiments" / f"{path.stem}.py"
    if not script.is_file():
        return pd.Series(True, rows.index)
    old = rows["source_hash"].ne(fingerprint(script))
    if not path.is_relative_to(RECORDED):
        return old
    recorded = path.with_suffix(".json")
    settings = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else {}
    if changed_settings(script.stem, settings):
        old |= rows["scale"].eq(settings["scale"]["name"])
    return old | other_versions(rows)


def other_versions(rows: pd.DataFrame) -> pd.Series:
    """Tell which ``rows`` are of another torch or triton than is pinned for their hardware."""
    other = pd.Series(False, rows.index)
    for hardware, part in rows.groupby("hardware"):
        for name, pinned in pinned_versions(str(hardware)).items():
            other.loc[part.index] |= part[name].fillna("").map(_minor).ne(_minor(pinned))
    return other


@cache
def pinned_versions(hardware: str) -> dict[str, str]:
    name = "constraints.txt" if hardware == "cpu" else "constraints-gpu.txt"
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^(torch|triton)==(\S+)$", text, flags=re.MULTILINE))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def changed_settings(script: str, recorded: dict[str, Any]) -> list[str]:
    """Settings of ``recorded`` that `conf/` has otherwise today, but those chosen by a set, null, and lists."""
    today = dict(_conf(script, recorded))
    whole = OmegaConf.create({**recorded, **{group: {**recorded[group], **today[group]} for group in today}})
    found = []
    for group, values in today.items():
        for key in (values.keys() & recorded[group].keys()) - NO_NUMBER:
            value = OmegaConf.select(whole, f"{group}.{key}", throw_on_resolution_failure=False)
            chosen = f"{group}.{key}" in _overridden(script) or OmegaConf.is_config(value)
            if not chosen and None not in (value, recorded[group][key]) and value != recorded[group][key]:
                found.append(f"{group}.{key}")
    return sorted(found)


def _conf(script: str, recorded: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield groups of settings with the values of the files in `conf/` that the rows were measured by."""
    for group, values in recorded.items():
        name = script if group == "figure" else values.get("name") if isinstance(values, dict) else None
        path = CONF / group / f"{name}.yaml"
        if name and path.is_file():
            loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
            sizes = loaded.get("sizes", {}).get(recorded["scale"]["name"], {})
            yield group, {**loaded.get(group, loaded), **sizes}  # a scale's file is of the whole configuration


@cache
def _overridden(script: str) -> set[str]:
    """Return the settings that recorded sets of a script choose for themselves."""
    words = " ".join(one.run for sets in recorded_sets().values() for one in sets if script in one.run.split())
    return set(re.findall(r"([\w.]+)=", words))
