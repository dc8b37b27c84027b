"""Claims of Figure 1: a decode step hardly slows down with the batch, prefill does in proportion (C01 to C04)."""

import numpy as np
import pandas as pd

from experiments.claims.finding import Finding, claim
from experiments.claims.rows import NotMeasured, Rows, curve, model_for, numbers, pick, ratio, smallest_step


def panel_of(rows: Rows, panel: str) -> tuple[pd.DataFrame, str]:
    frame = pick(rows.figure("1"), panel=panel, metric="step_latency", system="backbone")
    model = model_for(frame, "7B")
    return pick(frame, model=model), model


def lengths_of(frame: pd.DataFrame) -> list[float]:
    return sorted(frame["seq_len"].dropna().unique())


def _decode_growth(rows: Rows, length: int, otherwise: str) -> tuple[float, str]:
    """Latency at batch 32 over batch 1, at ``length`` or at the shortest or longest length that was measured."""
    frame, model = panel_of(rows, "decode")
    lengths = lengths_of(frame)
    used = length if length in lengths else {"shortest": lengths[0], "longest": lengths[-1]}[otherwise]
    latency = curve(frame, "step_latency", seq_len=used)
    growth = ratio(latency, 32, 1)
    return growth, f"{growth:.2f} ({model}, len {used:g}: {latency.loc[1]:.4g} -> {latency.loc[32]:.4g} ms)"


@claim("C01")
def short_decode_hardly_slows(rows: Rows) -> Finding:
    """Decode latency at batch 32 over batch 1, short context."""
    growth, text = _decode_growth(rows, 128, "shortest")
    return Finding({"ratio": growth}, text)


@claim("C02")
def long_decode_slows_twofold(rows: Rows) -> Finding:
    """The same at the longest context, and the gain in tokens per second that is left."""
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
