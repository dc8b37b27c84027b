"""Cost models of a step: the paper's A100 from its Figures 1 and 10, other GPUs from our rows, the rest by a roofline.

The paper's A100: a decode step is Figure 10's layer with LoRA, times their number, and the output head's bytes at the
card's bandwidth. Prefills are Figure 1's, which has 7B alone: another model's prompt rows cost in proportion to its
weights. Both figures are of an 80 GB card; the cluster's 40 GB cards have slower memory (`a100_of_the_cluster`).

Recorded rows: Figure 1 without adapters, `ext_breakdown` with them, layers of Figure 10.

Nothing is fitted to Figures 11 to 13, which simulations predict.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

from experiments.facts.models import MODELS, SECONDS
from experiments.facts.paper import as_rows, read_figure
from experiments.harness.schema import CONF, model_conf
from experiments.simulator import ModelBytes, Residuals, StepCost, TimedStep, fit_step_cost, residuals, roofline_cost
from experiments.workload import popularity
from punica.cluster import StepWork

PAPER_GPU, CLUSTER_GPU = "a100-80g", "a100-40g"
"""Testbeds 1 (Figures 1 and 10) and 2 (Figure 13) of the paper."""


@dataclass(frozen=True)
class FittedCost:
    """A cost model, and its residuals by kind of row."""

    cost: StepCost
    residuals: Mapping[str, Residuals]


@cache
def model_bytes(model: str) -> ModelBytes:
    """Return the bytes of `conf/model/<model>.yaml`."""
    conf = model_conf(model)
    return ModelBytes.llama(
        conf.hidden_size, conf.intermediate_size, conf.num_hidden_layers, conf.num_attention_heads,
        conf.num_key_value_heads, conf.vocab_size, conf.dtype.bytes,
    )  # fmt: skip


def datasheet(hardware: str) -> tuple[float, float]:
    """Read bytes/s and FLOP/s of `conf/hardware/<hardware>.yaml`."""
    conf = OmegaConf.load(CONF / "hardware" / f"{hardware}.yaml")
    return 1e9 * conf.bandwidth_gb_s, 1e12 * conf.tflop_s


def timed_layers(rows: pd.DataFrame, model: str, num_layers: int, rest_s: float = 0.0) -> list[TimedStep]:
    """Read Punica's rows of Figure 10 of ``model`` as decode steps of ``num_layers`` layers and ``rest_s`` seconds."""
    chosen = rows[(rows["metric"] == "layer_latency") & (rows["model"] == model) & (rows["system"] == "punica")]
    return [TimedStep(_decodes(*line[:4]), num_layers * line[4] + rest_s) for line in _values(chosen)]


def timed_prefills(rows: pd.DataFrame, model: str) -> list[TimedStep]:
    """Read rows of Figure 1, panel prefill, of ``model``."""
    chosen = rows[(rows["metric"] == "step_latency") & (rows["model"] == model) & (rows["panel"] == "prefill")]
    return [TimedStep(StepWork(0, 0, batch * length), seconds) for batch, length, _, _, seconds in _values(chosen)]


def timed_decodes(rows: pd.DataFrame, model: str) -> list[TimedStep]:
    """Read rows of Figure 1, panel decode, of ``model``: no adapters."""
    chosen = rows[(rows["metric"] == "step_latency") & (rows["model"] == model) & (rows["panel"] == "decode")]
    return [TimedStep(StepWork(batch, batch * length), seconds) for batch, length, _, _, seconds in _values(chosen)]


def timed_steps(rows: pd.DataFrame, model: str) -> list[TimedStep]:
    """Read rows of `ext_breakdown` of ``model``: decodes, a prompt alone, and a prompt among decodes."""
    chosen = rows[(rows["metric"] == "step_latency") & (rows["model"] == model) & (rows["system"] == "punica")]
    found = []
    for panel, part in chosen.groupby("panel", sort=False):
        for batch, length, rank, workload, seconds in _values(part):
            prompts = 0 if panel == "decode" else 1
            work = _decodes(batch - prompts, length, rank, workload)
            ranks = rank * popularity(workload).number_of_adapters(batch) if workload else 0
            found.append(TimedStep(replace(work, prefill_tokens=prompts * length, adapter_ranks=ranks), seconds))
    return found


