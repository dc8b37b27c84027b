"""Claims of Figure 10: one transformer layer with LoRA in a decode step (C22 to C24)."""

import pandas as pd

from experiments.claims.finding import Finding, claim
from experiments.claims.rows import NotMeasured, Rows, curve, models_in, pick, ratio
from punica.workload.popularity import PAPER_WORKLOADS


def layers(rows: Rows) -> tuple[pd.DataFrame, dict[str, str], float, float]:
    """Layer latencies with LoRA, the models that play 7B and 13B, and the lengths that play 512 and 2048."""
    frame = pick(rows.figure("10"), metric="layer_latency", system="punica")
    lengths = sorted(frame["seq_len"].dropna().unique())
    short = 512 if 512 in lengths else lengths[0]
    long = 2048 if 2048 in lengths else lengths[-1]
    return frame, models_in(frame, ("7B", "13B")), short, long


def _increase(frame: pd.DataFrame, model: str, length: float) -> dict[str, float]:
    """Percent by which the latency grows from batch 1 to 32, by workload."""
    cells = pick(frame, model=model, seq_len=length)
    return {name: 100 * (ratio(curve(cells, "layer_latency", workload=name), 32, 1) - 1) for name in PAPER_WORKLOADS}


@claim("C22")
def layer_grows_moderately(rows: Rows) -> Finding:
    """Largest growth from batch 1 to 32 at the short context."""
    frame, models, short, _ = layers(rows)
    growth = {model: _increase(frame, model, short) for model in models.values()}
    largest = max(value for by_workload in growth.values() for value in by_workload.values())
    text = "; ".join(f"{model}: {', '.join(f'{v:.1f}' for v in g.values())}" for model, g in growth.items())
    return Finding({"largest_percent": largest}, f"{text} % at len {short:g} ({', '.join(PAPER_WORKLOADS)})")


@claim("C23")
def context_reduces_the_batching_effect(rows: Rows) -> Finding:
    """Growth at the long context minus growth at the short one: smallest over models and workloads."""
    frame, models, short, long = layers(rows)
    if short == long:
        raise NotMeasured(f"two context lengths are needed, measured: {short:g}")
    growth = [(_increase(frame, model, short), _increase(frame, model, long)) for model in models.values()]
    points = [far[workload] - near[workload] for near, far in growth for workload in PAPER_WORKLOADS]
    text = f"{min(points):.0f} to {max(points):.0f} points ({', '.join(models.values())}, len {short:g} to {long:g})"
    return Finding({"smallest_points": min(points)}, text)


@claim("C24")
def workloads_cost_the_same(rows: Rows) -> Finding:
    """Latency at batch 32 over that of Identical: Distinct, and the other two."""
    frame, models, short, long = layers(rows)
    distinct, shared = [], []
    for model in models.values():
        for length in sorted({short, long}):
            cells = pick(frame, model=model, seq_len=length, batch_size=32)
            latency = curve(cells, "layer_latency", over="workload")
            missing = [name for name in PAPER_WORKLOADS if name not in latency.index]
            if missing:
                raise NotMeasured(f"no batch 32 of {', '.join(missing)} ({model}, len {length:g})")
            distinct.append(float(latency["Distinct"] / latency["Identical"]))
            shared += [float(latency[name] / latency["Identical"]) for name in ("Uniform", "Skewed")]
    text = f"Distinct {', '.join(f'{v:.3f}' for v in distinct)}; Uniform, Skewed {min(shared):.2f}-{max(shared):.2f}"
    quantities = {"distinct": max(distinct), "shared_largest": max(shared), "shared_smallest": min(shared)}
    return Finding(quantities, f"{text} ({', '.join(models.values())}, len {short:g}, {long:g})")
