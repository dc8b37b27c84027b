"""Trials at tiny counts: each passes on a sound system, and counts losses on a broken one."""

import random
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="needs the hypothesis package (extra dev)")
pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from experiments.measure.records import RowFile, write_rows
from experiments.reliability import full_disk, isolation
from experiments.reliability.groups import all_trials
from experiments.reliability.input import neighbour
from experiments.reliability.trial import Outcome, Setting
from experiments.reliability.use import Use, drift
from punica.adapters import LoRAModelManager
from punica.engine import Engine
from punica.metadata import LoRAMapping
from punica.ops import torch_ops
from punica.wrapper import PunicaWrapperCPU

HERE = {
    "engine_soak": 30, "truncated_adapter": 1, "deleted_adapter": 1, "poisoned_weights": 3, "tokenizer_that_raises": 2,
    "out_of_memory": 2, "interrupted_steps": 3, "disk_full": 1, "clock_backwards": 2, "adapter_folders": 30,
    "operator_calls": 60, "wrapper_steps": 60, "api_bodies": 20, "overflowing_neighbours": 1, "loading_neighbours": 3,
    "evicted_adapters": 1,
}  # fmt: skip
"""Trials that need no process of their own at these counts."""
FAST = {"engine_soak", "disk_full", "operator_calls", "wrapper_steps"}
OTHERS = ("server_soak", "killed_writers", "signalled_server", "killed_rank", "adapter_keys", "same_simulation")


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """Trials change signals and limits of their process."""
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGXFSZ)}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    for one, handler in handlers.items():
        signal.signal(one, handler)


def run(name: str, folder: Path, count: int | None = None) -> Outcome:
    return all_trials().get(name).run(Setting(count or HERE[name], 0, "cpu", folder))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["out_of_memory", "overflowing_neighbours"])
def test_a_sound_system_loses_nothing_on_a_gpu(name: str, tmp_path: Path) -> None:
    outcome = all_trials().get(name).run(Setting(20, 0, "cuda", tmp_path))
    assert (outcome.lost, outcome.notes) == (0, [])
    assert outcome.injected > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in HERE]
)
def test_a_sound_system_loses_nothing(name: str, tmp_path: Path) -> None:
    outcome = run(name, tmp_path)
    assert (outcome.lost, outcome.notes) == (0, [])
    assert outcome.tried > 0
    assert outcome.injected > 0 or name == "interrupted_steps"  # by a timer: a slow machine may have ended before


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_trials_with_processes_lose_nothing(name: str, tmp_path: Path) -> None:
    trial = all_trials().get(name)
    outcome = run(name, tmp_path, trial.counts["smoke"])
    assert (outcome.lost, outcome.notes) == (0, [])
    assert outcome.tried > 0


@pytest.mark.slow
def test_a_result_that_comes_twice_or_with_other_tokens_is_a_loss(tmp_path: Path, monkeypatch: Any) -> None:
    step = Engine.step

    def twice(engine: Engine) -> Any:
        output = step(engine)
        wrong = tuple(replace(one, token_ids=[*one.token_ids, 1]) for one in output.finished)
        return replace(output, finished=(*wrong[:1], *output.finished))

    monkeypatch.setattr(Engine, "step", twice)
    outcome = run("engine_soak", tmp_path, 25)
    assert outcome.lost > 0
    assert any("times" in note for note in outcome.notes)


def test_an_unclear_error_of_a_folder_is_a_loss(tmp_path: Path, monkeypatch: Any) -> None:
    def unclear(*_: object) -> None:
        raise KeyError("r")

    monkeypatch.setattr(LoRAModelManager, "check_adapter", unclear)
    outcome = run("adapter_folders", tmp_path, 3)
    assert outcome.lost == outcome.tried
    assert "KeyError" in outcome.notes[0]


def test_an_operator_that_differs_from_its_definition_is_a_loss(tmp_path: Path, monkeypatch: Any) -> None:
    def wrong(x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor, *_: object) -> None:
        y.fill_(3)

    monkeypatch.setattr(torch_ops, "bgmv_shrink", wrong)
    assert run("operator_calls", tmp_path).lost > 0


def test_a_step_that_forgets_the_one_before_is_a_loss(tmp_path: Path, monkeypatch: Any) -> None:
    begin = PunicaWrapperCPU.update_metadata

    def careless(wrapper: PunicaWrapperCPU, mapping: Any, table: Any, *rest: Any) -> None:
        begin(wrapper, LoRAMapping([], []), [], 1, 1)
        begin(wrapper, mapping, table, *rest)

    monkeypatch.setattr(PunicaWrapperCPU, "update_metadata", careless)
    assert run("wrapper_steps", tmp_path).lost > 0


def test_changed_folders_are_near_the_drawn_one() -> None:
    header = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    files = (b'{"r": 8}', len(header).to_bytes(8, "little") + header + bytes(8))
    found = [neighbour(files, random.Random(number)) for number in range(200)]
    assert all(abs(len(config) - 8) <= 60 for config, _ in found)
    assert len(set(found)) > 100
    whole = [int.from_bytes(weights[:8], "little") <= len(weights) - 8 for _, weights in found]
    assert all(whole)  # a header of another length is announced as such


def test_bits_that_depend_on_a_neighbour_are_a_loss(tmp_path: Path, monkeypatch: Any) -> None:
    real, calls = isolation.victims_of, []

    def other(*given: Any) -> list[object]:
        calls.append(given)
        return [(*one, len(calls)) for one in real(*given)]

    monkeypatch.setattr(isolation, "victims_of", other)
    outcome = run("evicted_adapters", tmp_path)
    assert outcome.lost == outcome.tried


def test_rows_that_are_lost_on_a_full_disk_are_a_loss(tmp_path: Path, monkeypatch: Any) -> None:
    class Careless(RowFile):
        def replace(self, rows: Any) -> None:
            self.path.parent.mkdir(exist_ok=True)
            write_rows(self.path, [])
            super().replace(rows)

    monkeypatch.setattr(full_disk, "RowFile", Careless)
    assert any(note.startswith("rows") for note in run("disk_full", tmp_path, 2).notes)


def test_drift_compares_the_last_quarter_with_the_first() -> None:
    assert drift([100, 100, 1, 1, 1, 1, 90, 90]) == pytest.approx(-10)
    assert drift([5]) == 0


def test_more_threads_or_handles_than_before_are_a_leak() -> None:
    before = Use(host_mib=100, device_mib=0, threads=4, handles=9)
    assert replace(before, host_mib=120, threads=3).leaks(before) == {}
    assert replace(before, threads=5, handles=11).leaks(before) == {"threads": 1, "handles": 2}
    assert replace(before, threads=6).leaks(before, pool=2) == {}


def test_only_the_first_losses_are_described() -> None:
    outcome = Outcome()
    for number in range(20):
        outcome.expect(number == 3, str(number))
    assert (outcome.tried, outcome.survived, outcome.lost) == (20, 1, 19)
    assert outcome.notes == ["0", "1", "2", "4", "5"]
