"""Experiments are tested on a quiet machine, whatever else runs beside the tests."""

from collections.abc import Iterator

import pytest
import torch
from fakes import QUIET

from experiments.harness import passes, products
from experiments.measure.disturbance import Disturbance


class ScriptedWatch:
    """Finds what `script` says, one entry per measurement, and quiet when that is used up."""

    script: list[Disturbance]

    def __init__(self, device: str) -> None:
        self.device = device

    def stop(self) -> Disturbance:
        return self.script.pop(0) if self.script else QUIET


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> Iterator[type[ScriptedWatch]]:
    """The watch over measurements; a test may fill its `script`. What a run sets for the whole process ends with it."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(ScriptedWatch, "script", [], raising=False)
    monkeypatch.setattr(passes, "Watch", ScriptedWatch)
    monkeypatch.setattr(products, "use_faster_products", lambda: {})
    yield ScriptedWatch
    torch.set_num_threads(threads)
