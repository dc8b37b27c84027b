"""Commands over many figures: their Hydra entry, and one step per figure that survives the failure of others."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig

from experiments.harness.catalogue import experiments
from experiments.harness.command import given, launch, register, register_app, said_by_hydra
from experiments.harness.experiment import CheckFailed, Experiment
from experiments.harness.schema import BatchConf, ConfigError, validated
from experiments.harness.settings import ALWAYS_READ, Folders, keys_read, refuse_unread
from experiments.measure.records import RowsError, disk_is_full

BATCH_KEYS = ("figures", "source", "allow_dirty")


def batch_main(name: str, doc: str, job: Callable[[DictConfig], int], *reads: str, measures: bool = False) -> None:
    """Command line of `experiments.commands.<name>`: `job(cfg)` gives the exit code; `reads`: further keys it reads,
    with `measures` those of its figures. Other overrides are refused.
    """
    register_app(name, doc.strip(), f"commands.{name}", schema=BatchConf)
    for experiment in experiments():
        register(experiment)

    def task(cfg: DictConfig) -> int:
        cfg.figures = validated(cfg, BatchConf).figures  # 8 is a number to Hydra
        chosen = experiments(cfg.figures) if measures else []
        who = f"any of {', '.join(experiment.name for experiment in chosen)}" if chosen else f"make {name}"
        refuse_unread(given(), {*ALWAYS_READ, *reads}.union(*map(keys_read, chosen)), who)
        return job(cfg)

    launch(name, task)


def sides(places: Folders, source: str) -> dict[str, tuple[Path, Path]]:
    """`fresh` or `recorded`, or for `auto` both in this order -> the folders of its rows and of its figures."""
    both = {"fresh": (places.fresh_rows, places.fresh_figures)}
    both |= {"recorded": (places.recorded_rows, places.recorded_figures)}
    return both if source == "auto" else {source: both[source]}


def composed(experiment: Experiment) -> DictConfig:
    """The configuration of `experiment` under this command's own overrides (scale, hardware, paths, ...)."""
    passed = [text for text in given() if text.lstrip("+~").split("=")[0].split(".")[0] not in BATCH_KEYS]
    return compose(config_name=experiment.name, overrides=passed)


def each(cfg: DictConfig, step: Callable[[Experiment], Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """`step(experiment)` for each chosen figure: results by name, and what went wrong by name, see `noted`."""
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for experiment in experiments(cfg.figures):
        with noted(experiment.name, failures):
            results[experiment.name] = step(experiment)
    return results, failures


@contextmanager
def noted(name: str, failures: dict[str, str], then: str = "") -> Iterator[None]:
    """Note in ``failures`` why the block fails, and print it with what to do ``then``; defects with traceback."""
    try:
        yield
        return
    except (ConfigError, RowsError, CheckFailed, OSError) as error:
        if disk_is_full(error):
            raise
        failures[name] = str(error)
    except HydraException as error:
        failures[name] = said_by_hydra(error)
    except Exception as error:
        traceback.print_exc()
        failures[name] = f"{type(error).__name__}: {error}"
    print(f"{name} failed: {failures[name]}{then}", file=sys.stderr, flush=True)
