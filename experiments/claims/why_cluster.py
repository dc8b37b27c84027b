"""Why the claims about the cluster differ where they do: a sentence each, from the rows of the hour."""

import numpy as np

from experiments.claims.fig13 import BATCH, IDLE, RATE_S, WINDOW_S, Hour, at_the_peak, excess, mean_from, woken
from experiments.claims.finding import why
from experiments.claims.rows import Rows


@why("C46")
def batches_are_not_full(rows: Rows) -> str:
    """How many GPUs are between idle and full at a time."""
    batches = Hour.of(rows).batches
    active, filling = (batches >= IDLE).sum(), ((batches >= IDLE) & (batches < BATCH - 1)).sum()
    return (
        f"of {active.mean():.3g} active GPUs {filling.mean():.2g} hold fewer than {BATCH - 1} requests; one "
        f"alone that fills or empties would be {1 / active.mean():.2f} of them"
    )


@why("C47")
def throughput_leaves_the_load(rows: Rows) -> str:
    """Where the throughput is furthest from the rate at the hour's mean tokens per request."""
    hour = Hour.of(rows)
    rate, speed = hour.over_time("request_rate"), hour.over_time("throughput_10s_mean")
    means = {start: mean_from(speed, start, RATE_S) for start in rate.index}
    each = sum(means.values()) / rate.sum()
    worst = max(means, key=lambda start: abs(means[start] - each * rate[start]))
    return (
        f"at {each:.4g} tokens per request, the {RATE_S} s from {worst:g} s on would give {each * rate[worst]:.4g} "
        f"token/s and give {means[worst]:.4g}"
    )


@why("C48")
def gpus_are_spread(rows: Rows) -> str:
    """The five minutes with most GPUs beyond need, and their requests."""
    hour = Hour.of(rows)
    ratio = excess(hour)
    start = float(ratio.idxmax())
    active = mean_from(hour.over_time("active_gpus_60s_mean"), start, WINDOW_S)
    held = mean_from(hour.batches.sum(), start, WINDOW_S)
    return (
        f"from {start:g} s on {active:.3g} GPUs are active for {held:.4g} requests, which {np.ceil(held / BATCH):g} "
        "could hold"
    )


@why("C49")
def idle_gpus_wake(rows: Rows) -> str:
    """The GPU that changes most."""
    changes = woken(Hour.of(rows))
    often = (changes > 3).sum()
    return f"GPU {changes.idxmax():g} changes {changes.max()} times, {often} of {len(changes)} more than 3"


@why("C50")
def gpus_are_slower_together(rows: Rows) -> str:
    """Active GPUs around the peak, and what each gives."""
    hour = Hour.of(rows)
    each, gpus = at_the_peak(hour.over_time("throughput_10s_mean"), hour.over_time("active_gpus_60s_mean"))
    return f"around the peak {gpus:.3g} GPUs are active and give {each:.4g} token/s each"
