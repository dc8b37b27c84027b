"""Experiments are tested on a quiet machine, whatever else runs beside the tests."""

import pytest
from fakes import QUIET

from experiments.harness import passes
from punica.measure.disturbance import Disturbance
from punica.parallel import matmul


class ScriptedWatch:
    """Finds what `script` says, one entry per measurement, and quiet when that is used up."""

    script: list[Disturbance]

    def __init__(self, device: str) -> None:
        self.device = device

    def stop(self) -> Disturbance:
        return self.script.pop(0) if self.script else QUIET


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> type[ScriptedWatch]:
    """The watch over measurements; a test may fill its `script`."""
    monkeypatch.setattr(ScriptedWatch, "script", [], raising=False)
    monkeypatch.setattr(passes, "Watch", ScriptedWatch)
    monkeypatch.setattr(matmul, "use_faster_products", lambda: {})  # which is for the whole process
    return ScriptedWatch
