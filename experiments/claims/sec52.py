"""Claims of section 5.2: loading an adapter takes milliseconds and hides behind a decode step (C42, C43).

C44, the size of an adapter, is arithmetic and needs no rows: `experiments.claims.scheduling`.
"""

import pandas as pd

from experiments.claims.finding import Finding, claim
from experiments.claims.rows import NotMeasured, NotTestable, Rows, model_for, pick
from experiments.facts.models import MODELS, SECONDS

FIGURE = "text 5.2"
SYSTEM, LINK = "punica", "link"
RANK, BATCH = 16, 32
PAPER_LINK = 25.0
"""GB/s that a PCIe Gen4 x16 link gives in practice (D03); the claim is about that link."""


def loads(rows: Rows) -> tuple[pd.DataFrame, str]:
    """Rows of rank 16 of the model that plays 7B, and its name."""
    frame = rows.figure(FIGURE)
    model = model_for(frame, "7B")
    return pick(frame, model=model, rank=RANK), model


def milliseconds(frame: pd.DataFrame, panel: str, metric: str, system: str = SYSTEM) -> float:
    found = pick(frame, panel=panel, metric=metric, system=system).iloc[0]
    return 1e3 * float(found["value"]) * SECONDS[found["unit"]]


def overlap(frame: pd.DataFrame) -> pd.DataFrame:
    """Loads beside decode steps of 32 rows, each with its own adapter."""
    return pick(frame, panel="overlap", batch_size=BATCH, workload="Distinct")


@claim("C42")
def loading_takes_milliseconds(rows: Rows) -> Finding:
    """A model's load over the time that the link needs for its bytes, and over a decode step at batch 32.

    In the second the load is scaled to the paper's link, load x bandwidth / 25 GB/s: a faster link makes the claim
    harder to meet, as the step is not scaled. A layer's microseconds and a model's milliseconds are compared where the
    model is 7B.
    """
    frame, model = loads(rows)
    load, link = (milliseconds(frame, "model", "load_time", system) for system in (SYSTEM, LINK))
    bandwidth = float(pick(frame, panel="model", metric="bandwidth", system=LINK)["value"].iloc[0])
    size = float(pick(frame, panel="model", metric="bytes", system=SYSTEM)["value"].iloc[0])
    step = milliseconds(overlap(frame), "overlap", "step_latency_alone")
    scale = bandwidth / PAPER_LINK
    quantities = {"load_over_link": load / link, "load_over_step": load * scale / step}
    layer = 1e3 * milliseconds(frame, "layer", "load_time")
    if model in MODELS["7B"]:  # a stand-in's microseconds say nothing about 50 us
        quantities |= {"layer_us": layer, "model_ms": load}
    text = (
        f"{layer:.0f} us per layer, {load:.3g} ms per model ({model}, {size / 1e6:.3g} MB): {load / link:.2f}x a plain "
        f"copy at {bandwidth:.1f} GB/s, {100 * load / step:.1f} % of a {step:.3g} ms step "
        f"({100 * load * scale / step:.1f} % if the link had the paper's {PAPER_LINK:g} GB/s)"
    )
    return Finding(quantities, text, models=(model,))


@claim("C43")
def loading_hides_behind_a_step(rows: Rows) -> Finding:
    """Load beside a decode step at batch 32, over that step; and how much longer the step takes than alone.

    A CPU cannot tell: the cores that load are those that compute, there is no stream of its own to load on.
    """
    frame, model = loads(rows)
    beside = overlap(frame)
    load, step = (milliseconds(beside, "overlap", metric) for metric in ("load_time", "step_latency_alone"))
    text = f"{load:.3g} ms / {step:.3g} ms = {load / step:.3f} ({model})"
    if "cpu" in set(beside["hardware"]):
        raise NotTestable(f"on a CPU a load runs on the cores of the step, not on a stream of its own; it took {text}")
    quantities = {"load_over_step": load / step}
    try:
        stall = milliseconds(beside, "overlap", "stall")
    except NotMeasured:
        return Finding(quantities, text)
    quantities["stall_over_step"] = stall / step
    return Finding(quantities, f"{text}; the step beside a load {100 * stall / step:+.1f} %")
