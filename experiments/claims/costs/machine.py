"""Speeds and floors of a machine, from the calibration of a run.

Roofs are Figure 7's, products the README's figure's, prompts Figure 1's, launches those of Figures 8 and 9, the link
section 5.2's. Operators of the framework are those of Figure 8, the README's figure and section 6.

What a formula prices is never read from the rows that it prices: a launch comes from the other of Figures 8 and 9, the
README's products from Figure 1, and the framework's operators from the two other figures.

A CPU differs in three ways. It launches nothing, so that a call has one floor, whatever it runs. Its cores both move
and multiply, so that bytes and FLOP of a product add up. Small operators of a step cost the host what a norm does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from experiments.claims.fig07 import latency_of
from experiments.claims.rows import NotTestable, Rows, at, curve, model_for, pick
from experiments.facts.models import MODELS, SECONDS
from experiments.harness.schema import ModelConf, model_conf

README = "README backbone-vs-sgmv"
NORM = "text 6"
WIDE, OUT = 4096, 11008
"""Widths of the README's projection and of Figure 8; Figure 9 has 4096 on both sides."""
PROJECTION, COPIES, UNFUSED = 1, 3, 8
"""The framework's operators in X @ W, in BMM and in an unfused norm on half-precision rows.

The norm has two conversions, power, mean, addition, root and two products.
"""
KERNELS = 9
"""Kernels of a layer without LoRA (`punica.models.llama`): two norms, four products, rotation with storing, attention,
activation. The released code's are stated."""


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
        self._operators: dict[str, tuple[float, float]] = {}
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

        ``launched``: figure that the launch is for, as of `operators`.
        """
        if launched not in self._products:
            self._products[launched] = self._product(launched)
        return self._products[launched]

    def _product(self, launched: str) -> tuple[np.ndarray, np.ndarray]:
        latency = curve(self.rows.figure(README), "latency", system="backbone X@W")
        launch = self.operators(PROJECTION, launched) if self.launches else 0.0
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
            return count * self._together(self.element / self.bandwidth, 2 * rows / self._prompt_flops)
        sizes, seconds = self._projection(figure if figure in ("8", "9") else README)
        if rows > sizes[-1]:
            return count * self._together(seconds[0], 2 * rows / self.peak)
        return count * float(np.interp(rows, sizes, seconds))

    def _together(self, moving: float, multiplying: float) -> float:
        """Combine bytes and FLOP of a product: a device loads beside the products, a CPU's cores do one after the other
        (a matrix is packed before it is multiplied).
        """
        return max(moving, multiplying) if self.launches else moving + multiplying

    def shared_out(self, count: float, blocks: float) -> float:
        """Seconds in which ``blocks`` blocks read ``count`` numbers.

        Where kernels split no head's context and no adapter's rows, a block has one processor with its share of the
        bandwidth, and few blocks leave the rest unused.
        """
        return self.numbers(count) * max(1.0, self.stated.get("processors", 0) / blocks)

    def numbers(self, count: float) -> float:
        """Seconds to move ``count`` numbers."""
        return count * self.element / self.bandwidth

    def call(self, figure: str) -> float:
        """Seconds of a launch alone, by the clock of ``rows``: half of SGMV's two on one row, in another figure.

        Of a CPU's call: all of it.
        """
        if figure not in self._calls:
            self._calls[figure] = self._call(figure)
        return self._calls[figure]

    def _call(self, figure: str) -> float:
        source, rank, out = ("8", 16, OUT) if figure == "9" else ("9", 8, WIDE)
        latency = 1e-6 * at(latency_of(self.rows, "SGMV", "Distinct", source, rank), 1)
        moved = rank * (WIDE + out) + WIDE + 2 * out
        return max(0.0, latency - self.numbers(moved)) / self.sgmv_calls

    @property
    def sgmv_calls(self) -> int:
        """Floors of an SGMV: its two launches, or a CPU's call."""
        return 2 if self.launches else 1

    def operators(self, count: int, figure: str) -> float:
        """Seconds of ``count`` operators of the framework in a row without their work, by the clock of ``rows``.

        The host waits for one, and issues the others meanwhile. A CPU's call has one floor.
        """
        if not self._issued:
            return self.call(figure) * (count if self.launches else 1)
        first, more = self._operators_of(figure)
        return first + (count - 1) * more

    def wait(self, figure: str) -> float:
        """Seconds in which the host waits for the device, beyond issuing an operator."""
        return max(0.0, self.operators(1, figure) - self.operators(2, figure) + self.operators(1, figure))

    @cached_property
    def _issued(self) -> bool:
        """True where the host issues operators, and one clock timed all figures that tell their floors."""
        return self.launches and self.rows.timers(NORM) == self.rows.timers("8") == self.rows.timers(README)

    def _operators_of(self, figure: str) -> tuple[float, float]:
        """Seconds of the first operator and of one more: the line through the two figures that are not ``figure``."""
        if figure not in self._operators:
            left = [read for name, read in self._floors.items() if name != figure][-2:]
            (few, short), (many, long) = (read() for read in left)
            more = max(0.0, (long - short) / (many - few))
            self._operators[figure] = max(0.0, short - (few - 1) * more), more
        return self._operators[figure]

    @property
    def _floors(self) -> dict[str, Callable[[], tuple[int, float]]]:
        """Figure -> number of operators, and their seconds on one row without its bytes."""
        rank = 16
        copied = rank * (WIDE + OUT) + WIDE + 4 * OUT

        def projected() -> tuple[int, float]:
            latency = at(curve(self.rows.figure(README), "latency", system="backbone X@W"), 1)
            return PROJECTION, 1e-6 * latency - self.numbers(WIDE * OUT)

        def multiplied_copies() -> tuple[int, float]:
            return COPIES, 1e-6 * at(latency_of(self.rows, "BMM", "Distinct", "8", rank), 1) - self.numbers(copied)

        def normed() -> tuple[int, float]:
            return UNFUSED, 1e-6 * at(curve(self.rows.figure(NORM), "norm_latency", system="unfused"), 1)

        return {README: projected, "8": multiplied_copies, NORM: normed}

    def device(self) -> None:
        """Check that kernels are launched; NotTestable on a CPU, whose calls run where they are made."""
        if not self.launches:
            raise NotTestable("what is saved here are kernel launches, and a CPU launches none")

    @cached_property
    def queued(self) -> float:
        """Seconds of one more launch within a step; of SGMV's call on a CPU."""
        if (stated := self.stated.get("queued_launch")) is not None:
            return stated * SECONDS["us"]
        return Machine(self.graphs, self.graphs, self.launches).call("10")

    @cached_property
    def small(self) -> float:
        """Seconds of one more small operator within a step."""
        if self.launches:
            return self.queued
        return 1e-6 * at(curve(self.rows.figure(NORM), "norm_latency", system="fused"), 1)

    @property
    def layer_kernels(self) -> float:
        """Kernels of a layer without LoRA."""
        return self.stated.get("layer_kernels", KERNELS)

    @property
    def lora_launches(self) -> float:
        """Launches of a layer's LoRA: ours take q, k, v and gate, up at once."""
        calls = self.stated.get("projections", 4)
        return calls * self.stated.get("lora_kernels", self.sgmv_calls)

    def copy_engine(self) -> None:
        """Check that copies run beside products; NotTestable on a CPU."""
        if not self.launches:
            raise NotTestable("a load must run beside a step, and on a CPU it runs on the cores of the step")

    @cached_property
    def link(self) -> float:
        """Bytes per second from the host's memory to the device's."""
        found = pick(self.rows.figure("text 5.2"), panel="model", system="link", metric="bandwidth")
        return 1e9 * float(found["value"].iloc[0])
