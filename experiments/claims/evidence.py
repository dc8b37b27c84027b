"""Rows of one machine as its claims read them, each under the clock that decides it, beside the paper's numbers."""

from pathlib import Path

import pandas as pd

from experiments.claims.rows import Rows
from experiments.facts.paper import claim_clocks, paper_file
from experiments.harness.clocks import unsteady

MECHANISMS, WORDS, ANY, NOT_KNOWN = "claim_mechanisms.csv", "claim_words.csv", "any", "not known"


class Evidence:
    """Rows of one machine, ``frame``; ``folder`` is ``paper_results``; ``only``: the clock that decides all claims on
    operators, empty for each claim's own.
    """

    def __init__(self, frame: pd.DataFrame, folder: str | Path, only: str = "") -> None:
        self.folder = Path(folder)
        self.hardware = str(frame["hardware"].iloc[0]) if len(frame) else ""
        self._frame, self._clocks = frame, {id: only or clock for id, clock in claim_clocks(folder).items()}
        self._several = len(set(frame["timer"].dropna()) - {""}) > 1
        self.unsteady = set(frame.loc[unsteady(frame), "figure"])
        self._rows: dict[str, Rows] = {}
        self._class = "cpu" if self.hardware == "cpu" else "gpu"
        self._mechanisms, self._words = (
            pd.read_csv(paper_file(folder, name)).set_index(["claim", "where"]) for name in (MECHANISMS, WORDS)
        )

    def mechanism(self, id: str) -> str:
        """Return the sentence of why claim ``id`` differs on this class of hardware."""
        return next((str(line["sentence"]) for line in self._here(self._mechanisms, id)), NOT_KNOWN)

    def best_word(self, id: str) -> tuple[str, str]:
        """Return the best word that claim ``id`` can get on this class of hardware, and why; empty without a limit."""
        return next(((str(line["most"]), str(line["reason"])) for line in self._here(self._words, id)), ("", ""))

    def _here(self, table: pd.DataFrame, id: str) -> list[pd.Series]:
        return [table.loc[id, where] for where in (self._class, ANY) if (id, where) in table.index]

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
