"""The command line of every script here: Hydra composes, mistakes are one line, an interruption loses nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import hydra
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.harness.experiment import Experiment
from experiments.harness.resume import run
from experiments.harness.schema import CONF, ConfigError, register_app
from experiments.harness.settings import folders
from punica.measure.records import RowsError, ensure_writable


class CheckOutputs(Callback):
    """Hydra callback: an unwritable output folder is one clear line, before Hydra makes its run folder there."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        or_exit(lambda: ensure_writable(folders(config).fresh_rows.parent))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.on_run_start(config)


def or_exit(work: Callable[[], Any]) -> Any:
    """`work()`; what a user can mend ends the run with its message and no traceback."""
    try:
        return work()
    except (ConfigError, RowsError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: finished rows are on disk; run the same command again to go on", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(2)


def register(experiment: Experiment) -> None:
    """Make `experiment` a primary config of Hydra, with its schema and its own defaults."""
    described = sys.modules[type(experiment).__module__].__doc__ or experiment.name
    choices = {"figure": experiment.name, **experiment.defaults}
    register_app(experiment.name, described.strip(), experiment.conf, **choices)


def main(experiment: Experiment) -> None:
    """The command line of a figure's script: compose, run, print the outcome as one line of JSON."""
    register(experiment)

    def job(cfg: DictConfig) -> None:
        outcome = or_exit(lambda: run(cfg, experiment))
        print(json.dumps(asdict(outcome), separators=(",", ":")), flush=True)
        if outcome.failed:
            raise SystemExit(1)

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=experiment.name)(job)()
