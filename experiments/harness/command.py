"""The command line of every script here: Hydra composes, mistakes are one line, an interruption loses nothing."""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, TypeVar
from unittest import mock

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.harness.experiment import Experiment
from experiments.harness.resume import run
from experiments.harness.schema import (
    CONF,
    REPOSITORY,
    ConfigError,
    RunConf,
    Settings,
    keys_of,
    model_conf,
    unknown,
    validated,
)
from experiments.harness.settings import (
    choice,
    fitting_model,
    folders,
    keys_read,
    refuse_unread,
    scale_of,
    schema_of,
    typed,
)
from experiments.measure import environment
from experiments.measure.records import TIMERS, RowsError, disk_is_full, ensure_writable
from experiments.workload.popularity import WORKLOADS
from experiments.workload.traces import TRACE

S = TypeVar("S", bound=Settings)
E = TypeVar("E", bound=Experiment)
INTERRUPTED = 130
"""Exit code of a run that Ctrl-C or SIGTERM ended."""
EXTRAS = {"ray": "cluster", "fastapi": "serve", "uvicorn": "serve", "prometheus_client": "serve"}
"""Package -> the extra of `pyproject.toml` that has it, of those that `make reproduce` does not install."""


class CheckOutputs(Callback):
    """Hydra callback: an unwritable output folder is one clear line, before Hydra makes its run folder there."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        or_exit(lambda: ensure_writable(folders(config).fresh_rows.parent))

    on_multirun_start = on_run_start


def or_exit(work: Callable[[], Any]) -> Any:
    """`work()`; what a user can mend ends the run with its message and no traceback."""
    try:
        return work()
    except (ConfigError, RowsError) as error:
        print(f"error: {error}", file=sys.stderr)
    except HydraException as error:
        print(f"error: {said_by_hydra(error)}", file=sys.stderr)
    except OSError as error:
        if not disk_is_full(error):
            raise
        kept = "make room there, or choose another folder with paths.outputs=<folder>; what was measured is kept"
        print(f"error: {error.filename or 'a file'} cannot be written ({error.strerror}): {kept}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        extra = f"pip install -c constraints.txt -e '.[{EXTRAS[error.name]}]'"
        print(f"error: this choice needs {error.name}, which is not installed: {extra}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: finished rows are on disk; run the same command again to go on", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    raise SystemExit(2)


def said_by_hydra(error: HydraException) -> str:
    """Return what Hydra has against an override, or a choice, in one line."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig) and cause.full_key:
        return unknown(cause.full_key.split("."), [str(key) for key in cause.parent_node if key != "hydra"])
    about = re.split(r"\n(?:Config search path|See https|To append)", str(error))[0]
    return " ".join(f"{about} {str(cause or '').partition(chr(10))[0]}; --help lists keys and choices".split())


def _detected(what: str) -> str:
    """Return `name`, `device` or `dtype` of this machine, for `conf/hardware/auto.yaml`."""
    name = environment.hardware_slug()
    device, dtype = ("cpu", "float32") if name == "cpu" else ("cuda", "float16")
    return {"name": name, "device": device, "dtype": dtype}[what]


RESOLVERS: dict[str, Callable[..., Any]] = {
    "detect_hardware": _detected,
    "scale_of": scale_of,
    "from_root": lambda folder: str(REPOSITORY / folder),
    "fitting_model": lambda field, *where: model_conf(fitting_model(*where)).model_dump(mode="json")[field],
}
"""Functions of `conf/`, as `${scale_of:...}`."""


def register_app(name: str, header: str, module: str, schema: type[RunConf], **choices: str | None) -> None:
    """Register the config `name`: `conf/config.yaml` with `choices`, keys of `schema`, and the text of `--help`."""
    for resolver, resolve in RESOLVERS.items():
        OmegaConf.register_new_resolver(resolver, resolve, replace=True)
    register_names("workload", [TRACE, *WORKLOADS.names()])
    register_names("system", [])
    store = ConfigStore.instance()
    for timer in ("auto", *TIMERS):
        store.store(name=timer, group="timer", node={"name": timer})
    store.store(name=name, group="schema", node=keys_of(schema), package="_global_")
    chosen = {"schema": name, **choices}
    primary: list[Any] = ["config", *({f"override {key}": value} for key, value in chosen.items()), "_self_"]
    hydra = {"job": {"name": name}, "help": {"app_name": module, "header": header}}
    store.store(name=name, node={"defaults": primary, "hydra": hydra})


