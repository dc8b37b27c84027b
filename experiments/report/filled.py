"""Numbers between markers in Markdown files, each filled in by a function of the recorded machines.

A marker is ``<!-- measured:NAME -->`` and ``<!-- /measured -->`` around what the function of that name returns.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from experiments.claims.judge import DIFFERS, HOLDS, JUDGED, Verdict
from experiments.claims.predictions import predictions
from experiments.claims.rows import markdown
from experiments.claims.table import figure_links, marked, total
from experiments.cluster.served import KILLED, RAY, STEADY
from experiments.report.findings import Found, find
from experiments.report.machines import OTHER_TIMER, Machine, columns
from experiments.report.sought import SOUGHT, public_kernels
from experiments.report.tables import said, with_unit
from experiments.report.trials import NO_TRIALS, trials_table
from experiments.report.verdicts import older_figures, older_share
from punica.measure.records import RowsError

MARKED = re.compile(r"(<!-- measured:([\w-]+) -->).*?(<!-- /measured -->)", re.DOTALL)
Machines = Mapping[str, Machine]
VALUES: dict[str, Callable[[Machines], str]] = {}
GPU, CPU = "h200", "cpu"
HOURS, RAY_HOURS = "13", (RAY, KILLED)
OTHER, NOT_MOVED = "requests_with_other_tokens", "requests_with_other_tokens_not_recomputed"
FIRST_TOKENS = "p99_time_to_first_token"
CHECKED = ["requests_checked", "total_requests"]
"""Numbers of requests whose tokens were compared; rows without the first are of hours that compared all."""
HIGHLIGHTS = {
    "ext_operator_tables": ("table A: fastest public kernel / ours, as a layer calls it",
                            "table A: fastest public kernel / ours, its shrink launched normally",
                            "table shapes: fastest public kernel / ours, as a layer calls it"),
    "ext_breakdown": ("decode step, Distinct / without adapters", "decode step, Distinct / its bytes alone"),
    "ext_determinism": ("operator tables: batch_invariant / default, decode",),
    "ext_fp8": ("time of a e4m3 adapter / 16 bits, Distinct, rank 16",
                "time of a e4m3 adapter / 16 bits, Identical, rank 16", "share of greedy tokens changed, e4m3"),
    "ext_latency_under_load": ("saturation: Punica", "saturation: continuous batching, one adapter"),
    "ext_many_adapters": ("throughput, 1000 adapters / 32 adapters", "throughput, 16 adapters, 8 slots / 32 adapters"),
    "ext_moe": ("layer of experts, 32 requests, with adapters / without, qwen3-30b-a3b, Distinct",),
}  # fmt: skip
"""Findings on the GPU that pages repeat."""
CLAIMS = (("C29", GPU), ("C24", GPU), ("C26", GPU), ("C12", GPU), ("C42", GPU), ("C46", CPU), ("C48", CPU), ("C50", CPU))
"""Claims that the README shows, and the machine of their verdict."""


def value(name: str) -> Callable[[Callable[[Machines], str]], Callable[[Machines], str]]:
    """Register a function that fills the marker ``name``."""

    def store(function: Callable[[Machines], str]) -> Callable[[Machines], str]:
        VALUES[name] = function
        return function

    return store


def fill(text: str, machines: Machines, path: Path) -> str:
    """Return the ``text`` of ``path`` with every marker filled.

    `RowsError` names file and marker where no function fills it, or recorded rows that it needs are missing.
    """

    def one(match: re.Match[str]) -> str:
        marker = f"{path}: the marker measured:{match[2]}"
        if match[2] not in VALUES:
            raise RowsError(f"{marker} is filled by no function: choose one of {', '.join(sorted(VALUES))}")
        try:
            return match[1] + VALUES[match[2]](machines) + match[3]
        except KeyError as missing:
            text = f"{marker} needs recorded rows for {missing}, and there are none"
            raise RowsError(f"{text}: measure and record them (make reproduce, make record), or take it out") from None

    return MARKED.sub(one, text)


def write_filled(machines: Sequence[Machine], root: Path) -> list[Path]:
    """Fill the markers of the Markdown files in ``root`` and ``root/docs``; return those that have some.

    `RowsError`, as `fill` raises it, before any file is written.
    """
    known = {machine.name: machine for machine in machines}
    paths = sorted([*root.glob("*.md"), *root.glob("docs/*.md")])
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    filled = {path: fill(text, known, path) for path, text in texts.items() if MARKED.search(text)}
    for path, text in filled.items():
        path.write_text(text, encoding="utf-8")
    return list(filled)


@value("machines")
def recorded(machines: Machines) -> str:
    """Build a table of the verdicts on each machine, under each of its clocks."""
    lines = [
        [name, total(verdicts), f"[docs/results-{name.partition(',')[0]}.md](docs/results-{name.partition(',')[0]}.md)"]
        for name, verdicts in columns(list(machines.values())).items()
    ]
    return "\n".join(["\n", *markdown(("recorded on", "verdicts", "results"), lines), "\n"])


@value("claims")
def claims(machines: Machines) -> str:
    """Build a table of `CLAIMS`; where another clock turns a verdict, name both."""
    lines = []
    for name, on in CLAIMS:
        machine = machines[on]
        verdict, *others = (next(one for one in found if one.id == name) for found in machine.clocks.values())
        turned = [f"; {OTHER_TIMER}: {marked(one)}" for one in others if one.verdict != verdict.verdict]
        hardware = f"{on}, simulated" if verdict.kind == "simulated" else on
        ours = verdict.our_value or "-"
        link = figure_links(verdict.figure, machine.figures, machine.figures.parents[1])
        about = [verdict.id, verdict.statement, verdict.paper_value, ours, hardware]
        lines.append([*about, marked(verdict) + "".join(turned), link])
    return "\n".join(["\n", *markdown(("", "claim", "paper", "ours", "hardware", "verdict", "figure"), lines), "\n"])


@value("differing")
def differing(machines: Machines) -> str:
    """Build a table of the claims that differ on the GPU, and name those that differ on a CPU."""
    on_gpu, on_cpu = (
        [verdict for verdict in machines[name].verdicts if verdict.verdict == DIFFERS] for name in (GPU, CPU)
    )
    lines = [
        [one.id, one.statement, one.paper_value, one.our_value, one.shape_tested, marked(one)] for one in on_gpu
    ]
    table = markdown(("claim", "statement", "paper", "ours", "test of the shape", "verdict"), lines)
    return "\n".join(["\n", *table, "", f"On the CPU: {_ids(on_cpu)}.", "\n"])


@value("holding")
def holding(machines: Machines) -> str:
    """Build a table of the claims whose shape holds on the GPU; name those on a CPU, and those that no table has."""
    on_gpu, on_cpu = ([one for one in machines[name].verdicts if one.verdict in HOLDS] for name in (GPU, CPU))
    lines = [[one.id, one.statement, one.paper_value, one.our_value, marked(one)] for one in on_gpu]
    table = markdown(("claim", "statement", "paper", "ours", "verdict"), lines)
    others = [f"In no table, {name}: {_by_verdict(machines[name])}." for name in (GPU, CPU)]
    return "\n".join(["\n", *table, "", f"On the CPU: {_ids(on_cpu)}. {' '.join(others)}", "\n"])


def _by_verdict(machine: Machine) -> str:
    """Name the claims of a machine that neither hold nor differ, by verdict."""
    found: dict[str, list[Verdict]] = {}
    for one in machine.verdicts:
        if one.verdict not in (*HOLDS, DIFFERS):
            found.setdefault(one.verdict, []).append(one)
    return "; ".join(f"{verdict} {_ids(them)}" for verdict, them in found.items()) or "none"


def _ids(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(verdict.id for verdict in verdicts) or "none"


@value("highlights")
def highlights(machines: Machines) -> str:
    """Build a table of `HIGHLIGHTS`."""
    lines = [
        [what, *((with_unit(found), _ends(found)) if found else ("not measured", "")), f"`{name}`"]
        for name, what, found in _highlighted(machines[GPU])
    ]
    return "\n".join(["\n", *markdown(("on the H200", "measured", "range", "experiment"), lines), "\n"])


def _highlighted(machine: Machine) -> list[tuple[str, str, Found | None]]:
    """Return experiment, name and finding of every highlight; None for one without rows."""
    chosen = []
    for name, wanted in HIGHLIGHTS.items():
        found = public_kernels(machine.chosen) if name not in SOUGHT else find(SOUGHT[name], machine.chosen)
        named = {one.what: one for one in found}
        chosen += [(name, what, named.get(what)) for what in wanted]
    return chosen


def _ends(found: Found) -> str:
    return f"{said(found.least)} to {said(found.most)} ({found.points} points)" if found.points > 1 else "one point"


@value("reliability")
def reliability(machines: Machines) -> str:
    """Build a table of recorded trials for each machine, or say that it has none."""
    parts = []
    for name, machine in machines.items():
        table = trials_table(machine.folder)
        lines = markdown(*table) if table else [NO_TRIALS]
        parts += [f"### {name}", "", *lines, ""]
    return "\n".join(["\n", *parts])


@value("older-rows")
def older_rows(machines: Machines) -> str:
    """Count rows that were measured by other code than is here now, by machine."""
    return ", ".join(f"{older_share(machine.rows)} on {name}" for name, machine in machines.items())


@value("older-figures")
def older_by_machine(machines: Machines) -> str:
    """Name the figures that have such rows, by machine."""
    told = {name: "all" if machine.rows["older"].all() else older_figures(machine.rows) or "none"
            for name, machine in machines.items()}  # fmt: skip
    return "; ".join(f"{name}: {figures}" for name, figures in told.items())


@value("single-runs")
def single_runs(machines: Machines) -> str:
    """Count verdicts on measurements that rest on points with a single undisturbed run, by machine."""
    texts = []
    for name, machine in machines.items():
        judged = [verdict for verdict in machine.verdicts if verdict.verdict in JUDGED and verdict.kind == "measured"]
        texts.append(f"{sum(verdict.once for verdict in judged)} of {len(judged)} ({name})")
    return ", ".join(texts)


@value("gpu-steps")
def gpu_steps(machines: Machines) -> str:
    """Return milliseconds of decode steps on the GPU: without adapters, with one, with 32."""
    named = {one.what: one for one in find(SOUGHT["ext_breakdown"], machines[GPU].chosen)}
    steps = [named[f"decode step of 32 requests, 512 cached tokens, {name}, Llama-2 7B"]
             for name in ("no adapters", "one adapter", "32 adapters")]  # fmt: skip
    without, one, many = (said(step.middle) for step in steps)
    return f"{without} ms without adapters, {one} ms with one for all and {many} ms with 32 different ones"


@value("other-tokens")
def other_tokens(machines: Machines) -> str:
    """Say how many requests of the hours on Ray got other tokens than alone, and how many of these were recomputed."""
    counts = []
    for name, machine in machines.items():
        for panel, hours in _ray_hours(machine, OTHER, NOT_MOVED, *CHECKED).items():
            others, checked = hours[OTHER].sum(), hours[CHECKED].bfill(axis="columns").iloc[:, 0].sum()
            recomputed = others - hours[NOT_MOVED].sum(min_count=len(hours))  # nan: not told
            told = f"; recomputed before: {said(recomputed)}" if recomputed > 0 else ""
            counts.append(f"{said(others)} of {said(checked)} ({name}, {panel}{told})")
    if not counts:
        raise KeyError(RAY)
    return f"Requests that got other tokens than alone, as recorded: {', '.join(counts)}"


@value("killed-runner")
def killed_runner(machines: Machines) -> str:
    """Say how late first tokens were in the hour with a killed runner, and in the one without."""
    told = []
    for name, machine in machines.items():
        hours = _ray_hours(machine, FIRST_TOKENS)
        late = {panel: said(found[FIRST_TOKENS].median() / 1e3) for panel, found in hours.items()}
        if len(late) == len(RAY_HOURS):
            rows = machine.points(HOURS)
            disturbed = rows.loc[rows["panel"] == KILLED, "disturbed"].any()
            told.append(f"{late[KILLED]} instead of {late[RAY]} s ({name}{', disturbed' if disturbed else ''})")
    if not told:
        raise KeyError(KILLED)
    return f"p99 of first tokens, in the paper's seconds: {', '.join(told)}"


def _ray_hours(machine: Machine, *metrics: str) -> dict[str, pd.DataFrame]:
    """Return `metrics` of the hours on Ray that have the first of them, by panel: a row per rule."""
    rows = machine.points(HOURS)
    wide = rows.pivot_table(index=["panel", "system"], columns="metric", values="value").reindex(columns=list(metrics))
    found = wide.dropna(subset=metrics[0])
    return {panel: found.loc[[panel]] for panel in RAY_HOURS if panel in found.index}


@value("streams-on-ray")
def streams_on_ray(machines: Machines) -> str:
    """Say how far the simulation is off for streams of constant rates, by machine."""
    told = []
    for name, machine in machines.items():
        off: dict[str, list[float]] = {}
        for one in predictions(machine.rows, machine.paper):
            if one.panel.startswith(STEADY):
                off.setdefault(one.name, []).append(100 * (one.predicted / one.published - 1))
        spans = [f"{what} {min(found):+.1f} to {max(found):+.1f} %" for what, found in off.items()]
        told += [f"{', '.join(spans)} ({name})"] if spans else []
    if not told:
        raise KeyError(STEADY)
    return f"Simulated over measured: {'; '.join(told)}"


def _quantity(machines: Machines, machine: str, claim: str, name: str) -> str:
    """Return a quantity of a claim, its interval where that is known."""
    verdict = next(one for one in machines[machine].verdicts if one.id == claim)
    values, intervals = _numbers(verdict.quantities), _numbers(verdict.interval)
    return intervals.get(name) or said(float(values[name]))


def _numbers(text: str) -> dict[str, str]:
    """Map quantities to values or intervals in the text of a verdict."""
    return dict(part.split("=", 1) for part in text.split("; ") if part)


for _name, _of in {
    "cpu-decode-growth": (CPU, "C01", "ratio"),
    "speedup-7b": (GPU, "C30", "7B Distinct"),
    "speedup-13b": (GPU, "C30", "13B Distinct"),
}.items():
    VALUES[_name] = partial(_quantity, machine=_of[0], claim=_of[1], name=_of[2])
