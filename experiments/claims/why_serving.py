"""Why the claims about serving and loading differ where they do: a sentence each, from rows of Figures 11, 12 and 5.2.

Throughput is tokens per step over time per step, so a ratio of throughputs splits into those two.
"""

import itertools

from experiments.claims.fig11 import CONTINUOUS, HF, MIXED, PUNICA, STATIC, Serving, mixed_gains, serving
from experiments.claims.finding import why
from experiments.facts.systems import name_of
from experiments.claims.rows import Rows, pick
from experiments.claims.sec52 import BATCH, LINK, PAPER_LINK, SYSTEM, loads, milliseconds, overlap
from punica.workload.popularity import PAPER_WORKLOADS


def _known(cell: Serving, system: str, workload: str, metric: str) -> float | None:
    frame = cell.frame
    found = frame[(frame["system"] == system) & (frame["workload"] == workload) & (frame["metric"] == metric)]
    return float(found["value"].iloc[0]) if len(found) else None


def split(cell: Serving, fast: tuple[str, str], slow: tuple[str, str]) -> str:
    """How the throughput of one (system, workload) over another's splits into tokens per step and time per step."""
    values = [cell.get(*pair) for pair in (fast, slow)]
    names = [f"{name_of(system)} on {workload}" for system, workload in (fast, slow)]
    text = f"{names[0]} {values[0]:.4g}, {names[1]} {values[1]:.4g} token/s ({values[0] / values[1]:.3g}x)"
    steps = [_known(cell, *pair, "step_latency") for pair in (fast, slow)]
    if None in steps:
        return text
    tokens = [value * float(step or 0) / 1e3 for value, step in zip(values, steps, strict=True)]
    return (
        f"{text}: {tokens[0]:.3g} and {tokens[1]:.3g} tokens per step ({tokens[0] / tokens[1]:.3g}x), in steps of "
        f"{steps[0]:.3g} and {steps[1]:.3g} ms ({float(steps[1] or 0) / float(steps[0] or 1):.3g}x)"
    )


@why("C26", role="7B")
@why("C27", role="13B")
@why("C38", role="70B")
def popularity_shows(rows: Rows, role: str) -> str:
    """The fastest workload against the slowest; and the operator's part of the difference."""
    cell = Serving(rows, role)
    speed = {name: cell.get(PUNICA, name) for name in PAPER_WORKLOADS}
    fast, slow = max(speed, key=lambda name: speed[name]), min(speed, key=lambda name: speed[name])
    return split(cell, (PUNICA, fast), (PUNICA, slow)) + _model_share(cell, fast, slow)


def _model_share(cell: Serving, fast: str, slow: str) -> str:
    """What the model's own time is of the difference between two workloads' steps."""
    whole = [_known(cell, PUNICA, name, "step_latency") for name in (fast, slow)]
    inside = [_model_ms(cell, name) for name in (fast, slow)]
    if None in (*whole, *inside):
        return ""
    of_model, of_step = (float(pair[1] or 0) - float(pair[0] or 0) for pair in (inside, whole))
    return f"; the model's own time makes {of_model:.3g} of the {of_step:.3g} ms between them"


def _model_ms(cell: Serving, workload: str) -> float | None:
    """Milliseconds of a step of Punica that the model takes: a row, or its time over its steps; None when unknown."""
    if (found := _known(cell, PUNICA, workload, "model_step_latency")) is not None:
        return found
    seconds, steps = (_known(cell, PUNICA, workload, metric) for metric in ("model_time", "steps"))
    return None if seconds is None or steps is None else 1e3 * seconds / steps


@why("C28")
def mixing_costs(rows: Rows) -> str:
    """Distinct against Identical, of the model where mixing costs most."""
    cell = min(serving(rows, ("7B", "13B", "70B")), key=lambda one: one.collapse(PUNICA))
    return split(cell, (PUNICA, "Identical"), (PUNICA, "Distinct")) + _model_share(cell, "Identical", "Distinct")


def _best(cell: Serving, workload: str) -> str:
    best = cell.best_baseline(workload)
    return next(
        name for name in (CONTINUOUS, STATIC, HF, "deepspeed") if cell.has(name) and cell.get(name, workload) == best
    )


@why("C29")
def gain_on_distinct(rows: Rows) -> str:
    """Punica against the best baseline, Distinct."""
    cell = Serving(rows, "7B")
    return split(cell, (PUNICA, "Distinct"), (_best(cell, "Distinct"), "Distinct"))


@why("C30")
def gains_out_of_order(rows: Rows) -> str:
    """The two neighbours of Distinct, Uniform, Skewed whose order fails, or the smallest gain."""
    gains, _ = mixed_gains(rows)
    pairs = [(cell, a, b) for cell in gains for a, b in itertools.pairwise(MIXED)]
    cell, before, after = min(pairs, key=lambda pair: gains[pair[0]][pair[1]] / gains[pair[0]][pair[2]])
    change = [cell.get(PUNICA, after) / cell.get(PUNICA, before) - 1]
    change.append(cell.best_baseline(after) / cell.best_baseline(before) - 1)
    return (
        f"{cell.model}: the gain is {gains[cell][before]:.3g} on {before} and {gains[cell][after]:.3g} on "
        f"{after}, as Punica changes by {100 * change[0]:+.1f} % and the best baseline by {100 * change[1]:+.1f} % "
        f"between them; the smallest gain is {min(gain for one in gains.values() for gain in one.values()):.3g}"
    )


