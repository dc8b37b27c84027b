"""The claims that carry the paper, in order: ten sentences, each of one to four claims, before the other claims."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.claims import Verdict
from experiments.claims.judge import DIFFERS, HOLDS, NOISE, NOT_MEASURED, NOT_TESTABLE

PART = "holds in part"
HOLD = "holds"


@dataclass(frozen=True)
class Major:
    """A sentence of the paper in plain words, the claims that judge it with the quantity of each that a summary shows,
    and why a CPU cannot show it, as a clause.
    """

    text: str
    shown_of: Mapping[str, str]
    on_cpu: str = ""

    @property
    def claims(self) -> tuple[str, ...]:
        """Ids of its claims."""
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
    Major("throughput does not depend on popularity", {"C26": "released_min_over_max", "C27": "released_min_over_max"},
          "why is not known"),
    Major("LoRA adds about 2 ms to a token", {"C41": "extra_ms"}),
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
