"""Figures 11 and 12: throughput of serving systems (C25 to C34; C38 to C41, of the largest number of ranks)."""

from collections.abc import Mapping

import numpy as np

from experiments.claims.fig01 import LAST, layers
from experiments.claims.rows import Finding, NotMeasured, Rows, at, claim, curve, model_for, pick, smallest_step
from experiments.facts.systems import MODELS, OTHER_STREAMS, baselines, name_of
from experiments.fig12_textgen_70b import bytes_ratio
from experiments.harness.schema import model_conf
from experiments.workload.popularity import PAPER_WORKLOADS

PUNICA, RELEASED_RULE = "punica", "punica_last_admitted"
CONTINUOUS, STATIC, HF = "continuous_batching", "static_batching", "hf_peft"
MIXED = ("Distinct", "Uniform", "Skewed")
LAYERS_7B, RANK = 32, 16
PAPER_CONTEXT = 683
"""Mean context in tokens of the released requests."""
PAPER_GPUS = 8
"""GPUs over which the paper cuts 70B."""


class Serving:
    """Throughput in token/s of one model, by system and workload, at batch 32, on the most GPUs. A ratio is the median
    over the repeats that both parts have, as each draws other requests.
    """

    def __init__(self, rows: Rows, role: str) -> None:
        self.rows, self.role = rows, role
        frame = rows.figure("12" if role == "70B" else "11")
        self.model = model_for(frame, role)
        frame = pick(frame[~frame["panel"].str.contains(OTHER_STREAMS)], model=self.model)
        gpus = frame["panel"].str.extract(r", tp (\d+)")[0].astype(float).fillna(0).to_numpy()
        sizes = frame["batch_size"].to_numpy(dtype=float)
        self.gpus = int(gpus.max()) or None  # the paper's own rows do not say
        most = gpus == gpus.max()
        self.batch = 32 if (sizes[most] == 32).any() else np.fmax.reduce(sizes[most])
        self.frame = frame[most & ((sizes == self.batch) | np.isnan(sizes))]
        served = self.frame[self.frame["metric"] == "throughput"]
        self._places: dict[tuple[str, str], list[int]] = {}
        for part, place in zip(zip(served["system"], served["workload"], strict=True), served.index, strict=True):
            self._places.setdefault(part, []).append(place)
        self.is_the_papers = self.model == role
        self.as_in_the_paper = self.gpus in (None, PAPER_GPUS)
        self.measured_model = self.model if self.as_in_the_paper else f"{self.model} on {self.gpus} GPUs"

    def has(self, system: str, *workloads: str) -> bool:
        known = {workload for name, workload in self._places if name == system}
        return bool(known) and known >= set(workloads)

    def get(self, system: str, workload: str) -> float:
        return float(np.median(self._numbers((system, workload))))

    def ratio(self, upper: tuple[str, str], lower: tuple[str, str]) -> float:
        """Divide the throughput of one (system, workload) by another's, repeat by repeat."""
        above, below = self._numbers(upper, lower)
        return float(np.median(above / below))

    def flatness(self, system: str) -> float:
        """Divide the smallest throughput over the four workloads by the largest, repeat by repeat."""
        numbers = self._numbers(*((system, workload) for workload in PAPER_WORKLOADS))
        return float(np.median(numbers.min(axis=0) / numbers.max(axis=0)))

    def _numbers(self, *parts: tuple[str, str]) -> np.ndarray:
        """Return throughputs, a line per part, by the repeats that all parts have."""
        for system, workload in parts:
            if (system, workload) not in self._places:
                raise NotMeasured(f"{system} was not measured on {workload} ({self.model})")
            if len(self._places[system, workload]) > 1:
                raise NotMeasured(f"{system} has several values on {workload}; the claim is about one")
        return self.rows.together([self._places[part][0] for part in parts])

    def known(self, system: str, workload: str, metric: str) -> float | None:
        """Return a number of the system's own, None where it gave none."""
        own = (self.frame["system"] == system) & (self.frame["workload"] == workload)
        found = self.frame[own & (self.frame["metric"] == metric)]
        return float(found["value"].iloc[0]) if len(found) else None

    def over_best_baseline(self, workload: str) -> float:
        """Divide Punica by the fastest baseline; continuous batching, which wins in the paper, must be among them."""
        self._numbers((PUNICA, workload), (CONTINUOUS, workload))
        fastest = max(filter(self.has, baselines()), key=lambda system: self.get(system, workload))
        return self.ratio((PUNICA, workload), (fastest, workload))

    def longest_stream(self, system: str, workload: str) -> dict[str, float]:
        """Return the longest stream that was served to its end, by metric; none without one."""
        cells = self.frame[(self.frame["system"] == system) & (self.frame["workload"] == workload)]
        streams = cells[cells["metric"] == "stream_requests"].sort_values("value", kind="stable")
        if streams.empty:
            return {}
        chosen = cells[cells["panel"] == streams["panel"].iloc[-1]]
        return dict(zip(chosen["metric"], chosen["value"].astype(float), strict=True))

    def collapse(self, system: str) -> float:
        return self.ratio((system, "Distinct"), (system, "Identical"))

    def distinct_over_identical_by_bytes(self) -> float:
        """The ratio of throughputs by bytes of steps; without counts of a window, at the paper's mean context."""
        batch = self.known(PUNICA, "Distinct", "mean_batch_size") or self.batch
        context = self.known(PUNICA, "Distinct", "mean_context") or PAPER_CONTEXT
        model = model_conf(MODELS[self.role][0] if self.is_the_papers else self.model)
        over_backbone = bytes_ratio(model, RANK, self.gpus or 1, batch, context)
        return over_backbone + (1 - over_backbone) / batch  # Identical reads one adapter

    def step_ms(self) -> float | None:
        """Return a step's time of Punica on Identical: a row, or tokens / throughput / steps; None when unknown."""
        metrics = ("implied_time_per_step", "total_tokens", "steps")
        implied, tokens, steps = (self.known(PUNICA, "Identical", name) for name in metrics)
        if implied is not None or tokens is None or steps is None:
            return implied
        return 1e3 * tokens / self.get(PUNICA, "Identical") / steps

    def finding(self, quantities: dict[str, float], beside: str = "") -> Finding:
        told = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in quantities.items())
        return Finding(quantities, f"{told}{beside} ({self.measured_model})", models=(self.measured_model,))


