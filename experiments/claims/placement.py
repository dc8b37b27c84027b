"""Scheduling rules beside one another, and what newer systems claim for theirs, from simulated rows.

A claim is judged like the paper's: from rows, within their span over seeds. Its baseline, as nothing else is the same
as in those papers, is the rule that knows neither adapters nor ranks. "Up to" is held against the panel that is
kindest to it, a claim without a number against all. A system of which the rule has less than what the claim rests on
is not judged.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from experiments.claims.judge import DIFFERS, NOISE, NOT_IMPLEMENTED, SIMULATED_TOO
from experiments.cluster.placed import CAPACITY, FROM_DISK, FROM_HOST
from experiments.cluster.seeds import HIGH, LOW
from experiments.cluster.served import SIMULATED_LENGTH

PLACEMENT, PUNICA, BASELINE = "ext placement", "punica", "least_loaded"
WHOLE_HOUR = 3600
GPU_TIME, WAIT, LOADS = "gpu_seconds", "p99_time_to_first_token", "loads"
KINDS = {CAPACITY: CAPACITY, GPU_TIME: GPU_TIME, WAIT: WAIT, FROM_HOST: LOADS, FROM_DISK: LOADS}
NAMES = {CAPACITY: "throughput of full GPUs", GPU_TIME: "GPU time", WAIT: "p99 of first tokens", LOADS: "loads"}


@dataclass(frozen=True)
class RuleClaim:
    """Claim for ``rule`` by ``source``: ``metric`` is at least ``factor`` times the baseline's, or at most where
    ``lower``; on one panel, or on ``every`` one.
    """

    rule: str
    source: str
    text: str
    metric: str
    factor: float
    lower: bool = True
    every: bool = False


LORASERVE = "LoRAServe (arXiv 2511.22880; here by its abstract, without remote access to adapters)"
CHAMELEON = "Chameleon (MICRO 2025)"
FEWER = "routes to adapters where they are, to load fewer (no number)"
RULE_CLAIMS = (
    RuleClaim("loraserve", LORASERVE, "claims up to 2 times the throughput", CAPACITY, 2.0, lower=False),
    RuleClaim("loraserve", LORASERVE, "claims up to 50 % fewer GPUs", GPU_TIME, 0.5),
    RuleClaim("loraserve", LORASERVE, "claims first tokens up to 9 times earlier", WAIT, 1 / 9),
    RuleClaim("chameleon", CHAMELEON, "claims 1.5 times the throughput", CAPACITY, 1.5, lower=False),
    RuleClaim("chameleon", CHAMELEON, "claims a p99 of first tokens 80.7 % lower", WAIT, 0.193),
    RuleClaim("llm_d", "llm-d", FEWER, LOADS, 1.0, every=True),
    RuleClaim("dynamo", "NVIDIA Dynamo", FEWER, LOADS, 1.0, every=True),
    RuleClaim("ray_serve", "Ray Serve LLM", FEWER, LOADS, 1.0, every=True),
)

LACKS = {"chameleon": "a cluster's queue has no order by size, and slots no cost-aware eviction"}
"""Rule -> what it lacks of its system, so that no claim can be held against it."""


def placement_verdicts(rows: pd.DataFrame) -> list[str]:
    """Describe each rule of `ext_placement` beside Punica's, and judge each claim of a newer system, in a sentence
    each; none without Punica's rows, and no claim without its rule's and the baseline's.
    """
    table = _table(rows[rows["figure"] == PLACEMENT])
    rules = list(dict.fromkeys(table.index.get_level_values("system")))
    if PUNICA not in rules:
        return []
    over, punica = _length(rows), table.loc[PUNICA]
    said = [_sentence(rule, table.loc[rule]["value"] / punica["value"], over) for rule in rules if rule != PUNICA]
    known = [claim for claim in RULE_CLAIMS if {claim.rule, BASELINE} <= set(rules)]
    return [*said, *(one for claim in known for one in _judged(claim, table))]


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    """Arrange value, low and high by rule, panel and metric; loads from host and disk are added up. The seeds' span of
    a sum is no wider than that of its parts.
    """
    parts = []
    for column, suffix in (("value", ""), ("low", LOW), ("high", HIGH)):
        renamed = {f"{name}{suffix}": kind for name, kind in KINDS.items()}
        part = rows.assign(metric=rows["metric"].map(renamed), value=rows["value"].astype(float))
        cell = [name for name in ("system", "panel", "metric", "repeat") if name in part]
        whole = part.dropna(subset="metric").groupby(cell, sort=False, dropna=False)["value"].sum()
        parts.append(whole.groupby(level=cell[:3], sort=False).last().rename(column))
    return pd.concat(parts, axis=1)


def _length(rows: pd.DataFrame) -> str:
    """Name the part of the hour that was simulated."""
    known = rows.loc[(rows["figure"] == PLACEMENT) & (rows["metric"] == SIMULATED_LENGTH), "value"]
    if known.empty:
        return "the part of the hour that was simulated"
    seconds = float(known.iloc[-1])
    return "the whole hour" if seconds >= WHOLE_HOUR else f"{seconds:g} s of the hour"


def _sentence(rule: str, ratios: pd.Series, over: str) -> str:
    """Compare a rule; ``ratios``: values over Punica's, by panel and metric; ``over``: part of the hour."""
    by_metric = ratios.unstack("metric")
    speed, gpus = by_metric[CAPACITY], by_metric[GPU_TIME]
    text = (
        f"Simulated: `{rule}` serves {_span(speed)} times Punica's throughput of full GPUs. Over {over} it takes "
        f"{_span(gpus)} times its GPU time"
    )
    if LOADS in by_metric:
        text += f" and {_span(by_metric[LOADS])} times its loads"
    return f"{text}: lowest and highest of {len(by_metric)} loads."


