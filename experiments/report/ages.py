"""Age of recorded rows: a row is older where today's tree would not measure it so.

That is where code and data (`harness.source`), settings of `conf/`, or torch and triton (major and minor) are others.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from experiments.benches.operator_lines import TABLES
from experiments.commands.record_all import recording
from experiments.harness.schema import CONF, REPOSITORY
from experiments.harness.source import fingerprint

WRITERS = {f"ext_operator_tables_{table}": "ext_operator_tables" for table in TABLES}
"""Rows file -> its script, where it does not have the script's name."""
NO_NUMBER = {"title", "minutes", "passes", "tries", "name"}
"""Settings that decide no number, or are a name of the others."""
VERSIONS = {"cpu": "constraints.txt"}
OTHER_VERSIONS = "constraints-gpu.txt"
"""Pinned versions of rows by hardware; of GPUs."""


def older(rows: pd.DataFrame, path: Path) -> pd.Series:
    """Tell which ``rows`` of the file ``path`` are older; all where its script was renamed or deleted."""
    script = script_of(path)
    if script is None:
        return pd.Series(True, rows.index)
    old = rows["source_hash"].ne(fingerprint(script))
    for name, pinned in pinned_versions(path.parent.name).items():
        old |= rows[name].fillna("").map(_minor).ne(_minor(pinned))
    recorded = path.with_suffix(".json")
    if recorded.exists():
        settings = json.loads(recorded.read_text(encoding="utf-8"))
        if changed_settings(script.stem, settings):
            old |= rows["scale"].eq(settings["scale"]["name"])
    return old


def script_of(rows_file: Path) -> Path | None:
    """Return the script of `experiments/` that writes ``rows_file``; None where it was renamed or deleted."""
    path = REPOSITORY / "experiments" / f"{WRITERS.get(rows_file.stem, rows_file.stem)}.py"
    return path if path.is_file() else None


@cache
def pinned_versions(hardware: str) -> dict[str, str]:
    """Return the pinned versions of torch and triton for rows of ``hardware``."""
    text = (REPOSITORY / VERSIONS.get(hardware, OTHER_VERSIONS)).read_text(encoding="utf-8")
    return dict(re.findall(r"^(torch|triton)==(\S+)$", text, flags=re.MULTILINE))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def changed_settings(script: str, recorded: dict[str, Any]) -> list[str]:
    """List the settings of ``recorded``, the JSON beside rows, that `conf/` has otherwise today.

    Those that a recorded set of ``conf/recording.yaml`` overrides are its own, and not compared.
    """
    overridden = _overridden(script)
    content = {**recorded, **{group: values for group, values in _today(script, recorded)}}
    today: Any = OmegaConf.to_container(OmegaConf.create(content))
    found = []
    for group, _ in _today(script, recorded):
        for key, value in _resolved(today, group).items():
            name = f"{group}.{key}"
            if key not in NO_NUMBER and name not in overridden and recorded[group].get(key) != value:
                found.append(name)
    return found


def _today(script: str, recorded: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield groups of settings with their values in `conf/`, of those files that the rows were measured by."""
    for group, values in recorded.items():
        if not isinstance(values, dict):
            continue
        path = CONF / group / f"{script if group == 'figure' else values.get('name')}.yaml"
        if path.is_file():
            loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
            loaded = loaded.get(group, loaded)  # a scale is of the whole configuration
            yield group, {**values, **{key: value for key, value in loaded.items() if key != "defaults"}}


def _resolved(content: dict[str, Any], group: str) -> dict[str, Any]:
    """Return a group with the values that it takes from others; without those that rows do not have."""
    whole, found = OmegaConf.create(content), {}
    for key, value in content[group].items():
        named = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        resolved = OmegaConf.select(whole, named[1], default=None) if named else value
        if named is None or resolved is not None:
            found[key] = OmegaConf.to_container(resolved) if OmegaConf.is_config(resolved) else resolved
    return found


@cache
def _overridden(script: str) -> set[str]:
    """Return the settings that recorded sets of a script choose for themselves."""
    words = " ".join(one["run"] for sets in recording().values() for one in sets if script in one["run"].split())
    return set(re.findall(r"([\w.]+)=", words))
