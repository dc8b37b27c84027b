"""Age of rows: one is older where today's tree would not measure it so: by code or data (`harness.source`), and of
recorded rows by settings of `conf/`, or torch and triton.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from experiments.harness.catalogue import recorded_sets
from experiments.harness.schema import CONF, REPOSITORY
from experiments.harness.source import fingerprint

RECORDED = REPOSITORY / "results"
NO_NUMBER = {"title", "minutes", "passes", "tries", "name"}
"""Settings that decide no number, or are a name of the others."""


def older(rows: pd.DataFrame, path: Path) -> pd.Series:
    """Tell which ``rows`` of the file ``path`` are older; all where its script was renamed or deleted."""
    script = script_of(path)
    if script is None:
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


def script_of(rows_file: Path) -> Path | None:
    """Return the script of `experiments/` that writes ``rows_file``; None where it was renamed or deleted."""
    path = REPOSITORY / "experiments" / f"{rows_file.stem}.py"
    return path if path.is_file() else None


@cache
def pinned_versions(hardware: str) -> dict[str, str]:
    """Return the pinned versions of torch and triton for rows of ``hardware``."""
    name = "constraints.txt" if hardware == "cpu" else "constraints-gpu.txt"
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^(torch|triton)==(\S+)$", text, flags=re.MULTILINE))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def changed_settings(script: str, recorded: dict[str, Any]) -> list[str]:
    """Settings of ``recorded`` that `conf/` has otherwise today, but those that a recorded set chooses, null, and
    lists.
    """
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
            yield group, loaded.get(group, loaded)  # a scale's file is of the whole configuration


@cache
def _overridden(script: str) -> set[str]:
    """Return the settings that recorded sets of a script choose for themselves."""
    words = " ".join(one.run for sets in recorded_sets().values() for one in sets if script in one.run.split())
    return set(re.findall(r"([\w.]+)=", words))
