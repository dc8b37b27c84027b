"""Figures 1 and 10: steps and layers of a model over the batch (C01 to C04, C22 to C24)."""

import itertools

import numpy as np
import pandas as pd

from experiments.claims.finding import Finding, claim, why
from experiments.claims.rows import (
    NotMeasured,
    Rows,
    at,
    curve,
    model_for,
    models_in,
    numbers,
    pick,
    ratio,
    smallest_step,
)
from punica.workload.popularity import PAPER_WORKLOADS

LAST = 32
"""Largest batch of both figures."""


def panel_of(rows: Rows, panel: str) -> tuple[pd.DataFrame, str]:
    frame = pick(rows.figure("1"), panel=panel, metric="step_latency", system="backbone")
    model = model_for(frame, "7B")
    return pick(frame, model=model), model


def lengths_of(frame: pd.DataFrame) -> list[float]:
    return sorted(frame["seq_len"].dropna().unique())


def _decode_growth(rows: Rows, length: int, otherwise: str) -> tuple[float, str]:
    """Divide the latency at batch 32 by batch 1, at ``length``, else at the shortest or longest measured one."""
    frame, model = panel_of(rows, "decode")
    lengths = lengths_of(frame)
    used = length if length in lengths else {"shortest": lengths[0], "longest": lengths[-1]}[otherwise]
    latency = curve(frame, "step_latency", seq_len=used)
    growth = ratio(latency, LAST, 1)
    return growth, f"{growth:.2f} ({model}, len {used:g}: {latency.loc[1]:.4g} -> {latency.loc[32]:.4g} ms)"


@claim("C01")
def short_decode_hardly_slows(rows: Rows) -> Finding:
    """Decode latency at batch 32 over batch 1, short context."""
    growth, text = _decode_growth(rows, 128, "shortest")
    return Finding({"ratio": growth}, text)


@claim("C02")
def long_decode_slows_twofold(rows: Rows) -> Finding:
    """Decode latency growth at the longest context, and the gain in tokens per second that is left."""
    growth, text = _decode_growth(rows, 2048, "longest")
    return Finding({"ratio": growth, "batching_gain": 32 / growth}, f"{text}; batching gains {32 / growth:.1f}x")


@claim("C03")
def batching_gain_shrinks_with_context(rows: Rows) -> Finding:
    """Growth from batch 1 to 32, by context length."""
    frame, model = panel_of(rows, "decode")
    lengths = lengths_of(frame)
    growth = [ratio(curve(frame, "step_latency", seq_len=length), 32, 1) for length in lengths]
    text = f"{numbers(growth)} at len {', '.join(f'{length:g}' for length in lengths)} ({model})"
    return Finding({"smallest_step": smallest_step(growth)}, text)


@claim("C04")
def prefill_is_linear(rows: Rows) -> Finding:
    """Squared correlation of prefill latency with batch size, and growth up to the largest batch per row of it."""
    frame, model = panel_of(rows, "prefill")
    curves = {length: curve(frame, "step_latency", seq_len=length) for length in lengths_of(frame)}
    curves = {length: values for length, values in curves.items() if len(values) >= 3 and 1 in values.index}
    if not curves:
        raise NotMeasured("a line needs prefill at batch 1 and at two more batch sizes")
    fit = {length: float(np.corrcoef(values.index, values)[0, 1] ** 2) for length, values in curves.items()}
    long = [length for length in curves if length >= 512] or [max(curves)]
    per_row = {length: ratio(curves[length], curves[length].index[-1], 1) / curves[length].index[-1] for length in long}
    largest = max(values.index[-1] for values in curves.values())
    text = (
        f"R2 >= {min(fit.values()):.4f}; latency grows {min(per_row.values()):.2f} to {max(per_row.values()):.2f} "
        f"times the batch at len {', '.join(f'{length:g}' for length in long)} ({model}, batch 1 to {largest:g})"
    )
    return Finding({"smallest_r2": min(fit.values()), "smallest_growth_per_row": min(per_row.values())}, text)


