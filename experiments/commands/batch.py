"""Commands over many figures: their Hydra entry, and one step per figure that survives the failure of others."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig

from experiments.harness.catalogue import experiments
from experiments.harness.command import given, launch, register
from experiments.harness.experiment import CheckFailed, Experiment
from experiments.harness.schema import ConfigError, register_app
from experiments.harness.settings import ALWAYS_READ, Folders, keys_read, refuse_unread
from punica.measure.records import RowsError

SOURCES = ("auto", "fresh", "recorded")
BATCH_KEYS = ("figures", "source", "allow_dirty", "commit")


def batch_main(name: str, doc: str, job: Callable[[DictConfig], int], *reads: str, measures: bool = False) -> None:
    """Command line of `experiments.commands.<name>`: `job(cfg)` returns the exit code.

    `reads`: the keys that it reads beside hardware, scale and folders; with `measures` also what the chosen figures
    read. An override of any other key is refused.
    """
    register_app(name, doc.strip(), f"commands.{name}", schema="batch")
    for experiment in experiments():
        register(experiment)

    def task(cfg: DictConfig) -> int:
        chosen = experiments(cfg.figures) if measures else []
        who = f"any of {', '.join(experiment.name for experiment in chosen)}" if chosen else f"make {name}"
        refuse_unread(given(), {*ALWAYS_READ, *reads}.union(*map(keys_read, chosen)), who)
        return job(cfg)

    launch(name, task)


def sides(places: Folders, source: str) -> dict[str, tuple[Path, Path]]:
    """`fresh` or `recorded`, or for `auto` both in this order -> the folders of its rows and of its figures."""
    if source not in SOURCES:
        raise ConfigError(f"source={source!r} must be one of {', '.join(SOURCES)}: choose source=auto")
    fresh, recorded = (places.fresh_rows, places.fresh_figures), (places.recorded_rows, places.recorded_figures)
    both = {"fresh": fresh, "recorded": recorded}
    return both if source == "auto" else {source: both[source]}


def composed(experiment: Experiment) -> DictConfig:
    """The configuration of `experiment` under this command's own overrides (scale, hardware, paths, ...)."""
    passed = [text for text in given() if text.lstrip("+~").split("=")[0].split(".")[0] not in BATCH_KEYS]
    return compose(config_name=experiment.name, overrides=passed)


def each(cfg: DictConfig, step: Callable[[Experiment], Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """`step(experiment)` for each chosen figure: results by name, and what went wrong by name.

    One figure that fails does not stop the others, see `noted`.
    """
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for experiment in experiments(cfg.figures):
        with noted(experiment.name, failures):
            results[experiment.name] = step(experiment)
    return results, failures


@contextmanager
def noted(name: str, failures: dict[str, str], then: str = "") -> Iterator[None]:
    """Note in ``failures`` why the block fails, and print it with what to do ``then``, so that the rest still runs.

    What is not a message for the user comes with its traceback.
    """
    try:
        yield
        return
    except (ConfigError, RowsError, CheckFailed, OSError) as error:
        failures[name] = str(error)
    except Exception as error:
        traceback.print_exc()
        failures[name] = f"{type(error).__name__}: {error}"
    print(f"{name} failed: {failures[name]}{then}", file=sys.stderr, flush=True)