@why("C31")
def backbone_is_not_slightly_faster(rows: Rows) -> str:
    """Continuous batching without LoRA against Punica, Identical, of the model that is furthest from 1."""
    cell = max(
        serving(rows, ("7B", "13B", "70B")),
        key=lambda one: abs(one.get(CONTINUOUS, "Identical") / one.get(PUNICA, "Identical") - 1),
    )
    return split(cell, (CONTINUOUS, "Identical"), (PUNICA, "Identical"))


@why("C32")
def order_fails(rows: Rows) -> str:
    """The neighbours that stand in the wrong order, or closest."""
    cell = serving(rows, ("7B", "13B"))[0]
    order = [CONTINUOUS, PUNICA, STATIC, HF]
    pairs = itertools.pairwise(order)
    before, after = min(pairs, key=lambda pair: cell.get(pair[0], "Identical") / cell.get(pair[1], "Identical"))
    return split(cell, (before, "Identical"), (after, "Identical"))


@why("C33")
@why("C39")
def baseline_does_not_collapse(rows: Rows) -> str:
    """Continuous batching of one adapter on Identical against itself on Distinct, of the model where most is left."""
    cell = max(serving(rows, ("7B", "13B", "70B")), key=lambda one: one.collapse(CONTINUOUS))
    return split(cell, (CONTINUOUS, "Identical"), (CONTINUOUS, "Distinct"))


@why("C34")
def baseline_gains(rows: Rows) -> str:
    """Skewed and Uniform against Distinct, beside the batches that each ran."""
    cell = Serving(rows, "7B")
    batches = [_known(cell, CONTINUOUS, name, "mean_batch_size") for name in MIXED]
    if any(batch is None for batch in batches):
        return split(cell, (CONTINUOUS, "Skewed"), (CONTINUOUS, "Distinct"))
    distinct, uniform, skewed = (float(batch or 0) for batch in batches)
    speed = [cell.get(CONTINUOUS, name) / cell.get(CONTINUOUS, "Distinct") for name in MIXED[1:]]
    return (
        f"mean batches of {distinct:.3g}, {uniform:.3g} and {skewed:.3g} (Distinct, Uniform, Skewed) would give "
        f"{uniform / distinct:.3g} and {skewed / distinct:.3g} if steps cost the same; measured {speed[0]:.3g} and "
        f"{speed[1]:.3g}, so steps cost {uniform / distinct / speed[0]:.3g}x and {skewed / distinct / speed[1]:.3g}x"
    )


@why("C36")
def batches_are_not_full(rows: Rows) -> str:
    """What steps of the stream that was served to its end held, beside its limit."""
    cell = Serving(rows, "7B")
    metrics = "stream_requests", "stream_steps", "stream_mean_batch_size"
    stream = cell.longest_stream(PUNICA, "Distinct")
    requests, steps, mean = (stream.get(name, 0.0) for name in metrics)
    return (
        f"the {steps:.0f} steps of a stream of {requests:.0f} requests hold {mean:.3g} on the mean, "
        f"{100 * (1 - mean / cell.batch):.0f} % short of {cell.batch:g}"
    )


@why("C37")
def waste_shows_otherwise(rows: Rows) -> str:
    """Continuous against static batching on Identical."""
    return split(Serving(rows, "7B"), (CONTINUOUS, "Identical"), (STATIC, "Identical"))


@why("C40")
def not_alike(rows: Rows) -> str:
    """70B: continuous batching of one adapter against Punica, Identical."""
    return split(Serving(rows, "70B"), (CONTINUOUS, "Identical"), (PUNICA, "Identical"))


@why("C41")
def lora_adds_more(rows: Rows) -> str:
    """Steps without and with LoRA, Identical."""
    return split(Serving(rows, "7B"), (CONTINUOUS, "Identical"), (PUNICA, "Identical"))


@why("C42")
def loading_takes_longer(rows: Rows) -> str:
    """The link's own part of a load, and the step that it is compared with."""
    frame, model = loads(rows)
    load, link = (milliseconds(frame, "model", "load_time", system) for system in (SYSTEM, LINK))
    bandwidth = float(pick(frame, panel="model", metric="bandwidth", system=LINK)["value"].iloc[0])
    step = milliseconds(overlap(frame), "overlap", "step_latency_alone")
    scaled = load * bandwidth / PAPER_LINK
    return (
        f"{model}: {100 * min(1.0, link / load):.0f} % of the load is the link's own copy; scaled from {bandwidth:.3g} "
        f"to the paper's {PAPER_LINK:g} GB/s it is {scaled:.3g} ms beside a step that takes {step:.3g} ms here, and is "
        f"below 15 % of one of {scaled / 0.15:.3g} ms"
    )


@why("C43")
def load_is_not_hidden(rows: Rows) -> str:
    """The load beside the step, and what the step loses."""
    frame, model = loads(rows)
    beside = overlap(frame)
    load, step = (milliseconds(beside, "overlap", metric) for metric in ("load_time", "step_latency_alone"))
    return (
        f"{model}: a load of {load:.3g} ms beside a step of {BATCH} rows that takes {step:.3g} ms covers "
        f"{100 * load / step:.0f} % of it; it would be half of a step of {2 * load:.3g} ms"
    )
