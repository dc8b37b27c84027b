"""docs/artifact.md: the appendix that artifact evaluations ask for (abstract, check-list, set-up, claims)."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import yaml

from experiments.claims.rows import markdown
from experiments.claims.table import total
from experiments.facts.systems import SYSTEMS, name_of
from experiments.harness.catalogue import experiments
from experiments.harness.schema import REPOSITORY
from experiments.plots.frames import distinct
from experiments.report.machines import Machine, columns
from experiments.report.runs import (
    UNKNOWN,
    all_minutes,
    figure_command,
    figures_of,
    recorded_scales,
    total_minutes,
)
from experiments.report.sought import SERVER
from experiments.report.tables import GENERATED, Table, title_of
from punica.workload import PAPER_WORKLOADS

CITATION = REPOSITORY / "CITATION.cff"
SETUP = """\
**How to access.** A clone of the repository. Nothing else is fetched but packages: weights, adapters and requests are
generated from seeds, so no model hub is needed.

**Hardware.** Any x86-64 Linux machine measures the paper's figures with a smaller model in place of 7B. The paper's
models need an NVIDIA GPU of compute capability 8.0 or newer, and 70B as many as hold it; recorded were those above.

**Software.** Python 3.11 or newer with `venv`, GNU make, git. `constraints.txt` pins every package that `make setup`
installs, and the CPU's rows were measured with them; `constraints-gpu.txt` has the versions of the GPUs' rows.
`Containerfile` has those of `constraints.txt` as an image, for a CPU and for CUDA.

**Installation.** `make setup`; `make test` is the functional check."""
WORKFLOW = """\
1. `make reproduce` measures every figure, draws it beside the paper's and judges the claims. Run again, it continues.
2. `make report` writes the judged claims and `report.html`; `make report ARGS=source=recorded` those of recorded rows.
3. `make check` holds the rows against the expected ranges of the hardware; status 1: one that counts is outside.

Each claim's expected range, command and recorded commit is in [REPRODUCING.md](../REPRODUCING.md), its bounds in
[paper_results/claim_bounds.csv](../paper_results/claim_bounds.csv). A claim that differs is part of the result: its
reason is in `results/<hardware>/claims.md`."""
CUSTOM = """\
Every key of `conf/` is an override: `make figure FIG=fig08 ARGS="workload=skewed"`. Another system, popularity or
figure is one registered function or class. `python -m experiments.commands.workload` writes the requests for a system
outside this repository and scores its answers."""


def write_artifact(machines: Sequence[Machine], target: Path) -> Path:
    """Write the appendix on ``machines``, the recorded ones, to ``target``."""
    about = yaml.safe_load(CITATION.read_text(encoding="utf-8"))
    parts = [GENERATED, "# Artifact appendix", "", "## Abstract", "", _abstract(machines, about), ""]
    parts += ["## Check-list", "", *markdown(("item", "this artifact"), checklist(machines, about)), ""]
    parts += ["## Set-up", "", SETUP, "", "## Workflow", "", WORKFLOW, ""]
    parts += ["## Claims, commands and times", "", *markdown(*claims_table(machines)), ""]
    parts += ["Minutes are those that `make reproduce` gives the figure at that scale.", ""]
    parts += ["## Customisation", "", CUSTOM, ""]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def _abstract(machines: Sequence[Machine], about: dict[str, object]) -> str:
    """Return the abstract of CITATION.cff and the count of verdicts on each machine."""
    said = [f"* {name}: {total(verdicts)}." for name, verdicts in columns(machines).items()]
    return "\n".join([str(about["abstract"]).strip(), "", "Verdicts on the paper's claims, as recorded:", "", *said])


def checklist(machines: Sequence[Machine], about: dict[str, object]) -> list[list[str]]:
    """Return the lines of the check-list."""
    rows = pd.concat([pd.DataFrame(columns=["model", "system", "figure"]), *(machine.rows for machine in machines)])
    systems, own = set(distinct(rows, "system")), rows[rows["figure"] != SERVER]  # whose models servers named
    measuring = total_minutes(experiments(), "laptop")
    packages = {name: ", ".join(distinct(rows, name)) for name in ("python", "torch", "triton") if name in rows}
    return [
        ["Algorithm", "SGMV (segmented gather matrix-vector product), continuous batching over many LoRA adapters"],
        ["Program", "; ".join(name_of(one) for one in SYSTEMS.names() if {one, name_of(one)} & systems)],
        ["Models", f"random weights in the shapes of {', '.join(distinct(own, 'model'))}"],
        ["Data set", f"request streams of the released generator: {', '.join(PAPER_WORKLOADS)}; made from a seed"],
        ["Run-time environment", "; ".join(f"{name} {versions}" for name, versions in packages.items())],
        ["Hardware", "; ".join(f"{one.name}: {', '.join(distinct(one.rows, 'device'))}" for one in machines)],
        ["Metrics", "latency of operators, layers and steps; throughput; time to first token; bytes"],
        ["Output", "rows (CSV), figures (PNG, PDF), verdicts (CSV, Markdown), one HTML page"],
        ["Experiments", str(len(experiments()))],
        ["Disk space, time to prepare", "not recorded"],
        ["Time to complete", f"on a CPU {measuring:.0f} minutes of measuring (`make reproduce`)"],
        ["Licence", str(about["license"])],
        ["Archived", f"DOI {about['doi']}" if "doi" in about else "no DOI yet"],
    ]


def claims_table(machines: Sequence[Machine]) -> Table:
    """Return head and lines: an experiment that claims rest on, those claims, command, minutes, verdicts by machine."""
    clocks = {machine.name: machine.verdicts for machine in machines}
    lines = []
    for one in experiments():
        verdicts = [[each for each in found if one.figure in figures_of(each)] for found in clocks.values()]
        if verdicts and verdicts[0]:
            claims = ", ".join(verdict.id for verdict in verdicts[0])
            counts = [total(found).rpartition(" (")[0] or UNKNOWN for found in verdicts]
            given = all_minutes(one.name, recorded_scales(machines, one.figure))
            lines.append([title_of(one), claims, figure_command(one.name), given, *counts])
    return ["figure", "claims", "command", "minutes (scale)", *clocks], lines
