"""Scheduling rules beside one another, and what newer systems claim for theirs, from simulated rows. The baseline knows
neither adapters nor ranks; "up to" is held against the kindest panel, a claim without a number against all.
"""

from dataclasses import dataclass

import pandas as pd

from experiments.claims.judge import DIFFERS, NOISE, NOT_IMPLEMENTED, SIMULATED_TOO
from experiments.claims.rows import markdown
from experiments.cluster.served import CAPACITY, FROM_DISK, FROM_HOST, HIGH, LOW, SIMULATED_LENGTH

PLACEMENT, PUNICA, BASELINE = "ext placement", "punica", "least_loaded"
GPU_TIME, WAIT, LOADS = "gpu_seconds", "p99_time_to_first_token", "loads"
KINDS = {CAPACITY: CAPACITY, GPU_TIME: GPU_TIME, WAIT: WAIT, FROM_HOST: LOADS, FROM_DISK: LOADS}
NAMES = {CAPACITY: "throughput of full GPUs", GPU_TIME: "GPU time", WAIT: "p99 of first tokens", LOADS: "loads"}


@dataclass(frozen=True)
class RuleClaim:
    """Claim for ``rule``: ``metric`` at least ``factor`` times the baseline's (at most: ``lower``), on one panel or
    ``every`` one. ``lacks``: what the rule has not of its system.
    """

    rule: str
    source: str
    metric: str
    factor: float
    lower: bool = True
    every: bool = False
    lacks: str = ""


LORASERVE = "LoRAServe (arXiv 2511.22880; here by its abstract, without remote access to adapters)"
CHAMELEON, QUEUE = "Chameleon (MICRO 2025)", "no order of the queue by size, no cost-aware eviction"
RULE_CLAIMS = (
    RuleClaim("loraserve", f"{LORASERVE}: up to 2 times the throughput", CAPACITY, 2.0, lower=False),
    RuleClaim("loraserve", f"{LORASERVE}: up to 50 % fewer GPUs", GPU_TIME, 0.5),
    RuleClaim("loraserve", f"{LORASERVE}: first tokens up to 9 times earlier", WAIT, 1 / 9),
    RuleClaim("chameleon", f"{CHAMELEON}: 1.5 times the throughput", CAPACITY, 1.5, lower=False, lacks=QUEUE),
    RuleClaim("chameleon", f"{CHAMELEON}: a p99 of first tokens 80.7 % lower", WAIT, 0.193, lacks=QUEUE),
    RuleClaim("llm_d", "llm-d: fewer loads", LOADS, 1.0, every=True),
    RuleClaim("dynamo", "NVIDIA Dynamo: fewer loads", LOADS, 1.0, every=True),
    RuleClaim("ray_serve", "Ray Serve LLM: fewer loads", LOADS, 1.0, every=True),
)


def placement_tables(rows: pd.DataFrame) -> list[str]:
    """Lines of Markdown: each rule over Punica's, and each claim of a newer system; none without Punica's rows."""
    rows = rows[rows["figure"] == PLACEMENT]
    if PUNICA not in set(rows["system"]):
        return []
    value, low, high = (_by_rule(rows, suffix) for suffix in ("", LOW, HIGH))
    over = value.div(value[PUNICA], axis=0).groupby(level="metric", sort=False)
    ends = zip(over.min().items(), over.max().to_dict("list").values(), strict=True)
    compared = [[str(rule), *(f"{a:.2f} to {b:.2f}" for a, b in zip(low_, high_, strict=True))]
                for (rule, low_), high_ in ends if rule != PUNICA]  # fmt: skip
    metrics = [f"{NAMES[str(name)]} / Punica's" for name in over.groups]
    length = rows.loc[rows["metric"] == SIMULATED_LENGTH, "value"].astype(float)
    part = f"{length.max():g} s of the hour" if len(length) else "the simulated part of the hour"
    loads = len(value.index.unique("panel"))
    lines = [*markdown(("rule", *metrics), compared), "", f"Lowest and highest of {loads} loads, over {part}.", ""]
    judged = [line for one in RULE_CLAIMS if (line := _judged(one, value, low, high))]
    head = ("claim", "rule", f"over `{BASELINE}` (over seeds), the deciding load", "bound", "verdict")
    return [*lines, *(markdown(head, judged) if judged else [])]


def _by_rule(rows: pd.DataFrame, suffix: str) -> pd.DataFrame:
    """Numbers by metric, panel and rule; loads from host and disk are added up."""
    kinds = {f"{name}{suffix}": kind for name, kind in KINDS.items()}
    named = rows.assign(kind=rows["metric"].map(kinds), value=rows["value"].astype(float)).dropna(subset="kind")
    last = named.drop_duplicates(["system", "panel", "metric"], keep="last").drop(columns="metric")
    last = last.rename(columns={"kind": "metric"})
    last = last.sort_values("metric", key=lambda names: names.map([*NAMES].index), kind="stable")
    return last.pivot_table(index=["metric", "panel"], columns="system", values="value", aggfunc="sum", sort=False)


def _judged(claim: RuleClaim, value: pd.DataFrame, low: pd.DataFrame, high: pd.DataFrame) -> list[str]:
    """Judge ``claim`` on the panel that decides; nothing without one."""
    rule, base, bound = claim.rule, BASELINE, claim.factor
    if not {rule, base} <= set(value):
        return []
    ends = {"value": value[rule] / value[base], "low": low[rule] / high[base], "high": high[rule] / low[base]}
    ratios = pd.DataFrame(ends)[low[base] > 0].dropna().query("metric == @claim.metric").droplevel("metric")
    if ratios.empty:
        return []
    panel = str(ratios["value"].idxmax() if claim.lower == claim.every else ratios["value"].idxmin())
    best, least, most = (float(ratios[name][panel]) for name in ends)
    met, missed = (most <= bound, least > bound) if claim.lower else (least >= bound, most < bound)
    verdict = SIMULATED_TOO if met else DIFFERS if missed else NOISE
    how = "at worst" if claim.every else "at best"
    told = f"{NAMES[claim.metric]} {how} {best:.2f} ({least:.2f} to {most:.2f}), {panel}"
    judged = f"{NOT_IMPLEMENTED}: {claim.lacks}" if claim.lacks else verdict
    return [claim.source, rule, told, f"{'at most' if claim.lower else 'at least'} {bound:.3g}", judged]
