"""Rows of a few figures with known ratios, and their report."""

from pathlib import Path

from fakes import PAPER

from experiments.harness.settings import Folders
from experiments.measure.records import Row
from experiments.report.machines import Machine, machine_of
from experiments.report.results import write_results


def folders_in(root: Path) -> Folders:
    return Folders(
        fresh_rows=root / "outputs/cpu/rows",
        fresh_figures=root / "outputs/cpu/figures",
        recorded_rows=root / "results/cpu",
        recorded_figures=root / "figures/cpu",
        paper=PAPER,
    )


def decode_rows(scale: str = "laptop", hardware: str = "cpu") -> list[Row]:
    """Figure 1: decode of 32 requests takes 1.2 times as long as of one."""
    columns = {"figure": "1", "panel": "decode", "system": "backbone", "workload": "", "model": "llama-small"}
    columns |= {"hardware": hardware, "seq_len": 128, "rank": None, "metric": "step_latency", "unit": "ms"}
    columns |= {"statistic": "median", "timer": "host_clock", "scale": scale, "device": "A CPU, 2 cores"}
    columns |= {"date": "2026-01-02", "commit": "abc1234"}
    return [Row(batch_size=size, value=value, **columns) for size, value in ((1, 10.0), (32, 12.0))]


def operator_rows(timer: str, sgmv: float, launch: float | None = 5.0) -> list[Row]:
    """Figure 8: SGMV takes ``sgmv`` us, Gather-BMM and the loop 80; ``launch``: its calibrations."""
    columns = {"figure": "8", "panel": "", "model": "", "hardware": "h200", "seq_len": None, "rank": 16}
    columns |= {"metric": "latency", "unit": "us", "statistic": "median", "scale": "paper", "timer": timer}
    columns |= {"date": "2026-01-02", "commit": "abc1234", "device": "A GPU", "calib_launch_us": launch}
    return [
        Row(system=system, workload=workload, batch_size=size, value=value, **columns)
        for system, value in (("SGMV", sgmv), ("Gather-BMM", 80.0), ("Loop", 80.0))
        for workload in ("Distinct", "Uniform", "Skewed", "Identical")
        for size in (1, 64)
    ]


def write_report(places: Folders) -> tuple[Machine, str]:
    """Judge the fresh rows of ``places`` and write their page beside them; return the machine and the text."""
    here = machine_of(places.fresh_rows, places.fresh_figures, PAPER)
    page = write_results(here, places.fresh_rows.parent / "claims.md", places.fresh_rows.parent)
    return here, page.read_text(encoding="utf-8")
