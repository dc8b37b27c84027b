"""REPRODUCING.md; and numbers of `MARKED_PAGES`, between ``<!-- measured:NAME -->`` and ``<!-- /measured -->``."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import cast

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from experiments.claims import CLAIMS, NotMeasured, Verdict
from experiments.claims.judge import LAPTOP, NOT_MEASURED, command, figures_of, marked, scales_of, total
from experiments.claims.rows import Rows, markdown
from experiments.facts.paper import paper_rows, read_claims
from experiments.harness.catalogue import entry_of, experiments, recorded_sets
from experiments.harness.counted import SCALES
from experiments.harness.experiment import Experiment
from experiments.harness.schema import CONF
from experiments.measure.records import RowsError
from experiments.report.expected import claim_ranges
from experiments.report.machines import Machine, older_share, said
from experiments.report.major import MAJOR, in_order

GENERATED = "<!-- written by: make report ARGS=source=recorded -->"
INTRODUCTION = """\
`make reproduce` measures and judges all figures on your machine; `make check` holds your rows against recorded ones.

**Minutes** are those that `make reproduce` gives a claim's figures on a CPU (`conf/figure/*.yaml`): {laptop:.0f} in
all. **GPU hours** are the minutes of a claim's recorded sets, times their rounds and GPUs, and **memory** is what the
largest of them needs (`conf/recording.yaml`); both are expected, not measured. Claims share sets: those that carry the
paper take {hours:.1f} GPU hours together. **Disk** is that of the figures' recorded rows and samples: nothing else is
fetched or kept. **Ranges** follow [one rule](docs/running.md#expected-ranges). Human minutes were not measured.

**Commands** without `scale=` choose it by the machine ([scales](docs/running.md#one-dial)). The command of a claim on a
GPU is of the scale of its recorded rows. It measures Llama-2 7B: ranges that also hold 13B need it once more with
`model=llama2-13b`. `make record-all` measures all recorded sets.
"""
UNKNOWN, CPU, GPU = "-", "cpu", "h200"
MARKED_PAGES = ("README.md", "docs/verdicts.md")
MARKED = re.compile(r"(<!-- measured:([\w-]+) -->).*?(<!-- /measured -->)", re.DOTALL)
Machines = Mapping[str, Machine]


def write_reproducing(machines: Sequence[Machine], paper: Path, target: Path) -> Path:
    """Write the page on ``machines``, the recorded ones, to ``target``; ``paper`` is ``paper_results``."""
    laptop = sum(minutes(one.name, LAPTOP) or 0.0 for one in experiments())
    carried = {id for one in MAJOR for id in one.claims}
    head, lines = claims_table(machines, paper)
    parts = [GENERATED, "# Reproducing", "", INTRODUCTION.format(laptop=laptop, hours=gpu_cost(carried)[0])]
    parts += ["## The claims that carry the paper", "", *markdown(head, lines[: len(carried)]), ""]
    parts += ["## The other claims", "", *markdown(head, lines[len(carried) :]), ""]
    parts += ["## Figures", "", "A figure without minutes at a scale runs to its end there.", "", *figures_table(), ""]
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def claims_table(machines: Sequence[Machine], paper: Path) -> tuple[list[str], list[list[str]]]:
    """Return head and lines: a claim, how to measure it, what that takes, and range and verdict on each machine."""
    statements = {one.id: one for one in read_claims(paper)}
    first, *_ = machines
    gpus = [machine for machine in machines if machine.name != CPU]
    of_machine = [{one.id: one for one in machine.verdicts} for machine in machines]
    lines = []
    for verdict in in_order(first.verdicts):
        statement = statements[verdict.id]
        on_gpu = next((found for one in reversed(gpus) if (found := command(statement, one.name, one.chosen))), "")
        on_cpu = command(statement, CPU, first.chosen) if first.name == CPU else ""
        scripts = scales_of(statement, CPU, first.chosen)
        given = sum(minutes(name, LAPTOP) or 0.0 for name in scripts)
        hours, memory = gpu_cost([verdict.id])
        lines.append([
            f"{verdict.id} {verdict.statement}", ", ".join(scripts) or UNKNOWN,
            f"`{on_cpu}`" if on_cpu else UNKNOWN, f"{given:g}" if given else UNKNOWN,
            f"`{on_gpu}`" if on_gpu and hours else UNKNOWN, f"{hours:.2g}" if hours else UNKNOWN, memory,
            disk(verdict, machines),
            *(f"{marked(here[verdict.id])}{expected(here[verdict.id], paper)}" for here in of_machine),
        ])  # fmt: skip
    head = ["claim", "experiment", "on a CPU", "minutes", "on a GPU", "GPU hours", "GPU memory", "disk"]
    return [*head, *(f"{machine.name}: verdict, range" for machine in machines)], lines


def expected(verdict: Verdict, paper: Path) -> str:
    found = claim_ranges([verdict], paper)
    return "".join(f"; {one.quantity} {one.low:.4g} to {one.high:.4g}" for one in found.itertuples())


@cache
def gpu_sets() -> pd.DataFrame:
    """Return the sets that a GPU measures, with the claims that each decides, its GPU hours and its memory."""
    sets = pd.DataFrame([asdict(one) for one in recorded_sets()["gpu"]])
    hours = sets["minutes"] * sets["rounds"] * sets["gpus"] / 60
    return sets.assign(claims=sets["claims"].map(claims_in), hours=hours, memory=sets["gpus"] * sets["gb"])


def claims_in(text: str) -> set[str]:
    """Read the claims of a set, written as ``C14, C25-C37``."""
    ends = [part.strip().partition("-") for part in text.split(",") if part.strip()]
    return {f"C{number:02d}" for low, _, high in ends for number in range(int(low[1:]), int((high or low)[1:]) + 1)}


def gpu_cost(claims: Collection[str]) -> tuple[float, str]:
    """Return the GPU hours of the sets that decide any of ``claims``, and the memory of the largest."""
    sets = gpu_sets()
    sets = sets[[bool(found & set(claims)) for found in sets["claims"]]]
    if sets.empty:
        return 0.0, UNKNOWN
    most = sets.sort_values("memory").iloc[-1]
    return float(sets["hours"].sum()), f"{f'{most.gpus:g} x ' if most.gpus > 1 else ''}{most.gb:g} GB"


def disk(verdict: Verdict, machines: Sequence[Machine]) -> str:
    """Return the megabytes of the recorded rows and samples of a claim's figures, on the machine with most."""
    names = [one.name for one in experiments() if one.figure in figures_of(verdict.figure)]
    files = [[path for name in names for path in machine.folder.glob(f"{name}.*")] for machine in machines]
    size = max(sum(path.stat().st_size for path in found) for found in files)
    return f"{max(size / 1e6, 0.1):.1f} MB" if size else UNKNOWN


def figures_table() -> list[str]:
    lines = []
    for one in experiments():
        given = [f"{value:g} ({scale})" for scale in reversed(SCALES) if (value := minutes(one.name, scale))]
        lines.append([title_of(one), f"`make figure FIG={entry_of(one.name)}`", ", ".join(given) or UNKNOWN])
    return markdown(["figure", "command", "minutes (scale)"], lines)


@cache
def settings(name: str) -> DictConfig:
    return cast(DictConfig, OmegaConf.load(CONF / "figure" / f"{name}.yaml"))


def title_of(experiment: Experiment) -> str:
    title, figure = str(settings(experiment.name).title), experiment.figure
    place = f"Figure {figure}" if figure.isdigit() else figure.replace("text", "Section").replace("README", "README,")
    return title if experiment.name.startswith("ext") else f"{place.partition(',')[0]}: {title}"


def minutes(name: str, scale: str) -> float | None:
    """Return the minutes that ``make reproduce`` gives the experiment ``name`` at ``scale``; None where it has none."""
    return (settings(name).get("minutes") or {}).get(scale)


def write_marked(machines: Sequence[Machine], path: Path) -> Path:
    """Fill the markers of ``path``; `RowsError` where no function fills one, or its recorded rows are missing."""
    known = {machine.name: machine for machine in machines}

    def filled(match: re.Match[str]) -> str:
        marker = f"{path}: the marker measured:{match[2]}"
        if match[2] not in VALUES:
            raise RowsError(f"{marker} is filled by no function: choose one of {', '.join(sorted(VALUES))}")
        try:
            return match[1] + VALUES[match[2]](known) + match[3]
        except KeyError as missing:
            raise RowsError(f"{marker} needs recorded rows for {missing}: measure and record them") from None

    path.write_text(MARKED.sub(filled, path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def recorded(machines: Machines) -> str:
    pages = {name: f"results-{name}.md" for name in machines}
    lines = [[f"{name}, by {one.whose}" if one.whose else name, total(one.verdicts), f"[{pages[name]}]({pages[name]})"]
             for name, one in machines.items()]  # fmt: skip
    return "\n".join(["\n", *markdown(("recorded on", "verdicts", "results"), lines), "\n"])


def claims(machines: Machines) -> str:
    """Build a table of `MAJOR` on the GPU, of what only a simulation answers on the CPU; a line of a cell per claim."""
    by_id = {name: {one.id: one for one in machines[name].verdicts} for name in (GPU, CPU)}
    theirs, lines = Rows(paper_rows(machines[GPU].paper)), []
    for one in MAJOR:
        where = GPU if any(by_id[GPU][id].verdict != NOT_MEASURED for id in one.claims) else CPU
        cells = []
        for id, chosen in one.shown_of.items():
            ours = by_id[where][id].quantities
            name = chosen if chosen in ours else next(iter(ours), chosen)
            value = said(ours[name]) if name in ours else UNKNOWN
            cells.append([f"{id} {name.replace('_', ' ')}", _paper(id, name, theirs), value, marked(by_id[where][id])])
        page = f"[{where}](results-{where}.md#claims-that-carry-the-paper)"
        lines.append([one.text, *("<br>".join(column) for column in zip(*cells, strict=True)), page])
    head = ("the paper says", "claim", "paper", "ours", "verdict", "rows, figures")
    return "\n".join(["\n", *markdown(head, lines), "\n"])


def _paper(id: str, name: str, theirs: Rows) -> str:
    try:
        return said(CLAIMS[id](theirs).quantities[name])
    except (NotMeasured, KeyError):
        return UNKNOWN


def speedup(machines: Machines, name: str) -> str:
    """Return a speed-up of C30, its interval where that is known."""
    verdict = next(one for one in machines[GPU].verdicts if one.id == "C30")
    if name in verdict.interval:
        return "{:.4g} to {:.4g}".format(*verdict.interval[name])
    return said(verdict.quantities[name])


VALUES: dict[str, Callable[[Machines], str]] = {
    "machines": recorded,
    "claims": claims,
    "older-rows": lambda machines: ", ".join(f"{older_share(one.rows)} on {name}" for name, one in machines.items()),
    "speedup-7b": lambda machines: speedup(machines, "7B Distinct"),
    "speedup-13b": lambda machines: speedup(machines, "13B Distinct"),
}
