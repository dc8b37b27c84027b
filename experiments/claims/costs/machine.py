"""Speeds and floors of a machine, from the calibration of a run.

Roofs are Figure 7's, products the README's figure's, prompts Figure 1's, launches those of Figures 8 and 9, the link
section 5.2's.

What a formula prices is never read from the rows that it prices: a launch comes from the other of Figures 8 and 9, and
the README's products from Figure 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from experiments.claims.fig07 import latency_of
from experiments.claims.rows import NotTestable, Rows, at, curve, model_for, pick
from experiments.facts.models import MODELS, SECONDS
from experiments.harness.schema import ModelConf, model_conf

README = "README backbone-vs-sgmv"
WIDE, OUT = 4096, 11008
"""Widths of the README's projection and of Figure 8; Figure 9 has 4096 on both sides."""

@dataclass(frozen=True)
class Roof:
    """Bandwidth in byte/s, peak in FLOP/s and bytes per element, from the rows of Figure 7."""

    bandwidth: float
    peak: float
    element: int


def roof_of(rows: Rows) -> Roof:
    """Read this machine's roof."""
    lines = pick(rows.figure("7"), panel="roof").set_index("metric")["value"]
    peak = lines[lines.index.str.startswith("peak_")]
    element = 4 if "fp32" in peak.index[0] else 2
    return Roof(1e12 * float(lines["memory_bandwidth_line"]), 1e12 * float(peak.iloc[0]), element)


_OURS = {paper: ours for ours, paper in MODELS.values()}


@cache
def conf_of(model: str) -> ModelConf:
    """Return a model by its name in our rows or in the paper's."""
    return model_conf(_OURS.get(model, model))


def multiplied(conf: ModelConf) -> int:
    """Count the weights that a step multiplies: all but the embedding, which is looked up."""
    return conf.backbone_parameters() - conf.vocab_size * conf.hidden_size


class Machine:
    """One machine, as ``rows`` tell it.

    ``graphs``: rows by the clock without the host, where a step replays graphs. ``stated``: constants of a machine
    whose rows do not hold them (``paper_results/a100.csv``). ``launches``: kernels are launched on a device.
    """

    def __init__(self, rows: Rows, graphs: Rows, launches: bool, stated: Mapping[str, float] | None = None) -> None:
        self.rows, self.graphs, self.launches, self.stated = rows, graphs, launches, stated or {}
        self._calls: dict[str, float] = {}
        self._products: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    @cached_property
    def _roof(self) -> Roof:
        return roof_of(self.rows)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a large copy."""
        return self._roof.bandwidth * self.stated.get("attained_bandwidth", 1.0)

    @cached_property
    def peak(self) -> float:
        """FLOP per second of a large product."""
        return self._roof.peak * self.stated.get("attained_peak", 1.0)

    @cached_property
    def element(self) -> int:
        """Bytes of a number."""
        return self._roof.element

    def _projection(self, launched: str) -> tuple[np.ndarray, np.ndarray]:
        """Rows, and seconds per weight: the measured product without its launch, which a step hides, or its bytes.

        ``launched``: figure that the launch is for, as of `call`.
        """
        if launched not in self._products:
            self._products[launched] = self._product(launched)
        return self._products[launched]

    def _product(self, launched: str) -> tuple[np.ndarray, np.ndarray]:
        latency = curve(self.rows.figure(README), "latency", system="backbone X@W")
        launch = self.call(launched) if self.launches else 0.0
        seconds = (1e-6 * latency.to_numpy() - launch) / (WIDE * OUT)
        return latency.index.to_numpy(dtype=float), np.maximum(seconds, self.element / self.bandwidth)

    @cached_property
    def _prompt_flops(self) -> float:
        """FLOP per second of the products of prompts: the best measured, as a ceiling is."""
        frame = pick(self.rows.figure("1"), panel="prefill", metric="step_latency")
        model = model_for(frame, "7B")
        frame = pick(frame, model=model)
        flop = 2 * multiplied(conf_of(model)) * frame["batch_size"] * frame["seq_len"]
        return float((flop / (1e-3 * frame["value"])).max())

    def weights(self, count: float, rows: float, figure: str = "") -> float:
        """Seconds of a product of ``rows`` rows with ``count`` weights, whose bytes and FLOP the measured one holds."""
        if figure == README:
            return count * max(self.element / self.bandwidth, 2 * rows / self._prompt_flops)
        sizes, seconds = self._projection("9" if figure == "9" else README)
        if rows > sizes[-1]:
            return count * max(seconds[0], 2 * rows / self.peak)
        return count * float(np.interp(rows, sizes, seconds))

    def numbers(self, count: float) -> float:
        """Seconds to move ``count`` numbers."""
        return count * self.element / self.bandwidth

    def call(self, figure: str) -> float:
        """Seconds of a launch alone, by the clock of ``rows``: half of SGMV's two on one row, in another figure."""
        if figure not in self._calls:
            self._calls[figure] = self._call(figure)
        return self._calls[figure]

    def _call(self, figure: str) -> float:
        source, rank, out = ("8", 16, OUT) if figure == "9" else ("9", 8, WIDE)
        latency = 1e-6 * at(latency_of(self.rows, "SGMV", "Distinct", source, rank), 1)
        moved = rank * (WIDE + out) + WIDE + 2 * out
        return max(0.0, latency - self.numbers(moved)) / 2

    def kernel(self, figure: str) -> float:
        """Seconds of a launch on a device; NotTestable on a CPU, whose calls run where they are made."""
        if not self.launches:
            raise NotTestable("what is saved here are kernel launches, and a CPU launches none")
        return self.call(figure)

    @cached_property
    def queued(self) -> float:
        """Seconds of one more launch within a step."""
        if (stated := self.stated.get("queued_launch")) is not None:
            return stated * SECONDS["us"]
        return Machine(self.graphs, self.graphs, self.launches).call("10")

    @property
    def lora_calls(self) -> float:
        """Operator calls of a layer: ours take q, k, v and gate, up at once."""
        return self.stated.get("projections", 4)

    def copy_engine(self) -> None:
        """Check that copies run beside products; NotTestable on a CPU."""
        if not self.launches:
            raise NotTestable("a load must run beside a step, and on a CPU it runs on the cores of the step")

    @cached_property
    def link(self) -> float:
        """Bytes per second from the host's memory to the device's."""
        found = pick(self.rows.figure("text 5.2"), panel="model", system="link", metric="bandwidth")
        return 1e9 * float(found["value"].iloc[0])
