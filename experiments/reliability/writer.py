"""A process that writes rows to a file, and prints the name of each that is finished.

    python -m experiments.reliability.writer rows.csv name
"""

import sys
from pathlib import Path

from experiments.measure.records import Row, RowFile

POINTS = 12


def row(name: str) -> Row:
    """Build a row of one point."""
    return Row(
        figure="none", panel="", system=name, workload="", model="", hardware="cpu", batch_size=None, seq_len=None,
        rank=None, metric="written", value=POINTS, unit="count",
    )  # fmt: skip


def write(path: Path, name: str) -> None:
    """Write ``POINTS`` rows, one after the other."""
    print(flush=True)
    for number in range(POINTS):
        RowFile(path).replace([row(f"{name}-{number}")])
        print(f"{name}-{number}", flush=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
