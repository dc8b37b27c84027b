"""Claims about batch sizes and steps, by replaying the released requests; and the size of a LoRA (C35 to C37, C44)."""

from functools import lru_cache

from experiments.claims.fig11 import CONTINUOUS, PUNICA, STATIC, Serving
from experiments.claims.finding import MEASURED, SIMULATED, Finding, claim
from experiments.claims.rows import NotMeasured, Rows
from experiments.facts.models import MODELS
from experiments.harness.schema import model_conf
from punica.workload.lengths import released_lengths
from punica.workload.popularity import popularity
from punica.workload.replay import MAX_BATCH, Replay, replay_continuous, replay_one_adapter, replay_static

LONG = 1000
"""Requests of a stream from which its ramp and tail no longer show: C36 is about no shorter ones."""
RULES = {"continuous": replay_continuous, "one_adapter": replay_one_adapter, "static": replay_static}


@lru_cache
def replay(rule: str, workload: str, num_requests: int) -> Replay:
    """One rule of the paper on the released requests."""
    outputs = released_lengths(num_requests).output.tolist()
    return RULES[rule](outputs, popularity(workload).requests(num_requests).tolist())


def _measured(rows: Rows, system: str, workload: str, metric: str) -> float | None:
    """A number that the engine itself reported for Figure 11, None when it did not."""
    try:
        frame = Serving(rows, "7B").frame
    except NotMeasured:
        return None
    cell = frame[(frame["system"] == system) & (frame["workload"] == workload) & (frame["metric"] == metric)]
    return float(cell["value"].iloc[0]) if len(cell) else None


def _longest_stream(rows: Rows) -> dict[str, float]:
    try:
        return Serving(rows, "7B").longest_stream(PUNICA, "Distinct")
    except NotMeasured:
        return {}


def _beside(name: str, value: float | None) -> str:
    return "" if value is None else f"; {name} {value:.3g} in this machine's figure 11"


@claim("C35")
def baseline_batches_are_small(rows: Rows) -> Finding:
    """Share of steps with at most 3 requests under continuous batching of one adapter, 1000 requests."""
    uniform, skewed = (replay("one_adapter", workload, 1000) for workload in ("Uniform", "Skewed"))
    text = (
        f"{uniform.share(1, 3):.3f} Uniform, {skewed.share(1, 3):.3f} Skewed; mean batch {uniform.mean_batch:.2f} "
        f"and {skewed.mean_batch:.2f} (1000 requests replayed)"
    )
    measured = _beside("mean batch of Skewed", _measured(rows, CONTINUOUS, "Skewed", "mean_batch_size"))
    quantities = {"uniform": uniform.share(1, 3), "skewed": skewed.share(1, 3)}
    return Finding(quantities, text + measured, SIMULATED)


@claim("C36")
def punica_runs_full(rows: Rows) -> Finding:
    """Mean batch and share of full steps under Punica's rule, 1024 requests; and the mean batch of a stream that was
    served to its end. Of windows none counts: they are drawn to hold as many requests as the replay.
    """
    steps = replay("continuous", "Distinct", 1024)
    full = steps.share(MAX_BATCH, MAX_BATCH)
    text = f"{steps.mean_batch:.1f}; {full:.3f} (1024 requests replayed)"
    quantities = {"mean_batch": steps.mean_batch, "share_full": full}
    stream = _longest_stream(rows)
    measured = stream["stream_mean_batch_size"] if stream.get("stream_requests", 0) >= LONG else None
    if measured is not None:
        quantities["measured_mean_batch"] = measured
    return Finding(quantities, text + _beside("mean batch", measured), SIMULATED if measured is None else MEASURED)


@claim("C37")
def static_batching_wastes_steps(rows: Rows) -> Finding:
    """Steps of static over continuous batching on Identical, and the throughput gap where both were measured."""
    static, continuous = (replay(rule, "Identical", 1024).steps for rule in ("static", "continuous"))
    quantities = {"steps_ratio": static / continuous}
    text = f"{static / continuous:.2f} ({static} / {continuous}, 1024 requests replayed)"
    gaps = _throughput_gaps(rows)
    if gaps:
        quantities |= {"smallest_gap": min(gaps), "largest_gap": max(gaps)}
        text += f"; measured throughput gap {', '.join(f'{gap:.2f}' for gap in gaps)}"
    return Finding(quantities, text, MEASURED if gaps else SIMULATED)


def _throughput_gaps(rows: Rows) -> list[float]:
    try:
        cell = Serving(rows, "7B")
        fastest = cell.get(CONTINUOUS, "Identical")
        return [fastest / cell.get(system, "Identical") for system in (STATIC, "deepspeed") if cell.has(system)]
    except NotMeasured:
        return []


@claim("C44")
def lora_is_small(rows: Rows) -> Finding:
    """LoRA parameters of all seven projections at rank 16 over backbone parameters, in percent."""
    models = {role: model_conf(names[0]) for role, names in MODELS.items()}
    percent = {role: 100 * one.lora_parameters(16) / one.backbone_parameters() for role, one in models.items()}
    return Finding(percent, ", ".join(f"{value:.3f} ({name})" for name, value in percent.items()), SIMULATED)
