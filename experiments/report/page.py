"""report.html: one page of every machine beside the paper, with style, script and figures (lossless WebP) inside."""

import base64
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from experiments.claims.judge import VERDICTS, marked, scripts
from experiments.harness.catalogue import experiments
from experiments.plots.frames import distinct
from experiments.report import results
from experiments.report.machines import Machine
from experiments.report.reproducing import title_of

PAGE = "report.html"
TONES = dict(zip(VERDICTS, ("good", "half", "plain", "bad", *["aside"] * 3, *["plain"] * 3), strict=True))
"""Verdict -> class of its badge; `aside` are those that count apart from what measurements reproduce."""
METHOD = 2
"""Effort of the WebP encoder: 0.2 s a figure, and a tenth more bytes than with the most."""


def write_page(machines: Sequence[Machine], pages: Sequence[Path], target: Path) -> Path:
    """Write the page of ``machines``, the first of which comes first, to ``target``; it links their ``pages``."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    figures = list(_figures(machines))
    counts = {machine.name: Counter(one.verdict for one in machine.verdicts) for machine in machines}
    html = environment.get_template("page.html.j2").render(
        names=list(counts),
        summaries={name: {word: found[word] for word in VERDICTS if found[word]} for name, found in counts.items()},
        verdicts=[word for word in VERDICTS if any(found[word] for found in counts.values())],
        claims=list(_claims(machines)),
        machines=[_machine(*one, target) for one in zip(machines, pages, strict=True)],
        figures=figures,
        drawn={figure["name"] for figure in figures},
        found_head=results.FOUND, no_trials=results.NO_TRIALS, legend=results.MARKS, middle=results.MIDDLE, tones=TONES,
    )  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html, encoding="utf-8")
    return target


def _claims(machines: Sequence[Machine]) -> Iterator[dict[str, Any]]:
    for same in zip(*(machine.verdicts for machine in machines), strict=True):
        figures = {name: scripts()[name] for name in same[0].figure.split(", ") if name in scripts()}
        cells = [{"side": machine.name, "verdict": one, "said": marked(one), "order": VERDICTS.index(one.verdict)}
                 for machine, one in zip(machines, same, strict=True)]  # fmt: skip
        yield {"claim": same[0], "figures": figures, "cells": cells}


def _machine(machine: Machine, page: Path, target: Path) -> dict[str, Any]:
    return {
        "name": machine.name,
        "measured": results.measured_on(machine.rows),
        "notes": results.notes(machine),
        "serving": list(results.serving_tables(machine)),
        "findings": list(results.findings(machine)),
        "trials": results.trials_table(machine.folder),
        "files": {page.name: Path(os.path.relpath(page, target.parent)).as_posix()} if page.exists() else {},
    }


def _figures(machines: Sequence[Machine]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each experiment; of machines with the same hardware that of the first one that has it."""
    hardware = [", ".join(distinct(machine.rows, "hardware")) for machine in machines]
    for experiment in experiments():
        chosen: dict[str, tuple[str, Path]] = {}
        for kind, machine in zip(hardware, machines, strict=True):
            if (path := machine.figures / f"{experiment.name}.png").exists():
                chosen.setdefault(kind, (machine.name, path))
        if chosen:
            pictures = [_picture(*one) for one in chosen.values()]
            yield {"name": experiment.name, "title": title_of(experiment), "pictures": pictures}


def _picture(machine: str, path: Path) -> dict[str, Any]:
    image, stream = Image.open(path), BytesIO()
    image.convert("RGB").save(stream, "WEBP", lossless=True, quality=50, method=METHOD)
    data = base64.b64encode(stream.getvalue()).decode("ascii")
    return {"machine": machine, "data": f"data:image/webp;base64,{data}", "width": image.width, "height": image.height}