def _span(values: pd.Series) -> str:
    return f"{values.min():.2f} to {values.max():.2f}"


def _judged(claim: RuleClaim, table: pd.DataFrame) -> Iterator[str]:
    """Judge ``claim`` on the panel that decides; nothing where a row of it is missing."""
    mine, base = (_of(table, rule, claim.metric) for rule in (claim.rule, BASELINE))
    panels = [panel for panel in mine.index if panel in base.index and base.loc[panel, "low"] > 0]
    if not panels:
        return
    ratios = pd.DataFrame({
        "value": mine["value"] / base["value"], "low": mine["low"] / base["high"], "high": mine["high"] / base["low"],
    }).loc[panels]  # fmt: skip
    kindest = ratios["value"].idxmin() if claim.lower else ratios["value"].idxmax()
    panel = ratios["value"].idxmax() if claim.every else kindest
    value, low, high = (float(ratios[name].loc[str(panel)]) for name in ("value", "low", "high"))
    bound = claim.factor
    met, missed = (high <= bound, low > bound) if claim.lower else (low >= bound, high < bound)
    verdict = SIMULATED_TOO if met else DIFFERS if missed else NOISE
    if claim.rule in LACKS:
        verdict = f"{NOT_IMPLEMENTED}, since {LACKS[claim.rule]}"
    extent = "at worst" if claim.every else "at best"
    yield (
        f"Simulated: {claim.source} {claim.text}: `{claim.rule}` has {extent} {value:.2f} times the "
        f"{NAMES[claim.metric]} of `{BASELINE}` ({low:.2f} to {high:.2f} over seeds; {panel}): {verdict}."
    )


def _of(table: pd.DataFrame, rule: str, metric: str) -> pd.DataFrame:
    """Return value, low and high by panel."""
    part = table[(table.index.get_level_values("system") == rule) & (table.index.get_level_values("metric") == metric)]
    return part.dropna().droplevel(["system", "metric"])
