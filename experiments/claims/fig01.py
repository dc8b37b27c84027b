"""Figures 1 and 10: steps and layers of a model over the batch (C01 to C04, C22 to C24)."""

from contextlib import suppress

import pandas as pd

from experiments.claims.rows import (
    Finding,
    NotMeasured,
    Rows,
    claim,
    correlation,
    curve,
    model_for,
    numbers,
    pick,
    ratio,
    smallest_step,
)
from experiments.workload.popularity import PAPER_WORKLOADS

LAST = 32
"""Largest batch of both figures."""


def _steps(rows: Rows, panel: str) -> tuple[dict[float, pd.Series], str]:
    """Return Figure 1's latency by batch size at each context length, ascending, and the model that plays 7B."""
    frame = pick(rows.figure("1"), panel=panel, metric="step_latency", system="backbone")
    model = model_for(frame, "7B")
    frame = pick(frame, model=model)
    lengths = sorted(frame["seq_len"].dropna().unique())
    return {length: curve(frame, "step_latency", seq_len=length) for length in lengths}, model


@claim("C01", length=128)
@claim("C02", length=2048)
def decode_growth(rows: Rows, length: int) -> Finding:
    """Decode latency at batch 32 over batch 1, at the length nearest to ``length``; of a long one also the gain."""
    steps, model = _steps(rows, "decode")
    used = min(steps, key=lambda known: abs(known - length))
    growth, latency = ratio(steps[used], LAST, 1), steps[used]
    gain = {"batching_gain": LAST / growth} if length > 128 else {}
    text = f"{growth:.2f} ({model}, len {used:g}: {latency.loc[1]:.4g} -> {latency.loc[LAST]:.4g} ms)"
    return Finding({"ratio": growth, **gain}, text + (f"; batching gains {LAST / growth:.1f}x" if gain else ""))


@claim("C03")
def batching_gain_shrinks_with_context(rows: Rows) -> Finding:
    """Growth from batch 1 to 32, by context length."""
    steps, model = _steps(rows, "decode")
    growth = [ratio(latency, LAST, 1) for latency in steps.values()]
    text = f"{numbers(growth)} at len {numbers(list(steps), 4)} ({model})"
    return Finding({"smallest_step": smallest_step(growth)}, text)


@claim("C04")
def prefill_is_linear(rows: Rows) -> Finding:
    """Squared correlation of prefill latency with batch size, and growth up to the largest batch per row of it."""
    steps, model = _steps(rows, "prefill")
    curves = {length: values for length, values in steps.items() if len(values) >= 3 and 1 in values.index}
    if not curves:
        raise NotMeasured("a line needs prefill at batch 1 and at two more batch sizes")
    fit = min(correlation(values.index, values) ** 2 for values in curves.values())
    long = [length for length in curves if length >= 512] or [max(curves)]
    per_row = [ratio(curves[length], last := curves[length].index[-1], 1) / last for length in long]
    largest = max(values.index[-1] for values in curves.values())
    text = (
        f"R2 >= {fit:.4f}; latency grows {min(per_row):.2f} to {max(per_row):.2f} times the batch at len "
        f"{numbers(long, 4)} ({model}, batch 1 to {largest:g})"
    )
    return Finding({"smallest_r2": fit, "smallest_growth_per_row": min(per_row)}, text)


def layers(rows: Rows) -> tuple[pd.DataFrame, list[str], float, float]:
    """Return layer latencies with LoRA, the models that play 7B and 13B, and the lengths for 512 and 2048."""
    frame = pick(rows.figure("10"), metric="layer_latency", system="punica")
    lengths, models = sorted(frame["seq_len"].dropna().unique()), []
    for role in ("7B", "13B"):
        with suppress(NotMeasured):
            models.append(model_for(frame, role))
    if not models:
        raise NotMeasured("no rows of a 7B or 13B model")
    return frame, models, 512 if 512 in lengths else lengths[0], 2048 if 2048 in lengths else lengths[-1]


def _increase(frame: pd.DataFrame, model: str, length: float) -> dict[str, float]:
    """Percent by which the latency grows from batch 1 to 32, by workload."""
    cells = pick(frame, model=model, seq_len=length)
    return {name: 100 * (ratio(curve(cells, "layer_latency", workload=name), 32, 1) - 1) for name in PAPER_WORKLOADS}


@claim("C22")
def layer_grows_moderately(rows: Rows) -> Finding:
    """Largest growth from batch 1 to 32 at the short context."""
    frame, models, short, _ = layers(rows)
    growth = {model: _increase(frame, model, short) for model in models}
    largest = max(value for by_workload in growth.values() for value in by_workload.values())
    text = "; ".join(f"{model}: {', '.join(f'{v:.1f}' for v in g.values())}" for model, g in growth.items())
    return Finding({"largest_percent": largest}, f"{text} % at len {short:g} ({', '.join(PAPER_WORKLOADS)})")


@claim("C23")
def context_reduces_the_batching_effect(rows: Rows) -> Finding:
    """Growth at the long context minus growth at the short one: smallest over models and workloads."""
    frame, models, short, long = layers(rows)
    if short == long:
        raise NotMeasured(f"two context lengths are needed, measured: {short:g}")
    growth = [(_increase(frame, model, short), _increase(frame, model, long)) for model in models]
    points = [far[workload] - near[workload] for near, far in growth for workload in PAPER_WORKLOADS]
    text = f"{min(points):.0f} to {max(points):.0f} points ({', '.join(models)}, len {short:g} to {long:g})"
    return Finding({"smallest_points": min(points)}, text)


@claim("C24")
def workloads_cost_the_same(rows: Rows) -> Finding:
    """Latency at batch 32 over that of Identical: Distinct, and the other two."""
    frame, models, short, long = layers(rows)
    distinct, shared = [], []
    for model in models:
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
    return Finding(quantities, f"{text} ({', '.join(models)}, len {short:g}, {long:g})")
