"""What the commands over many figures share: their Hydra entry, and running one step per figure without giving up."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.harness.catalogue import experiments
from experiments.harness.command import or_exit, register
from experiments.harness.experiment import CheckFailed, Experiment
from experiments.harness.schema import CONF, ConfigError, register_app
from punica.measure.records import RowsError

BATCH_KEYS = ("figures", "source", "allow_dirty", "schema")


def batch_main(name: str, doc: str, job: Callable[[DictConfig], int]) -> None:
    """Command line of `experiments.<name>`: `job(cfg)` returns the exit code."""
    register_app(name, doc.strip(), schema="batch")
    for experiment in experiments():
        register(experiment)

    def task(cfg: DictConfig) -> None:
        code = or_exit(lambda: job(cfg))
        if code:
            raise SystemExit(code)

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(task)()


def composed(experiment: Experiment) -> DictConfig:
    """The configuration of `experiment` under this command's own overrides (scale, hardware, paths, ...)."""
    given = HydraConfig.get().overrides.task
    passed = [text for text in given if text.lstrip("+~").split("=")[0].split(".")[0] not in BATCH_KEYS]
    return compose(config_name=experiment.name, overrides=passed)


def each(cfg: DictConfig, step: Callable[[Experiment], Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """`step(experiment)` for each chosen figure: results by name, and what went wrong by name.

    One figure that fails does not stop the others; what is not a message for the user comes with its traceback.
    """
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for experiment in experiments(cfg.figures):
        try:
            results[experiment.name] = step(experiment)
        except (ConfigError, RowsError, CheckFailed) as error:
            failures[experiment.name] = str(error)
        except Exception as error:  # the other figures must still run; the exit code tells
            traceback.print_exc()
            failures[experiment.name] = f"{type(error).__name__}: {error}"
        if experiment.name in failures:
            print(f"{experiment.name} failed: {failures[experiment.name]}", file=sys.stderr, flush=True)
    return results, failures


def finish(**facts: Any) -> None:
    """The last line on stdout: one compact JSON."""
    print(json.dumps(facts, separators=(",", ":")), flush=True)
