"""Claims of the text: loading an adapter (C42 to C44), the fused norm (C45), batches by rule (C35 to C37)."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import pandas as pd

from experiments.claims.fig11 import CONTINUOUS, PUNICA, STATIC, Serving
from experiments.claims.rows import SIMULATED, Finding, NotMeasured, Rows, at, claim, curve, model_for, pick
from experiments.facts.systems import MODELS, SECONDS
from experiments.harness.schema import model_conf
from experiments.systems.stream import Timeline
from experiments.workload import MAX_BATCH, popularity, released_lengths

LOADING, NORM, SYSTEM, LINK = "text 5.2", "text 6", "punica", "link"
RANK, BATCH = 16, 32
LONG = 1000
"""Least requests of a stream for C36: in shorter ones ramp and tail show."""
ONE_ADAPTER = "one adapter"


def _loads(rows: Rows) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Rows of rank 16 of the model that plays 7B, those beside decode steps of 32 rows, and the model's name."""
    frame = rows.figure(LOADING)
    model = model_for(frame, "7B")
    frame = pick(frame, model=model, rank=RANK)
    return frame, pick(frame, panel="overlap", batch_size=BATCH, workload="Distinct"), model


def _milliseconds(frame: pd.DataFrame, panel: str, metric: str, system: str = SYSTEM) -> float:
    found = pick(frame, panel=panel, metric=metric, system=system).iloc[0]
    return 1e3 * float(found["value"]) * SECONDS[found["unit"]]


@claim("C42")
def loading_takes_milliseconds(rows: Rows) -> Finding:
    """The link's time over the load, and the load over a decode step; microseconds are of 7B alone."""
    frame, beside, model = _loads(rows)
    load, link = (_milliseconds(frame, "model", "load_time", system) for system in (SYSTEM, LINK))
    bandwidth = float(pick(frame, panel="model", metric="bandwidth", system=LINK)["value"].iloc[0])
    size = float(pick(frame, panel="model", metric="bytes", system=SYSTEM)["value"].iloc[0])
    step = _milliseconds(beside, "overlap", "step_latency_alone")
    quantities = {"link_efficiency": link / load, "load_over_step": load / step}
    layer = 1e3 * _milliseconds(frame, "layer", "load_time")
    if model in MODELS["7B"]:  # a stand-in's microseconds say nothing about 50 us
        quantities |= {"layer_us": layer, "model_ms": load}
    text = (
        f"{layer:.0f} us per layer, {load:.3g} ms per model ({model}, {size / 1e6:.3g} MB): "
        f"{load / step:.3f} of a {step:.3g} ms step; {link / load:.2f} of a plain copy's {bandwidth:.1f} GB/s"
    )
    return Finding(quantities, text, models=(model,))


@claim("C43")
def loading_hides_behind_a_step(rows: Rows) -> Finding:
    """Load beside a decode step at batch 32, over that step; and the step's increase over a step alone."""
    _, beside, model = _loads(rows)
    load, step = (_milliseconds(beside, "overlap", metric) for metric in ("load_time", "step_latency_alone"))
    text = f"{load:.3g} ms / {step:.3g} ms = {load / step:.3f} ({model})"
    quantities = {"load_over_step": load / step}
    try:
        stall = _milliseconds(beside, "overlap", "stall")
    except NotMeasured:
        return Finding(quantities, text)
    quantities["stall_over_step"] = stall / step
    return Finding(quantities, f"{text}; the step beside a load {100 * stall / step:+.1f} %")


@claim("C44")
def lora_is_small(rows: Rows) -> Finding:
    """LoRA parameters of all seven projections at rank 16 over backbone parameters, in percent."""
    models = {role: model_conf(names[0]) for role, names in MODELS.items()}
    percent = {role: 100 * one.lora_parameters(16) / one.backbone_parameters() for role, one in models.items()}
    return Finding(percent, ", ".join(f"{value:.3f} ({name})" for name, value in percent.items()), SIMULATED)


@claim("C45")
def fusing_the_norm(rows: Rows) -> Finding:
    """Operations one by one, over one kernel, at the rows of a full decode step."""
    frame = rows.figure(NORM)
    unfused, fused = (at(curve(frame, "norm_latency", system=name), BATCH) for name in ("unfused", "fused"))
    text = f"{unfused:.3g} us / {fused:.3g} us = {unfused / fused:.1f} for {BATCH} rows"
    return Finding({"unfused_over_fused": unfused / fused}, text)