def serving(rows: Rows, *roles: str) -> list[Serving]:
    """Return one `Serving` per role, of all without any, that was measured; NotMeasured when none was."""
    found, missing = [], []
    for role in roles or MODELS:
        try:
            found.append(Serving(rows, role))
        except NotMeasured as reason:
            missing.append(str(reason))
    if not found:
        raise NotMeasured("; ".join(dict.fromkeys(missing)))
    return found


@claim("C26", role="7B")
@claim("C27", role="13B")
@claim("C38", role="70B")
def flat(rows: Rows, role: str) -> Finding:
    """Smallest over largest throughput under the paper's rule (D04), and, Distinct, over what bytes allow."""
    cell = Serving(rows, role)
    released = RELEASED_RULE if cell.has(RELEASED_RULE) else PUNICA if cell.is_the_papers else ""
    own, allowed = cell.flatness(PUNICA), cell.distinct_over_identical_by_bytes()
    quantities = {"released_min_over_max": cell.flatness(released)} if released else {}
    beside = "" if released else ", the released rule (D04) was not measured"
    beside += f"; an adapter per request: min/max {own:.3f}, Distinct / Identical {cell.collapse(PUNICA):.3f} where "
    return cell.finding({**quantities, "own_over_bytes": own / allowed}, f"{beside}bytes allow {allowed:.3f}")


@claim("C25")
def layer_times_layers_is_the_step(rows: Rows) -> Finding:
    """Step time of Figure 11 between L x layer(512) and L x layer(2048), as a fraction."""
    cell = Serving(rows, "7B")
    scales = set(cell.frame["scale"])
    if scales != {"paper"} or cell.model not in MODELS["7B"]:
        raise NotMeasured(f"needs the 7B model on full-length requests (rows are {cell.model}, {', '.join(scales)})")
    step = cell.step_ms()
    if step is None:
        raise NotMeasured("figure 11 has no steps and total_tokens of punica, Identical")
    frame, _, short, long = layers(rows)
    if (short, long) != (512, 2048):
        raise NotMeasured(f"figure 10 needs len 512 and 2048, measured: {short:g} and {long:g}")
    cells = pick(frame, model=model_for(frame, "7B"), workload="Identical")
    each = [at(curve(cells, "layer_latency", seq_len=length), LAST) for length in (short, long)]
    low, high = (LAYERS_7B * layer / 1e3 for layer in each)
    place = (step - low) / (high - low)
    return Finding({"place": place}, f"{step:.1f} ms against {low:.1f}-{high:.1f} ms ({cell.model})")


@claim("C28")
def distinct_costs_no_more(rows: Rows) -> Finding:
    """Punica on Distinct over Punica on Identical, with the right index per request and with the released rule."""
    cells = serving(rows)
    quantities, texts = {}, []
    for name, system in (("correct_rule", PUNICA), ("released_rule", RELEASED_RULE)):
        found = {cell.measured_model: cell.collapse(system) for cell in cells if cell.has(system)}
        if found:
            quantities[name] = min(found.values())
            texts.append(f"{name.replace('_', ' ')} {_by_model(found)}")
    return Finding(quantities, "; ".join(texts))


def _by_model(found: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.3f} ({model})" for model, value in found.items())


@claim("C29")
def twelvefold(rows: Rows) -> Finding:
    """Punica over the best baseline, Distinct, 7B."""
    cell = Serving(rows, "7B")
    speedup = cell.over_best_baseline("Distinct")
    compared = "; ".join(name_of(system) for system in reversed(baselines()) if cell.has(system))
    text = f"{speedup:.2f} ({cell.model}, max batch {cell.batch:g}, against {compared})"
    return Finding({"speedup": speedup}, text, models=(cell.model,))


