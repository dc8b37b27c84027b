"""Cost models of steps and of adapter loads.

The paper's A100: Figure 10's layer times their number, the head's bytes, and Figure 1's prefills, in proportion to the
weights for other models; the cluster's 40 GB cards have slower memory. Other GPUs: recorded rows of Figures 1 and 10
and `ext_breakdown`. Nothing is fitted to Figures 11 to 13. Loads: `load_time` of section 5.2 from host
memory; from disk, the waits of `ext_many_adapters` less those from memory, in proportion to the rank. A step beside a
load is not slowed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from experiments.facts.paper import as_rows, read_figure
from experiments.facts.systems import MODELS, SECONDS
from experiments.harness.counted import counted, frame_of, merged
from experiments.harness.schema import CONF, ConfigError, model_conf
from experiments.measure.records import read_rows
from experiments.simulator import LoadCost, ModelBytes, Residuals, StepCost, TimedStep, fit_step_cost, residuals
from experiments.workload import popularity
from punica.cluster import StepWork

PAPER_GPU, CLUSTER_GPU = "a100-80g", "a100-40g"  # testbeds 1 (Figures 1 and 10) and 2 (Figure 13) of the paper
PAPERS = "a100"
STEPS = {"1": "fig01_batching", "10": "fig10_layer", "ext breakdown": "ext_breakdown"}
"""Figure whose rows give the cost of a step -> its file."""
LAYER, STEP = "layer_latency", "step_latency"
Work = Callable[[int, int, int], StepWork]
TimedLoads = Sequence[tuple[int, float]]  # rank and seconds of loads of adapters
LINK_FILE, DISK_FILE = "sec52_adapter_loading", "ext_many_adapters"
FROM_DISK, FROM_MEMORY = "time_to_first_token_from_disk", "time_to_first_token_from_memory"


Cost = TypeVar("Cost", StepCost, LoadCost)


class Fitted(NamedTuple, Generic[Cost]):
    """A cost model, and its residuals by kind of row."""

    cost: Cost
    residuals: Mapping[str, Residuals]


def chosen_cost(name: str, model: str, paper: Path, results: Path) -> StepCost:
    """The steps of ``a100`` (the paper's cards), or of a machine of ``results``."""
    if name == PAPERS:
        return a100_of_the_cluster(paper)
    recorded = {machine: fitted.cost for (machine, what), fitted in recorded_costs(results).items() if what == model}
    if name in recorded:
        return recorded[name]
    known = ", ".join([PAPERS, *sorted(recorded)])
    raise ConfigError(f"figure.cost is {name!r}, no cost model of {model}; it can be {known}")


def panel_of(panel: str, cost: str) -> str:
    """Name ``panel`` with another cost than the paper's; no claim is held against such a panel."""
    return panel if cost == PAPERS else f"{panel}, cost {cost}"


@cache
def model_bytes(model: str) -> ModelBytes:
    conf = model_conf(model)
    head, norms = conf.hidden_size * conf.vocab_size, (2 * conf.num_hidden_layers + 1) * conf.hidden_size
    weights = conf.backbone_parameters() - head - norms  # without the embedding, which is as large as the head
    return ModelBytes(weights, head, conf.kv_elements(), conf.lora_parameters(1), conf.dtype.bytes)


def datasheet(hardware: str) -> tuple[float, float]:
    conf = OmegaConf.load(CONF / "hardware" / f"{hardware}.yaml")
    return 1e9 * conf.bandwidth_gb_s, 1e12 * conf.tflop_s


@cache
def paper_a100(folder: str | Path, role: str) -> Fitted[StepCost]:
    """Fit the paper's 80 GB A100 running ``role`` (7B or 13B); ``folder``: path of `paper_results`."""
    model = model_conf(MODELS[role][0])
    size, size_7b = model_bytes(model.name), model_bytes(MODELS["7B"][0])
    head = size.head * size.itemsize / datasheet(PAPER_GPU)[0]
    figures = {number: as_rows(read_figure(folder, number)) for number in ("1", "10")}
    layers = timed(figures["10"], role, decoding, model.num_hidden_layers, head, metric=LAYER, system="punica")
    prefills = timed(figures["1"], "7B", prefill, metric=STEP, panel="prefill")
    alone = fit_step_cost("prefill", prefills, {"row": 0.0, "kv": 0.0, "rank": 0.0})
    per_token = alone.prefill * size.weights / size_7b.weights
    cost = fit_step_cost(f"A100 80GB {role}, paper Figures 1 and 10", layers, {"prefill": per_token})
    return Fitted(cost, {"layers": residuals(cost, layers), "prefills": residuals(alone, prefills)})


def a100_of_the_cluster(folder: str | Path) -> StepCost:
    """Convert `paper_a100` of 7B to the 40 GB card's bandwidth (datasheets of both)."""
    before, after = datasheet(PAPER_GPU)[0], datasheet(CLUSTER_GPU)[0]
    name = "A100 40GB 7B, paper Figures 1 and 10 (80GB), datasheet bandwidths"
    return paper_a100(folder, "7B").cost.at_bandwidth(model_bytes(MODELS["7B"][0]), before, after, name)


@cache
def recorded_costs(results: Path) -> dict[tuple[str, str], Fitted[StepCost]]:
    """Fit machine and model -> cost model, for the folders of ``results`` whose rows give all of its coefficients."""
    found: dict[tuple[str, str], Fitted[StepCost]] = {}
    for folder in machines(results):
        if all((folder / f"{name}.csv").exists() for name in STEPS.values()):
            rows = {figure: merged(rows_that_count(folder, name)) for figure, name in STEPS.items()}
            shared = set.intersection(*(set(part["model"]) for part in rows.values()))
            found |= {(folder.name, model): recorded_cost(rows, folder.name, model) for model in sorted(shared)}
    return found


def recorded_cost(rows: Mapping[str, pd.DataFrame], hardware: str, model: str) -> Fitted[StepCost]:
    """Fit ``hardware`` running ``model`` to our rows by figure (the keys of `STEPS`)."""
    layers, parts = model_conf(model).num_hidden_layers, rows["ext breakdown"]
    kinds = {
        "decodes": timed(rows["1"], model, decoding, metric=STEP, panel="decode"),
        "prefills": timed(rows["1"], model, prefill, metric=STEP, panel="prefill"),
        "layers": timed(rows["10"], model, decoding, layers, metric=LAYER, system="punica"),
        "steps": [
            step
            for panel in parts["panel"].unique()
            for step in timed(
                parts, model, decoding if panel == "decode" else prefill_among_decodes,
                metric=STEP, system="punica", panel=panel,
            )
        ],
    }  # fmt: skip
    steps = [step for part in kinds.values() for step in part]
    cost = fit_step_cost(f"{hardware} {model}, own rows of figures {', '.join(STEPS)}", steps)
    return Fitted(cost, {name: residuals(cost, part) for name, part in kinds.items() if part})


def decoding(batch: int, length: int, ranks: int) -> StepWork:
    return StepWork(batch, batch * length, 0, ranks)


def prefill(batch: int, length: int, _: int) -> StepWork:
    return StepWork(0, 0, batch * length)


def prefill_among_decodes(batch: int, length: int, ranks: int) -> StepWork:
    return StepWork(batch - 1, (batch - 1) * length, length, ranks)


def timed(
    rows: pd.DataFrame, model: str, work: Work, times: int = 1, rest_s: float = 0.0, **columns: str
) -> list[TimedStep]:
    """Values and medians of ``model`` with these ``columns``, as steps of ``times`` their seconds and ``rest_s`` more;
    ``work``: of a batch size, a length, and the summed ranks.
    """
    for column, value in {"model": model, **columns}.items():
        rows = rows[rows[column] == value]
    found = []
    for row in rows[rows["statistic"].isin(("value", "median"))].to_dict("records"):
        batch, workload = int(row["batch_size"]), str(row["workload"])
        ranks = int(row["rank"]) * popularity(workload).number_of_adapters(batch) if workload else 0
        found.append(TimedStep(work(batch, int(row["seq_len"]), ranks), times * _seconds(row) + rest_s))
    return found


def _seconds(row: Mapping) -> float:
    return float(row["value"]) * SECONDS[str(row["unit"])]


def machines(results: Path) -> list[Path]:
    return sorted(path for path in results.glob("*") if path.is_dir())


def rows_that_count(folder: Path, name: str) -> pd.DataFrame:
    file = folder / f"{name}.csv"
    return counted(frame_of(read_rows(file) if file.exists() else ()))


@cache
def recorded_load_costs(results: Path) -> dict[tuple[str, str], Fitted[LoadCost]]:
    """Fit machine and model -> cost model of loads, for the folders of ``results`` that have rows of both kinds."""
    found = {}
    for folder in machines(results):
        links, reads = (merged(rows_that_count(folder, name)) for name in (LINK_FILE, DISK_FILE))
        for model in sorted(set(links["model"]) & set(reads["model"])):
            host, disk = timed_links(links[links["model"] == model]), timed_reads(reads[reads["model"] == model])
            if host and disk:
                name = f"{folder.name} {model}, loads of own rows of section 5.2 and ext_many_adapters"
                found[folder.name, model] = fitted_loads(name, host, disk)
    return found


def load_cost(results: Path, machine: str, model: str) -> LoadCost:
    """Return the cost model of loads of ``model`` on ``machine``; ConfigError names the machines that have one."""
    known = recorded_load_costs(results)
    if (machine, model) not in known:
        names = ", ".join(name for name, what in known if what == model) or "none"
        raise ConfigError(f"{machine!r} has no recorded loads of {model}; machines that have: {names}")
    return known[machine, model].cost


def timed_links(rows: pd.DataFrame) -> TimedLoads:
    whole = rows["panel"].isin(("model", "overlap")) & (rows["system"] == "punica")
    chosen = rows[whole & (rows["metric"] == "load_time") & (rows["statistic"] == "median")]
    return [(int(row["rank"]), _seconds(row)) for row in chosen.to_dict("records")]


def timed_reads(rows: pd.DataFrame) -> TimedLoads:
    """Read how much later a first token is from disk than from host memory, by panel, rule and popularity."""
    waits = rows["metric"].isin((FROM_DISK, FROM_MEMORY)) & (rows["statistic"] == "median")
    found = []
    for _, part in rows[waits & ~rows["disturbed"].eq(True)].groupby(["panel", "system", "workload"], sort=False):
        seconds = {row["metric"]: _seconds(row) for row in part.to_dict("records")}
        if len(seconds) == 2:
            found.append((int(part["rank"].iloc[0]), seconds[FROM_DISK] - seconds[FROM_MEMORY]))
    return found


def fitted_loads(name: str, host: TimedLoads, disk: TimedLoads) -> Fitted[LoadCost]:
    """Fit a line to ``host`` and a proportion to ``disk``, by least relative squares; neither falls with the rank."""
    from scipy.optimize import nnls

    (ranks, seconds), (disk_ranks, waits) = (np.array(part, dtype=float).T for part in (host, disk))
    line = np.stack([np.ones(len(host)), ranks], axis=1)
    base, per_rank = nnls(line / seconds[:, None], np.ones(len(host)))[0].tolist()
    (disk_rank,) = nnls((disk_ranks / waits)[:, None], np.ones(len(disk)))[0].tolist()
    cost = LoadCost(name, base, per_rank, 0.0, disk_rank)
    from_host, from_disk = cost.host_seconds(ranks) / seconds - 1, cost.disk_seconds(disk_ranks) / waits - 1
    return Fitted(cost, {"loads_from_host": Residuals(from_host), "loads_from_disk": Residuals(from_disk)})
