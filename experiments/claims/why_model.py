"""Why the claims about steps and layers differ where they do: a sentence each, from rows of Figures 1, 10 and 11."""

import itertools

import pandas as pd

from experiments.claims.fig01 import lengths_of, panel_of
from experiments.claims.fig10 import layers
from experiments.claims.fig11 import LAYERS_7B, Serving
from experiments.claims.finding import why
from experiments.claims.rows import Rows, at, curve, model_for, pick, ratio
from punica.workload.popularity import PAPER_WORKLOADS

LAST = 32


def _parts(short: pd.Series, long: pd.Series, lengths: tuple[float, float], at_long: bool) -> str:
    """How the latency of batch 32 splits into one row alone, further rows and their cached tokens.

    Two curves over the batch at two context lengths decide it: what batch 32 costs more at the longer one is the cache.
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


def _decode(rows: Rows, at_long: bool) -> str:
    frame, model = panel_of(rows, "decode")
    lengths = lengths_of(frame)
    near, far = lengths[0], lengths[-1]
    short, long = (curve(frame, "step_latency", seq_len=length) for length in (near, far))
    return f"{model}: {_parts(short, long, (near, far), at_long)}"


@why("C01")
def short_decode_slows(rows: Rows) -> str:
    """Parts of a step of short contexts."""
    return _decode(rows, at_long=False)


@why("C02")
def long_decode_slows(rows: Rows) -> str:
    """Parts of a step of long contexts."""
    return _decode(rows, at_long=True)


@why("C03")
def order_of_lengths_breaks(rows: Rows) -> str:
    """The two lengths between which the growth falls."""
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
    """Time per token, alone and at the largest batch, where the line fits worst."""
    frame, model = panel_of(rows, "prefill")
    fits = {}
    for length in lengths_of(frame):
        latency = curve(frame, "step_latency", seq_len=length)
        tokens = 1e3 * latency / (latency.index * length)  # us per token
        fits[length] = tokens
    length = max(fits, key=lambda one: fits[one].max() / fits[one].min())
    tokens = fits[length]
    low, high = tokens.idxmin(), tokens.idxmax()
    return (
        f"{model}, len {length:g}: a token takes {tokens.max():.3g} us at batch {high:g} and {tokens.min():.3g} us at "
        f"batch {low:g}; the products run at speeds that differ {tokens.max() / tokens.min():.2f}-fold with their size"
    )


def _layer(rows: Rows, workload: str, at_long: bool) -> str:
    frame, models, short, long = layers(rows)
    role = "7B" if "7B" in models else next(iter(models))
    cells = pick(frame, model=models[role], workload=workload)
    curves = [curve(cells, "layer_latency", seq_len=length) for length in (short, long)]
    return f"{models[role]}, {workload}: {_parts(*curves, (short, long), at_long)}"


@why("C22")
def layer_grows(rows: Rows) -> str:
    """Parts of a layer at the short context, Distinct."""
    return _layer(rows, "Distinct", at_long=False)


@why("C23")
def context_does_not_show(rows: Rows) -> str:
    """Parts of a layer at the long context, Distinct."""
    return _layer(rows, "Distinct", at_long=True)


@why("C24")
def workloads_show(rows: Rows) -> str:
    """What the workload that is furthest from Identical costs more, in time."""
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


@why("C25")
def layers_are_not_the_step(rows: Rows) -> str:
    """What a step has beside its layers."""
    frame, _, short, long = layers(rows)
    cells = pick(frame, model=model_for(frame, "7B"), workload="Identical")
    ends = [LAYERS_7B * at(curve(cells, "layer_latency", seq_len=length), LAST) / 1e3 for length in (short, long)]
    step = Serving(rows, "7B").step_ms() or 0.0
    beside = step - ends[1] if step > ends[1] else step - ends[0]
    return (
        f"{LAYERS_7B} layers take {ends[0]:.3g} to {ends[1]:.3g} ms and a step {step:.3g} ms: {beside:+.3g} ms are "
        "head, sampling, scheduling and steps below 32 rows"
    )