@lru_cache
def replay(rule: str, workload: str, num_requests: int) -> Counter[int]:
    """Count the steps by batch size of an admission rule, or of the paper's vLLM, on the released requests."""
    lengths, adapters = released_lengths(num_requests), popularity(workload).requests(num_requests).tolist()
    if rule == ONE_ADAPTER:
        return decode_steps_of_one_adapter(lengths.output.tolist(), adapters, MAX_BATCH)
    steps: Counter[int] = Counter()
    for stretch in Timeline(lengths, adapters, rule, MAX_BATCH).stretches:
        steps[len(stretch.members)] += stretch.steps
    return steps


def decode_steps_of_one_adapter(outputs: Sequence[int], adapters: Sequence[int], max_batch: int) -> Counter[int]:
    """Decode steps of the paper's vLLM by batch size: requests join the adapter that runs; prefills run alone."""
    steps_by_batch: Counter[int] = Counter()
    running: list[tuple[int, int]] = []  # new tokens left, and adapter
    waiting = list(zip(outputs, adapters, strict=True))[::-1]
    while waiting or running:
        if waiting and len(running) < max_batch and (not running or running[0][1] == waiting[-1][1]):
            left, adapter = waiting.pop()
            running += [(left - 1, adapter)] if left > 1 else []  # the prefill gave the first token
        else:  # as it is until the next departure
            steps = min(left for left, _ in running)
            steps_by_batch[len(running)] += steps
            running = [(left - steps, adapter) for left, adapter in running if left > steps]
    return steps_by_batch


def share(steps: Counter[int], smallest: int, largest: int) -> float:
    return sum(count for size, count in steps.items() if smallest <= size <= largest) / steps.total()


def mean_batch(steps: Counter[int]) -> float:
    return sum(size * count for size, count in steps.items()) / steps.total()


def _served(rows: Rows) -> Serving | None:
    try:
        return Serving(rows, "7B")
    except NotMeasured:
        return None


@claim("C35")
def baseline_batches_are_small(rows: Rows) -> Finding:
    """Share of steps with at most 3 requests under continuous batching of one adapter, 1000 requests."""
    counts = [replay(ONE_ADAPTER, workload, 1000) for workload in ("Uniform", "Skewed")]
    uniform, skewed = (share(steps, 1, 3) for steps in counts)
    means = " and ".join(f"{mean_batch(steps):.2f}" for steps in counts)
    text = f"{uniform:.3f} Uniform, {skewed:.3f} Skewed; mean batch {means} (1000 requests replayed)"
    cell = _served(rows)
    if cell and (measured := cell.known(CONTINUOUS, "Skewed", "mean_batch_size")) is not None:
        text += f"; mean batch of Skewed {measured:.3g} in this machine's figure 11"
    return Finding({"uniform": uniform, "skewed": skewed}, text, SIMULATED)


@claim("C36")
def punica_runs_full(rows: Rows) -> Finding:
    """Mean batch and share of full steps of Punica's rule; mean batch of a stream served to its end, not of windows."""
    steps = replay("fcfs", "Distinct", 1024)
    quantities = {"mean_batch": mean_batch(steps), "share_full": share(steps, MAX_BATCH, MAX_BATCH)}
    text = f"{quantities['mean_batch']:.1f}; {quantities['share_full']:.3f} (1024 requests replayed)"
    cell = _served(rows)
    stream = cell.longest_stream(PUNICA, "Distinct") if cell else {}
    if stream.get("stream_requests", 0) < LONG:
        return Finding(quantities, text, SIMULATED)
    quantities["measured_mean_batch"] = measured = stream["stream_mean_batch_size"]
    return Finding(quantities, f"{text}; mean batch {measured:.3g} in this machine's figure 11")


@claim("C37")
def static_batching_wastes_steps(rows: Rows) -> Finding:
    """Steps of static over continuous batching on Identical, and the throughput gap where both were measured."""
    static, continuous = (replay(rule, "Identical", 1024).total() for rule in ("static", "fcfs"))
    quantities = {"steps_ratio": static / continuous}
    text = f"{static / continuous:.2f} ({static} / {continuous}, 1024 requests replayed)"
    cell = _served(rows)
    statics = [(name, "Identical") for name in (STATIC, "deepspeed") if cell and cell.has(name)]
    try:
        gaps = [cell.ratio((CONTINUOUS, "Identical"), one) for one in statics] if cell else []
    except NotMeasured:
        gaps = []
    if not gaps:
        return Finding(quantities, text, SIMULATED)
    quantities["smallest_gap"] = min(gaps)
    return Finding(quantities, f"{text}; measured throughput gap {', '.join(f'{gap:.2f}' for gap in gaps)}")
