"""Plugin of trials: how often, from which seed and where they run, and rows of what each tried, injected and lost.

    python -m pytest tests/reliability -m reliability --size full -k engine_soak

Rows go to ``<out>/<hardware>/reliability.csv`` as each trial ends. `--out results` records them, which takes a commit
without changes.
"""

import hashlib
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.measure import environment
from experiments.measure.records import Row, RowFile
from tests.reliability.trial import COUNTS, SIZES, Trial

CPU = "cpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reliability")
    group.addoption("--size", choices=SIZES, default="laptop", help="count of each trial")
    group.addoption("--seed", type=int, default=0, help="of all that trials draw")
    group.addoption("--device", choices=(CPU, "cuda"), help="of engines; cuda where there is a GPU")
    group.addoption("--out", default="outputs", help="folder of rows; results: recorded ones")


def option(config: pytest.Config, name: str) -> Any:
    """Return an option; its default where this folder was not named on the command line."""
    return config.getoption(name, {"size": "laptop", "seed": 0, "out": "outputs"}.get(name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if option(config, "out") == "results" and not re.fullmatch("[0-9a-f]+", commit := environment.commit()):
        raise pytest.UsageError(f"--out results records rows of a commit, and this is {commit}: commit first")
    for item in items:
        if item.get_closest_marker("reliability") and config.pluginmanager.hasplugin("timeout"):
            limit = item.callspec.params["trial"].limit_s(option(config, "size"))  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.timeout(limit))


@pytest.fixture
def trial(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    """The trial that a test counts with; the process, and those it starts, compute in one thread."""
    config, threads = request.config, torch.get_num_threads()
    device = option(config, "device") or ("cuda" if torch.cuda.is_available() else CPU)
    if device == CPU and request.node.get_closest_marker("gpu"):
        pytest.skip("needs --device cuda")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if device == CPU:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of processes that a trial starts
    torch.set_num_threads(1)
    yield Trial(request.param.count(option(config, "size")), option(config, "seed"), device, tmp_path)
    torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a trial that lost something, after its rows are written. An error and the time limit are losses, too."""
    trial, error = pyfuncitem.funcargs.get("trial"), None
    if not isinstance(trial, Trial):
        return (yield)
    try:
        yield
        if not trial.tried:
            trial.expect(False, "nothing was tried")
    except (Exception, pytest.fail.Exception) as caught:
        error = caught
        trial.expect(False, repr(error))
    if pyfuncitem.get_closest_marker("reliability"):
        write_rows(pyfuncitem, trial)
        pyfuncitem.user_properties.append(("trial", f"{pyfuncitem.originalname}: {trial}"))
    if error:
        raise error
    if trial.lost:
        pytest.fail(str(trial), pytrace=False)
    return True


def write_rows(item: pytest.Function, trial: Trial) -> None:
    """Write the rows of one run; its seed is their repeat."""
    size, name = option(item.config, "size"), item.originalname.removeprefix("test_")
    on_cpu = trial.device == CPU
    hardware = CPU if on_cpu else environment.hardware_slug()
    device = environment.cpu_name() if on_cpu else environment.device_name()
    digest = hashlib.sha256(f"{name} {trial.count} {trial.device}".encode()).hexdigest()[:12]
    stamp: dict[str, Any] = environment.stamp()
    counts = {one: (float(getattr(trial, one)), "count") for one in COUNTS}
    rows = [
        Row(
            figure="reliability", panel=item.callspec.params["trial"].group, system=name, workload="", model="tiny",
            hardware=hardware, batch_size=None, seq_len=None, rank=None, metric=metric, value=value, unit=unit,
            scale=size, config_hash=digest, source_hash=source(), device=device, repeat=trial.seed, **stamp,
        )
        for metric, (value, unit) in (counts | trial.values).items()
    ]  # fmt: skip
    folder = item.config.rootpath / option(item.config, "out") / hardware / ("smoke" if size == SIZES[0] else "")
    RowFile(folder / "reliability.csv").replace(rows)


def source() -> str:
    """Hash the library and the trials: any part of them may lose a request."""
    here = Path(__file__).parent
    files = sorted([*(here.parents[1] / "punica").rglob("*.py"), *here.glob("*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for text in dict(report.user_properties).values() if report.when == "call" else ():
                terminalreporter.write_line(str(text))