@claim("C30")
def speedup_by_workload(rows: Rows) -> Finding:
    """Punica over the best baseline on Distinct, Uniform, Skewed, for every model that was measured on all three."""
    quantities: dict[str, float] = {}
    rising, models, texts, missing = [], [], [], []
    for cell in serving(rows):
        try:
            gains = {workload: cell.over_best_baseline(workload) for workload in MIXED}
        except NotMeasured as reason:
            missing.append(f"left out: {reason}")
            continue
        if cell.as_in_the_paper:
            quantities |= {f"{cell.role} {workload}": gain for workload, gain in gains.items()}
        texts.append(f"{cell.measured_model}: {', '.join(f'{gain:.2f}' for gain in gains.values())}")
        rising.append(list(gains.values())[::-1])
        models.append(cell.model)
    if not rising:
        raise NotMeasured("; ".join(missing))
    quantities |= {"smallest_step": min(map(smallest_step, rising)), "smallest": min(map(min, rising))}
    return Finding(quantities, "; ".join(texts + missing), models=tuple(models))


@claim("C31")
def backbone_only_is_slightly_faster(rows: Rows) -> Finding:
    """Continuous batching without LoRA over Punica, Identical: the same engine with and without adapters."""
    gain = {cell: cell.ratio((CONTINUOUS, "Identical"), (PUNICA, "Identical")) for cell in serving(rows)}
    papers = {cell.role: value for cell, value in gain.items() if cell.as_in_the_paper}
    text = _by_model({cell.measured_model: value for cell, value in gain.items()})
    return Finding({**papers, "smallest": min(gain.values()), "largest": max(gain.values())}, text)


@claim("C32")
def order_with_one_model(rows: Rows) -> Finding:
    """Throughputs on Identical, largest expected first: smallest ratio of neighbours."""
    ratios, texts = [], []
    for cell in serving(rows, "7B", "13B"):
        statics = [STATIC, *filter(cell.has, ("deepspeed",))]
        value = {name: cell.get(name, "Identical") for name in (CONTINUOUS, PUNICA, *statics, HF)}
        fast, slow = max(statics, key=value.__getitem__), min(statics, key=value.__getitem__)
        pairs = {
            "continuous_over_punica": (CONTINUOUS, PUNICA), "punica_over_static": (PUNICA, fast),
            "static_over_hf": (slow, HF), "continuous_over_static": (CONTINUOUS, fast),
        }  # fmt: skip
        ratios.append({pair: cell.ratio((a, "Identical"), (b, "Identical")) for pair, (a, b) in pairs.items()})
        texts.append(f"{cell.model}: " + "; ".join(f"{name_of(name)} {v:.4g}" for name, v in value.items()))
    return Finding({name: min(one[name] for one in ratios) for name in ratios[0]}, "; ".join(texts))


@claim("C33")
def baselines_collapse(rows: Rows) -> Finding:
    """Continuous batching of one adapter: Distinct over Identical."""
    left = {cell.measured_model: cell.collapse(CONTINUOUS) for cell in serving(rows)}
    return Finding({"largest": max(left.values()), "smallest": min(left.values())}, _by_model(left))


RATIOS = {
    "C34": ("7B", {name.lower(): ((CONTINUOUS, name), (CONTINUOUS, "Distinct")) for name in ("Uniform", "Skewed")}),
    "C39": ("70B", {
        "distinct_over_identical": ((CONTINUOUS, "Distinct"), (CONTINUOUS, "Identical")),
        "speedup": ((PUNICA, "Distinct"), (CONTINUOUS, "Distinct")),
    }),
    "C40": ("70B", {"ratio": ((PUNICA, "Identical"), (CONTINUOUS, "Identical"))}),
}  # fmt: skip
"""Claim -> role of the model, and quantity -> throughput of a (system, workload) over that of another."""


@claim("C34", id="C34")
@claim("C39", id="C39")
@claim("C40", id="C40")
def ratios_of_throughput(rows: Rows, id: str) -> Finding:
    """Gain of baselines of one adapter by shared adapters, their loss without, and Punica over them."""
    role, pairs = RATIOS[id]
    cell = Serving(rows, role)
    return cell.finding({name: cell.ratio(*pair) for name, pair in pairs.items()})


@claim("C41")
def lora_adds_two_milliseconds(rows: Rows) -> Finding:
    """Step time with LoRA minus without (continuous batching on Identical): its share, and ms where steps are known."""
    cell = Serving(rows, "7B")
    without = CONTINUOUS, "Identical"
    shares = {name.lower(): 1 - cell.ratio((PUNICA, name), without) for name in ("Identical", "Distinct")}
    quantities = {f"{name}_share": value for name, value in shares.items()}
    if (step := cell.step_ms()) is not None:
        quantities["extra_ms"] = step * shares["identical"]
    return cell.finding(quantities)
