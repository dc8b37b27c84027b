"""From a composed configuration to one that can run: `auto` is decided, names are checked, folders are known."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from omegaconf import DictConfig, OmegaConf

from experiments.harness.schema import (
    CONF,
    REPOSITORY,
    Config,
    ConfigError,
    HardwareConf,
    TimerConf,
    check_ranges,
    choice,
)
from experiments.measure import environment
from experiments.measure.records import TIMERS
from experiments.workload.popularity import WORKLOADS

if TYPE_CHECKING:
    from experiments.harness.experiment import Experiment


AUTO = "auto"
HOST_CLOCK = TIMERS[-1]
ALWAYS_READ = ("hardware", "scale.name", "scale.passes", "scale.tries", "paths")


@dataclass(frozen=True)
class Folders:
    """Folders of one hardware's rows and figures: `fresh` ones are this machine's, `recorded` ones are committed."""

    fresh_rows: Path
    fresh_figures: Path
    recorded_rows: Path
    recorded_figures: Path
    paper: Path


def folders(cfg: Config | DictConfig) -> Folders:
    """Return the folders of `cfg.hardware` and `cfg.scale`; smoke rows have their own, lest they replace real ones."""
    hardware = cfg.hardware.name
    root = {name: REPOSITORY / getattr(cfg.paths, name) for name in ("outputs", "results", "figures", "paper_results")}
    fresh = root["outputs"] / hardware
    fresh = fresh / "smoke" if cfg.scale.name == "smoke" else fresh
    return Folders(
        fresh_rows=fresh / "rows",
        fresh_figures=fresh / "figures",
        recorded_rows=root["results"] / hardware,
        recorded_figures=root["figures"] / hardware,
        paper=root["paper_results"],
    )


def settle(cfg: DictConfig, experiment: Experiment) -> Config:
    """`cfg` as typed objects with hardware, timer, workloads and systems decided for `experiment`.

    Raises `ConfigError` for a choice that this machine or figure does not have.
    """
    cfg = cfg.copy()
    if OmegaConf.is_missing(cfg, "figure") or cfg.figure is None:
        raise ConfigError(f"figure is not chosen: run python -m experiments.{experiment.name}")
    cfg.hardware = settle_hardware(cfg.hardware)
    settled = cast(Config, OmegaConf.to_object(cfg))
    check_ranges(settled)
    if not isinstance(settled.figure, experiment.conf):
        raise ConfigError(
            f"figure={settled.figure.title!r} is not {experiment.name}'s own: leave figure= out, or run its script"
        )
    settled.timer.name = experiment.clock or _timer(settled.timer.name, settled.hardware.device)
    settled.workload.names = _workloads(settled)
    settled.system.names = _systems(settled, experiment)
    return settled


def by_clocks(cfg: DictConfig, settled: Config, experiment: Experiment) -> dict[str, Config]:
    """Map every clock that is to time `experiment` to `settled` with that clock: the one of `settled`, and where
    `cfg` leaves the choice for operators on a GPU before it the host's, which is the paper's and decides most claims.
    """
    clocks = [settled.timer.name]
    if experiment.host_clock_too and cfg.timer.name == AUTO and settled.hardware.device == "cuda":
        clocks = [HOST_CLOCK, *clocks]
    return {clock: replace(settled, timer=TimerConf(clock)) for clock in clocks}


def settle_hardware(hardware: DictConfig) -> DictConfig:
    """`hardware` with nulls filled in from `conf/hardware/<name>.yaml`, the number of CPU threads and, on a CPU, how
    much empties the caches decided.
    """
    known = CONF / "hardware" / f"{hardware.name}.yaml"
    usual = dict(OmegaConf.load(known)) if known.exists() else {"flush_mib": HardwareConf.flush_mib}  # type: ignore[arg-type]
    for key in ("bandwidth_gb_s", "tflop_s", "flush_mib"):
        if hardware[key] is None:
            hardware[key] = usual.get(key)
    if hardware.device not in ("cpu", "cuda"):
        raise ConfigError(f"hardware.device={hardware.device!r} must be cpu or cuda: choose hardware=auto")
    if hardware.flush_mib is None:
        hardware.flush_mib = _beyond_the_caches()
    if hardware.threads is None:
        set_by_user = os.environ.get("OMP_NUM_THREADS", "")
        hardware.threads = int(set_by_user) if set_by_user.isdigit() else environment.usable_cores()
    return hardware


def _beyond_the_caches() -> int:
    """MiB that no cache of this CPU holds: an eighth more than its last level, or 64 where that is less or unknown."""
    return max(64, math.ceil(1.125 * (environment.l3_mib() or 0)))


def _timer(name: str, device: str) -> str:
    allowed = TIMERS if device == "cuda" else (HOST_CLOCK,)
    if name == AUTO:
        return allowed[0]
    if name not in allowed:
        raise ConfigError(f"timer={name!r} does not exist on {device}: choose timer={' or timer='.join(allowed)}")
    return name


def _workloads(cfg: Config) -> list[str]:
    names = cfg.workload.names or cfg.figure.workloads
    for name in names:
        if name not in WORKLOADS.names():
            raise ConfigError(
                f"workload.names has {name!r}, which is unknown; known: {', '.join(WORKLOADS.names())}. "
                "Choose workload=all or one of these, or register yours in experiments/workload/popularity.py"
            )
    return list(names)


def _systems(cfg: Config, experiment: Experiment) -> list[str]:
    known, chosen = experiment.known_systems(cfg), []
    for name in cfg.system.names:
        found = [own for own in known if name in (own, choice(own))]
        if not found:
            raise ConfigError(
                f"system.names has {name!r}, which {experiment.name} does not have; it has {', '.join(known)}. "
                "Choose system=all or one of these"
            )
        chosen += found
    return chosen or list(cfg.figure.systems)


def keys_read(experiment: Experiment) -> set[str]:
    """Return groups (`model`) and keys (`adapters.ranks`) of the configuration that decide what `experiment` measures:
    those that all experiments read, that it declares (`Experiment.reads`), that its `conf/figure/<name>.yaml`
    interpolates, and `timer` unless it has its own clock.
    """
    interpolated = re.findall(r"\$\{(\w+\.\w+)", (CONF / "figure" / f"{experiment.name}.yaml").read_text("utf-8"))
    timer = [] if experiment.clock else ["timer"]
    return {"figure", "system", "force", "draw", *ALWAYS_READ, *timer, *experiment.reads, *interpolated}


def is_read(key: str, keys: Iterable[str]) -> bool:
    """Check that `key` is one of `keys`, a part of one, or contains one."""
    return any(f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}.") for known in keys)


def refuse_unread(given: Iterable[str], keys: Collection[str], who: str) -> None:
    """Raise `ConfigError` for the first of the command line's overrides `given` that is none of `keys` (`is_read`):
    it would have no effect, but be in the configuration that is kept beside the rows.
    """
    for override in given:
        key = re.split(r"[=@]", override.lstrip("+~"))[0]
        if not is_read(key, keys):
            raise ConfigError(f"{override} would change nothing, {key} is not read by {who}: leave it out")
