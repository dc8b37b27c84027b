"""Fit the constants of the schedules' estimate to measurements of `experiments.commands.tune`.

    python -m experiments.commands.fit_estimate measurements=outputs/tune/nvidia_h200.jsonl

Prints the constants with which the least estimate loses least: the mean of log(time of the choice / best time) over the
operators' shrinks and expands, with losses above 10 % counted half again. A minute per hundred operators and thousand
trials. They are copied to `schedules.py` by hand, once they make sense.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import differential_evolution

from experiments.benches.operator_pairs import problem_of
from experiments.commands.tune import Times, read_times
from experiments.harness.command import with_options
from experiments.harness.schema import ConfigError
from punica.ops.triton_ops import schedules
from punica.ops.triton_ops.schedules import Gpu, Schedule

CONSTANTS = (
    "SM_RATE", "ROUND", "PROGRAM", "REGISTERS", "SHRINK_STEP", "EXPAND_STEP", "SHRINK_MMA", "EXPAND_MMA", "EPILOGUE",
)  # fmt: skip
SPAN = 10
"""Each constant is searched from a tenth of its present value to ten times it."""
Case = tuple[Callable[[Schedule], float], dict[Schedule, float]]  # estimate, and time of each candidate


@dataclass
class Options:
    """The command line."""

    measurements: str = "outputs/tune/nvidia_h200.jsonl"
    rounds: int = 40  # of the search, 90 trials each
    seed: int = 0


def cases(times: Times, gpu: Gpu) -> list[Case]:
    """The shrinks of each operator with its most frequent expand, and its expands with its most frequent shrink."""
    pairs: dict[Any, dict[Any, float]] = defaultdict(dict)
    for (op, pair), us in times.items():
        if math.isfinite(us):
            pairs[op][pair] = us
    found: list[Case] = []
    for op, timed in pairs.items():
        problem, (shrink, expand) = problem_of(op), (statistics.mode(pair[side] for pair in timed) for side in (0, 1))
        shrinks = {s: us for (s, e), us in timed.items() if e == expand}
        expands = {e: us for (s, e), us in timed.items() if s == shrink}
        found.append((partial(schedules.shrink_us, problem, gpu=gpu), shrinks))
        found.append((partial(schedules.expand_us, problem, partials=shrink.split_k, gpu=gpu), expands))
    return found


def loss(found: list[Case], values: Sequence[float] = ()) -> float:
    """The mean loss of the least estimates, with the constants `values`, which stay set, or as they are."""
    for name, value in zip(CONSTANTS, values, strict=False):
        setattr(schedules, name, value)
    lost = [math.log(us[min(us, key=estimate)] / min(us.values())) for estimate, us in found]
    return statistics.fmean(one + max(0.0, one - 0.1) / 2 for one in lost)


def fit(options: Options) -> None:
    """Search the constants and print them."""
    path = Path(options.measurements)
    if not path.is_file():
        raise ConfigError(f"measurements={path} is no file: make tune writes one")
    found = cases(read_times(path), Gpu.of(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    present = [getattr(schedules, name) for name in CONSTANTS]
    print(f"{len(found)} products; present constants: loss {loss(found):.4f}")
    span = math.log(SPAN)
    best = differential_evolution(
        lambda powers: loss(found, [one * math.exp(by) for one, by in zip(present, powers, strict=True)]),
        [(-span, span)] * len(CONSTANTS), maxiter=options.rounds, popsize=10, seed=options.seed, polish=False,
        x0=[0.0] * len(CONSTANTS),
    )  # fmt: skip
    for name, one, by in zip(CONSTANTS, present, best.x, strict=True):
        print(f"{name} = {one * math.exp(by):.3g}  # {one:.3g} now")
    print(f"loss {best.fun:.4f}")


if __name__ == "__main__":
    with_options("fit_estimate", __doc__ or "", "commands.fit_estimate", Options, fit)