def _parts(short: pd.Series, long: pd.Series, lengths: tuple[float, float], at_long: bool) -> str:
    """Split the latency of batch 32 into one row alone, further rows, and their cached tokens: the difference between
    two context lengths is the cache.
    """
    near, far = lengths
    cache = max(0.0, at(long, LAST) - at(short, LAST)) / (LAST * (far - near)) if far > near else 0.0
    length, latency = (far, long) if at_long else (near, short)
    whole, alone = at(latency, LAST), at(latency, 1)
    tokens = (LAST - 1) * length * cache
    rows = whole - alone - tokens
    shares = [100 * part / whole for part in (alone, tokens, rows)]
    cause = "the cache outgrows the weights" if tokens > rows else "rows cost what they compute"
    return (
        f"of batch 32 at len {length:g}, one row alone is {shares[0]:.0f} %, the cached tokens of 31 further ones are "
        f"{shares[1]:.0f} % and their own products {shares[2]:.0f} %: {cause}"
    )


@why("C01", at_long=False)
@why("C02", at_long=True)
def parts_of_a_step(rows: Rows, at_long: bool) -> str:
    frame, model = panel_of(rows, "decode")
    lengths = lengths_of(frame)
    near, far = lengths[0], lengths[-1]
    short, long = (curve(frame, "step_latency", seq_len=length) for length in (near, far))
    return f"{model}: {_parts(short, long, (near, far), at_long)}"


@why("C03")
def order_of_lengths_breaks(rows: Rows) -> str:
    frame, model = panel_of(rows, "decode")
    growth = {length: ratio(curve(frame, "step_latency", seq_len=length), LAST, 1) for length in lengths_of(frame)}
    lengths = list(growth)
    before, after = min(itertools.pairwise(lengths), key=lambda pair: growth[pair[1]] / growth[pair[0]])
    alone = [at(curve(frame, "step_latency", seq_len=length), 1) for length in (before, after)]
    return (
        f"{model}: growth falls from {growth[before]:.3g} (len {before:g}) to {growth[after]:.3g} (len {after:g}), "
        f"while one row takes {alone[0]:.3g} and {alone[1]:.3g} ms"
    )


@why("C04")
def prefill_is_not_linear(rows: Rows) -> str:
    frame, model = panel_of(rows, "prefill")
    fits = {}
    for length in lengths_of(frame):
        latency = curve(frame, "step_latency", seq_len=length)
        fits[length] = 1e3 * latency / (latency.index * length)  # us per token
    length = max(fits, key=lambda one: fits[one].max() / fits[one].min())
    tokens = fits[length]
    low, high = tokens.idxmin(), tokens.idxmax()
    return (
        f"{model}, len {length:g}: a token takes {tokens.max():.3g} us at batch {high:g} and {tokens.min():.3g} us at "
        f"batch {low:g}; the products run at speeds that differ {tokens.max() / tokens.min():.2f}-fold with their size"
    )


def layers(rows: Rows) -> tuple[pd.DataFrame, dict[str, str], float, float]:
    """Return layer latencies with LoRA, the models that play 7B and 13B, and the lengths for 512 and 2048."""
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


@why("C22", at_long=False)
@why("C23", at_long=True)
def parts_of_a_layer(rows: Rows, at_long: bool) -> str:
    frame, models, short, long = layers(rows)
    role = "7B" if "7B" in models else next(iter(models))
    cells = pick(frame, model=models[role], workload="Distinct")
    curves = [curve(cells, "layer_latency", seq_len=length) for length in (short, long)]
    return f"{models[role]}, Distinct: {_parts(*curves, (short, long), at_long)}"


@why("C24")
def workloads_show(rows: Rows) -> str:
    frame, models, short, long = layers(rows)
    furthest = []
    for model in models.values():
        for length in sorted({short, long}):
            latency = curve(pick(frame, model=model, seq_len=length, batch_size=LAST), "layer_latency", over="workload")
            for name in PAPER_WORKLOADS[:3]:
                extra = float(latency[name] - latency["Identical"])
                furthest.append((abs(extra / latency["Identical"]), name, model, length, extra))
    share, name, model, length, extra = max(furthest)
    return (
        f"{model}, len {length:g}: {name} takes {extra:+.3g} us beside Identical at batch 32 ({100 * share:.0f} %); "
        f"seven projections make that {extra / 7:.3g} us for the further adapters of each"
    )
