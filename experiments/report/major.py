"""The claims that carry the paper: ten sentences, each of one to four claims; the end of `make reproduce`."""

import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.claims import Verdict
from experiments.claims.judge import DIFFERS, HOLDS, NOISE, NOT_MEASURED, NOT_TESTABLE, disturbed_points
from experiments.plots.frames import distinct
from experiments.report.machines import Machine

PART, HOLD = "holds in part", "holds"
WIDTH = 100
"""Characters of a line at the end."""
HEADS = {
    HOLD: "hold here", PART: "hold here in part", NOISE: "are within noise here", DIFFERS: "do not hold here, and why",
    NOT_TESTABLE: "cannot be shown here",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Major:
    """A sentence, its claims with the quantity that a summary shows, and why a CPU cannot show it, as a clause."""

    text: str
    shown_of: Mapping[str, str]
    on_cpu: str = ""

    @property
    def claims(self) -> tuple[str, ...]:
        return tuple(self.shown_of)

    def outcome(self, verdicts: Mapping[str, Verdict]) -> str:
        """Return what the verdicts on its claims come to: `HOLD`, `PART`, or the weakest word of those that decide."""
        words = [verdicts[id].verdict for id in self.claims]
        decided = [word for word in words if word not in (NOT_MEASURED, NOT_TESTABLE)]
        if not decided:
            return NOT_MEASURED if NOT_MEASURED in words else words[0]
        if all(word in HOLDS for word in decided):
            return HOLD if len(decided) == len(words) else PART
        return PART if any(word in HOLDS for word in decided) else DIFFERS if DIFFERS in decided else NOISE


MAJOR = (
    Major("batching makes decode steps nearly free", {"C01": "ratio"}, "products outlast the reading of weights"),
    Major("SGMV is flat for shared adapters",
          {"C07": "latency_ratio", "C09": "ratio", "C10": "largest", "C11": "ratio"},
          "no launch hides there that rows take time"),
    Major("SGMV beats Loop and Gather-BMM", {"C12": "smallest", "C13": "smallest"},
          "a call of ours takes longer at the smallest batches; why is not known"),
    Major("a layer takes as long for all popularities", {"C24": "distinct"}),
    Major("12 times the throughput of other systems", {"C29": "speedup", "C30": "smallest"},
          "a batch gains a CPU less than a GPU"),
    Major("throughput does not depend on popularity (released rule)",
          {"C26": "released_min_over_max", "C27": "released_min_over_max"}, "why is not known"),
    Major("LoRA adds about 2 ms to a token (one adapter)", {"C41": "extra_ms"}),
    Major("an adapter loads within a step", {"C42": "model_ms", "C43": "load_over_step"},
          "a load runs on the cores of the step"),
    Major("70B on several GPUs shows the same", {"C38": "own_over_bytes"},
          "no model stands in for 70B on a CPU"),
    Major("GPUs of a cluster run full or idle (simulated)", {"C46": "share", "C48": "peak", "C50": "per_gpu"}),
)  # fmt: skip


def in_order(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Order verdicts: those of `MAJOR` first, as there, then the others."""
    place = {id: number for number, id in enumerate(id for one in MAJOR for id in one.claims)}
    return sorted(verdicts, key=lambda verdict: place.get(verdict.id, len(place)))


def ending(here: Machine, files: Sequence[Path]) -> list[str]:
    """Return the lines at the end of `make reproduce`; ``files`` are the tables and, last, the page."""
    verdicts = {one.id: one for one in here.verdicts}
    outcomes = {one: one.outcome(verdicts) for one in MAJOR}
    device, scale = (", ".join(distinct(here.rows, name)) or "-" for name in ("device", "scale"))
    lines = [f"The {len(MAJOR)} claims that carry the paper, on {device}, scale {scale}:"]
    if "smoke" in distinct(here.rows, "scale"):
        lines.append("(scale=smoke shows that everything runs: shapes are toys, and their verdicts mean nothing)")
    for outcome, head in HEADS.items():
        chosen = [one for one in MAJOR if outcomes[one] == outcome]
        lines += [f"{head} ({len(chosen)})"] if chosen else []
        lines += [_line(one, here, outcome == HOLD) for one in chosen]
    if missing := [",".join(one.claims) for one in MAJOR if outcomes[one] == NOT_MEASURED]:
        lines.append(f"not measured ({len(missing)}): {', '.join(missing)}")
    known, disturbed = disturbed_points(here.rows)
    noise = [f"Other work on this machine disturbed {sum(disturbed.values())} of {known} points."] if disturbed else []
    words = Counter(one.verdict for one in here.verdicts)
    held, absent = sum(words[word] for word in HOLDS), words[NOT_MEASURED] + words[NOT_TESTABLE]
    counts = f"{held} hold, {words[DIFFERS]} differ, {absent} were not or cannot be measured here"
    page = Path(os.path.relpath(files[-1])) if files[-1].is_relative_to(Path.cwd()) else files[-1]
    return [
        "", *lines, f"All {len(verdicts)} claims: {counts}, {words[NOISE]} are within noise.", *noise,
        f"Look at {page}: figures beside the paper's.",
        f"All claims are in {files[0].name} beside it; their commands, minutes and ranges in REPRODUCING.md.",
    ]  # fmt: skip


def _line(one: Major, here: Machine, held: bool) -> str:
    on_cpu = "cpu" in distinct(here.rows, "hardware")
    why = one.on_cpu if on_cpu else next((each.why for each in here.verdicts if each.id in one.claims and each.why), "")
    room = WIDTH - len(text := f"  {','.join(one.claims):<15} {one.text}") - 2
    return text if held or not why else f"{text}: {textwrap.shorten(why, room, placeholder=' ...')}"