def paper_a100(folder: str | Path, role: str) -> FittedCost:
    """Fit the paper's 80 GB A100 running ``role`` (7B or 13B); ``folder``: path of `paper_results`.

    ValueError for a model that Figure 10 does not have.
    """
    model = model_conf(MODELS[role][0])
    size, size_7b = model_bytes(model.name), model_bytes(MODELS["7B"][0])
    head = size.head * size.itemsize / datasheet(PAPER_GPU)[0]
    layers = timed_layers(as_rows(read_figure(folder, "10")), role, model.num_hidden_layers, head)
    if not layers:
        raise ValueError(f"Figure 10 of the paper has no layer of {role!r}; it has 7B and 13B")
    prefills = timed_prefills(as_rows(read_figure(folder, "1")), "7B")
    prefill = fit_step_cost("prefill", prefills, {"row": 0.0, "kv": 0.0, "rank": 0.0})
    per_token = prefill.prefill * size.weights / size_7b.weights
    cost = fit_step_cost(f"A100 80GB {role}, paper Figures 1 and 10", layers, {"prefill": per_token})
    return FittedCost(cost, {"layers": residuals(cost, layers), "prefills": residuals(prefill, prefills)})


def a100_of_the_cluster(folder: str | Path) -> StepCost:
    """Convert `paper_a100` of 7B to the 40 GB card's bandwidth (datasheets of both)."""
    before, after = datasheet(PAPER_GPU)[0], datasheet(CLUSTER_GPU)[0]
    name = "A100 40GB 7B, paper Figures 1 and 10 (80GB), datasheet bandwidths"
    return paper_a100(folder, "7B").cost.at_bandwidth(model_bytes(MODELS["7B"][0]), before, after, name)


def recorded_cost(rows: Mapping[str, pd.DataFrame], hardware: str, model: str) -> FittedCost:
    """Fit ``hardware`` running ``model`` to our rows by figure ("1", "10", "ext breakdown"), those that are there.
    ValueError when they do not give all coefficients.
    """
    layers = model_conf(model).num_hidden_layers
    makers = {
        "decodes": ("1", lambda part: timed_decodes(part, model)),
        "prefills": ("1", lambda part: timed_prefills(part, model)),
        "layers": ("10", lambda part: timed_layers(part, model, layers)),
        "steps": ("ext breakdown", lambda part: timed_steps(part, model)),
    }
    kinds = {name: make(rows[figure]) for name, (figure, make) in makers.items() if figure in rows}
    kinds = {name: steps for name, steps in kinds.items() if steps}
    steps = [step for part in kinds.values() for step in part]
    used = ", ".join(dict.fromkeys(makers[name][0] for name in kinds))
    cost = fit_step_cost(f"{hardware} {model}, own rows of figures {used}", steps)
    return FittedCost(cost, {name: residuals(cost, part) for name, part in kinds.items()})


def datasheet_cost(hardware: str, model: str) -> StepCost:
    """Build the roofline of a GPU that was not timed."""
    return roofline_cost(f"{hardware} {model}, roofline of the datasheet", model_bytes(model), *datasheet(hardware))


def _decodes(batch: int, length: int, rank: int, workload: str) -> StepWork:
    ranks = rank * popularity(workload).number_of_adapters(batch) if workload and batch else 0
    return StepWork(batch, batch * length, 0, ranks)


def _values(rows: pd.DataFrame) -> Iterator[tuple[int, int, int, str, float]]:
    """Yield batch size, length, rank (0 without one), workload and seconds of values and medians."""
    for row in rows[rows["statistic"].isin(("value", "median"))].to_dict("records"):
        rank = 0 if pd.isna(row["rank"]) else int(row["rank"])
        seconds = float(row["value"]) * SECONDS[str(row["unit"])]
        yield int(row["batch_size"]), int(row["seq_len"]), rank, str(row["workload"]), seconds
