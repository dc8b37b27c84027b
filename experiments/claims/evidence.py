"""Rows of one machine as its claims read them, each under the clock that decides it, beside the paper's numbers."""

from pathlib import Path

import pandas as pd

from experiments.claims.costs.machine import Machine
from experiments.claims.rows import Rows
from experiments.facts.paper import claim_clocks
from punica.measure.records import TIMERS

GRAPH = TIMERS[0]


class Evidence:
    """Rows of one machine, ``frame``; ``folder`` is ``paper_results``; ``only``: the clock that decides all claims on
    operators, empty for each claim's own.
    """

    def __init__(self, frame: pd.DataFrame, folder: str | Path, only: str = "") -> None:
        self.folder = Path(folder)
        self.hardware = str(frame["hardware"].iloc[0]) if len(frame) else ""
        self._frame, self._clocks = frame, {id: only or clock for id, clock in claim_clocks(folder).items()}
        self._several = len(set(frame["timer"].dropna()) - {""}) > 1
        self._rows: dict[str, Rows] = {}
        self._machines: dict[str, Machine] = {}

    def clock(self, id: str) -> str:
        """Return the clock that decides claim ``id``; empty for one that is not about operators."""
        return self._clocks.get(id, "")

    def other_clock(self, id: str) -> str:
        """Return the clock that does not decide it; empty where there are not two."""
        here = self.clock(id)
        return next((name for name in sorted(set(self._clocks.values())) if name != here), "") if here else ""

    def rows(self, clock: str) -> Rows:
        """Return the rows with those of ``clock`` preferred."""
        key = clock if self._several else ""
        if key not in self._rows:
            self._rows[key] = Rows(self._frame, key)
        return self._rows[key]

    def machine(self, clock: str) -> Machine:
        """Return this machine under ``clock``; a step replays graphs, whatever the clock."""
        if clock not in self._machines:
            self._machines[clock] = Machine(self.rows(clock), self.rows(GRAPH), launches=self.hardware != "cpu")
        return self._machines[clock]
