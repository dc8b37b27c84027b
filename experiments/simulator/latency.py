"""Linear cost model of one step on one GPU, fitted to timed steps.

    seconds = base + decodes * row + kv_tokens * kv + prefill_tokens * prefill + adapter_ranks * rank
              + join, with a prompt

``base`` is the weights of the backbone and the launches, ``kv_tokens`` the tokens whose keys and values are read.
``adapter_ranks`` is the sum of the ranks of the different adapters in the step, whose bytes are read once each.
``join`` is the constant cost of a step with a prompt: the device waits for the host to prepare it, and its rows are
padded. The coefficients are not negative. The fit minimises relative errors, so that short steps count as much as long
ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from punica.cluster.gpu import StepWork


@dataclass(frozen=True)
class TimedStep:
    work: StepWork
    seconds: float


@dataclass(frozen=True)
class StepCost:
    """Coefficients of the cost model in seconds; ``name`` is their source, written into every simulated row."""

    name: str
    base: float
    row: float
    kv: float
    prefill: float
    rank: float
    join: float = 0.0

    def seconds(self, work: StepWork) -> float:
        decoding = self.base + self.row * work.decodes + self.kv * work.kv_tokens
        join = self.join if work.prefill_tokens else 0.0
        return decoding + self.prefill * work.prefill_tokens + self.rank * work.adapter_ranks + join

    def decode_seconds(self, decodes: int, kv_tokens: int, adapter_ranks: int, steps: int) -> list[float]:
        """Return `seconds` of ``steps`` steps in a row of the same requests, the first of which reads ``kv_tokens``."""
        constant, ranks = self.base + self.row * decodes, self.rank * adapter_ranks
        read = range(kv_tokens, kv_tokens + steps * decodes, decodes)
        return [constant + self.kv * tokens + ranks for tokens in read]  # in the order of `seconds`, to the bit

    def slowed(self, factor: float, name: str) -> "StepCost":
        return StepCost(name, **{key: value * factor for key, value in asdict(self).items() if key != "name"})

    def at_bandwidth(self, model: "ModelBytes", before: float, after: float, name: str) -> "StepCost":
        """The same GPU with memory of ``after`` instead of ``before`` bytes/s; launches and arithmetic stay."""
        per_element = model.itemsize * (1 / after - 1 / before)
        return StepCost(
            name, self.base + model.weights * per_element, self.row, self.kv + model.kv * per_element, self.prefill,
            self.rank + model.lora * per_element, self.join,
        )  # fmt: skip


COEFFICIENTS = ("base", "row", "kv", "prefill", "rank", "join")


@dataclass(frozen=True)
class Residuals:
    """Relative errors, predicted over timed minus one: [n] float64; ``largest`` is a magnitude."""

    relative: NDArray[np.float64]

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(self.relative**2)))

    @property
    def largest(self) -> float:
        return float(np.abs(self.relative).max())


def residuals(cost: StepCost, steps: Sequence[TimedStep]) -> Residuals:
    return Residuals(np.array([cost.seconds(step.work) / step.seconds - 1 for step in steps]))


def fit_step_cost(
    name: str, steps: Sequence[TimedStep], known: Mapping[str, float] | None = None, joins: bool = False
) -> StepCost:
    """Fit by least relative squares, coefficients of ``known`` fixed, ``join`` 0 without ``joins``; ValueError for one
    that no step tells, too few steps, and times that are not positive.
    """
    from scipy.optimize import nnls  # half a second, which commands that fit nothing do not wait

    fixed = {**({} if joins else {"join": 0.0}), **(known or {})}
    free = [key for key in COEFFICIENTS if key not in fixed]
    if len(steps) < len(free):
        raise ValueError(f"{len(steps)} steps cannot tell {len(free)} coefficients; time more, or give some as known")
    features = np.array([(1.0, *astuple(step.work), float(step.work.prefill_tokens > 0)) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError(f"times must be positive numbers of seconds, got {seconds.min()!r} as the smallest")
    columns = [COEFFICIENTS.index(key) for key in free]
    for key, column in zip(free, columns, strict=True):
        if not features[:, column].any():
            raise ValueError(f"no step has anything to tell {key!r} from; give it as known, or time steps that have it")
    fixed_part = features @ np.array([fixed.get(key, 0.0) for key in COEFFICIENTS])
    scale = features[:, columns].max(axis=0)  # so that tokens of cache and a constant are of one magnitude
    solution, _ = nnls(features[:, columns] / scale / seconds[:, None], (seconds - fixed_part) / seconds)
    found = dict(zip(free, (solution / scale).tolist(), strict=True))
    return StepCost(name, **{key: found.get(key, fixed.get(key, 0.0)) for key in COEFFICIENTS})


@dataclass(frozen=True)
class ModelBytes:
    """Elements that a step of a Llama model reads: ``weights`` (``head`` of them the output head's), ``kv`` per token,
    ``lora`` per rank of an adapter on all projections; ``itemsize`` bytes each. The embedding is held, not read.
    """

    weights: int
    head: int
    kv: int
    lora: int
    itemsize: int

    def pages(self, memory: float, page_size: int, adapters: int, rank: int) -> int:
        """KV pages that fit into ``memory`` bytes beside weights and ``adapters`` of ``rank``; ValueError for none."""
        left = memory - self.itemsize * (self.weights + self.head + adapters * rank * self.lora)
        pages = int(left // (self.itemsize * self.kv * page_size))
        if pages < 1:
            raise ValueError(f"{memory:.4g} bytes hold no KV page beside the weights; use a larger GPU or more of them")
        return pages