def register_names(group: str, names: Iterable[str]) -> None:
    """Make each of `names` a choice of `group` (workload or system), beside `all`, which means the figure's own."""
    store = ConfigStore.instance()
    store.store(name="all", group=group, node={"names": []})
    for name in names:
        own = [name if group == "workload" else choice(name)]
        store.store(name=choice(name), group=group, node={"names": own})


def register(experiment: Experiment) -> None:
    """Make `experiment` a primary config of Hydra, with its schema, its systems and its own defaults."""
    described = sys.modules[type(experiment).__module__].__doc__ or experiment.name
    choices = {"figure": experiment.name, **experiment.defaults}
    register_app(experiment.name, described.strip(), experiment.name, schema_of(experiment), **choices)
    register_names("system", OmegaConf.load(CONF / "figure" / f"{experiment.name}.yaml").systems)


def main(kind: type[E], module: str) -> E:
    """Build the experiment of a script. Where ``module`` is the program, compose, run, print the outcome as JSON."""
    experiment = kind()
    if module != "__main__":
        return experiment
    register(experiment)

    def job(cfg: DictConfig) -> int:
        own = typed(cfg, experiment)
        if (figure := HydraConfig.get().runtime.choices["figure"]) != experiment.name:
            raise ConfigError(f"figure={figure} is not {experiment.name}'s own: leave figure= out, or run its script")
        refuse_unread(given(), keys_read(experiment), experiment.name)
        outcome = run(own, experiment)
        finish(**asdict(outcome))
        return 1 if outcome.failed else 0

    launch(experiment.name, job)
    return experiment


def with_options(name: str, doc: str, module: str, conf: type[S], job: Callable[[S], None]) -> None:
    """The command line of a command without figures: `job(options)`; every option without a default must be given."""
    store = ConfigStore.instance()
    store.store(name=name, group="schema", node=keys_of(conf), package="_global_")
    primary: list[Any] = [{"schema": name}, {"override hydra/job_logging": "stdout"}, "_self_"]
    usage = f"{doc.strip()}\n\nUsage: python -m experiments.{module} [key=value] ...\n\n$CONFIG\n"
    hydra = {"job": {"name": name}, "help": {"template": usage}, "run": {"dir": "."}, "output_subdir": None}
    store.store(name=name, node={"defaults": primary, "hydra": hydra})

    def task(cfg: DictConfig) -> None:
        words = [override.partition("=") for override in given()]
        keys = [key for key, *_ in words]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ConfigError(f"{twice[0]}= is given twice: give it once")
        if empty := [key for key, _, value in words if not value]:
            raise ConfigError(f"{empty[0]}= is missing: give {empty[0]}=<value>, --help lists the options")
        job(validated(cfg, conf))

    launch(name, task)


def given() -> list[str]:
    return list(HydraConfig.get().overrides.task)


def launch(name: str, job: Callable[[DictConfig], int | None]) -> None:
    """Compose the config `name` from the command line and run `job`; a multirun ends with the first that fails."""

    def task(cfg: DictConfig) -> None:
        if code := or_exit(lambda: job(cfg)):
            raise SystemExit(code)

    signal.signal(signal.SIGTERM, _interrupt)
    or_exit(refuse_tildes)
    # Python 3.14 checks help texts, and Hydra 1.3 has one that is no string
    unchecked = mock.patch.object(argparse.ArgumentParser, "_check_help", create=True)
    with unchecked, mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1"):  # it raises what it would print in many lines
        or_exit(hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(task))


def _interrupt(*_: object) -> None:
    """Have SIGTERM do what Ctrl-C does: by default Python ends without `finally`, and engines would keep the GPU."""
    for number in (signal.SIGTERM, signal.SIGINT):  # of `timeout`, twice, and of `record_all`: clean-up needs its time
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def refuse_tildes() -> None:
    """Raise `ConfigError` where Hydra would take the `~` of a path for the order to delete a key."""
    for word in sys.argv[1:]:
        if re.search(r"^~|=['\"]?~", word):
            raise ConfigError(f"{word}: ~ is no home folder here, and no key can be deleted; write key=value without ~")


def finish(**facts: Any) -> None:
    """The last line on stdout: one compact JSON."""
    print(json.dumps(facts, separators=(",", ":")), flush=True)
