"""The end of `make reproduce`, for a reader who is new: the claims that carry the paper, and where to look."""

import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.claims.judge import DIFFERS, HOLDS, NOISE, NOT_MEASURED, NOT_TESTABLE
from experiments.claims.table import disturbed_points
from experiments.plots.frames import distinct
from experiments.report.machines import Machine
from experiments.report.major import HOLD, MAJOR, PART, Major

WIDTH = 100
"""Characters of a line."""
HEADS = {
    HOLD: "hold here", PART: "hold here in part", NOISE: "are within noise here", DIFFERS: "do not hold here, and why",
    NOT_TESTABLE: "cannot be shown here",
}  # fmt: skip


def ending(here: Machine, files: Sequence[Path]) -> list[str]:
    """Return the lines; ``files`` are the tables and, last, the page."""
    verdicts, cpu = {one.id: one for one in here.verdicts}, "cpu" in distinct(here.rows, "hardware")
    outcomes = {one.text: one.outcome(verdicts) for one in MAJOR}
    device, scale = (", ".join(distinct(here.rows, name)) or "-" for name in ("device", "scale"))
    lines = [f"The {len(MAJOR)} claims that carry the paper, on {device}, scale {scale}:"]
    if "smoke" in distinct(here.rows, "scale"):
        lines.append("(scale=smoke shows that everything runs: shapes are toys, and their verdicts mean nothing)")
    for outcome, head in HEADS.items():
        chosen = [one for one in MAJOR if outcomes[one.text] == outcome]
        lines += [f"{head} ({len(chosen)})"] if chosen else []
        lines += [_line(one, here, cpu, outcome == HOLD) for one in chosen]
    if missing := [one for one in MAJOR if outcomes[one.text] == NOT_MEASURED]:
        lines.append(f"not measured ({len(missing)}): {', '.join(_ids(one) for one in missing)}")
    known, disturbed = disturbed_points(here.rows)
    noise = [f"Other work on this machine disturbed {sum(disturbed.values())} of {known} points."] if disturbed else []
    words = Counter(one.verdict for one in here.verdicts)
    held, open_ = sum(words[word] for word in HOLDS), words[NOT_MEASURED] + words[NOT_TESTABLE]
    counts = f"{held} hold, {words[DIFFERS]} differ, {open_} were not or cannot be measured here"
    page = Path(os.path.relpath(files[-1])) if files[-1].is_relative_to(Path.cwd()) else files[-1]
    between = len(verdicts) - held - words[DIFFERS] - open_
    return [
        "", *lines, f"All {len(verdicts)} claims: {counts}, {between} are within noise.", *noise,
        f"Look at {page}: figures beside the paper's.",
        f"All claims are in {files[0].name} beside it; their commands, minutes and ranges in REPRODUCING.md.",
    ]  # fmt: skip


def _line(one: Major, here: Machine, cpu: bool, held: bool) -> str:
    """Return the claims and their sentence, and why it does not hold."""
    why = one.on_cpu if cpu else next((each.why for each in here.verdicts if each.id in one.claims and each.why), "")
    room = WIDTH - len(text := f"  {_ids(one):<11} {one.text}") - 2
    return text if held or not why else f"{text}: {textwrap.shorten(why, room, placeholder=' ...')}"


def _ids(one: Major) -> str:
    """Name the claims in few characters, e.g. ``C07,C09-C11``."""
    runs: list[list[str]] = []
    for id in one.claims:
        if runs and int(id[1:]) == int(runs[-1][-1][1:]) + 1:
            runs[-1].append(id)
        else:
            runs.append([id])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}{',' if len(run) == 2 else '-'}{run[-1]}" for run in runs)
