"""Recorded costs of adapters as a file of BLIS (inference-sim), and its rule of a step beside this simulator's.

    python -m experiments.cluster.blis machine=h200 out=lora.yaml  # then: blis run --lora-config lora.yaml ...

BLIS multiplies a step by `1 + K6 / K7 * adapters`, by the largest rank: here of recorded decode steps with adapters and
without (`ext_breakdown`). Its loads have a latency and a bandwidth: those of section 5.2. Format and defaults: its
commit f90a1e3a, August 2026.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from experiments.cluster.costs import STEP, STEPS, decoding, load_cost, model_bytes, rows_that_count, timed
from experiments.harness.command import with_options
from experiments.harness.counted import merged
from experiments.harness.schema import REPOSITORY, ConfigError, Count, Settings
from experiments.simulator import Residuals
from experiments.workload import MAX_BATCH

DEFAULT_TIERS = {8: 0.02, 16: 0.035, 32: 0.06}
"""Rank -> K6 / K7 that BLIS comes with."""


class Options(Settings):
    machine: str  # a folder of results/
    base: str = "llama2-7b"  # model
    tenants: Count = 26  # adapters client-0 and so on, of the recorded rank
    out: Path


def recorded_steps(results: Path, machine: str, model: str) -> dict[int, NDArray[np.float64]]:
    """Return rank -> decode steps with adapters [n, 3]: seconds without, seconds with, number of adapters."""
    rows = merged(rows_that_count(results / machine, STEPS["ext breakdown"]))
    found = dict[int, NDArray[np.float64]]()
    for rank in sorted({int(one) for one in rows["rank"].dropna()}):
        steps = timed(rows[rows["rank"] == rank], model, decoding, metric=STEP, system="punica", panel="decode")
        work = [(replace(step.work, adapter_ranks=0), step.seconds, step.work.adapter_ranks / rank) for step in steps]
        plain = {of: seconds for of, seconds, adapters in work if not adapters}
        lines = [(plain[of], seconds, adapters) for of, seconds, adapters in work if adapters]
        found |= {rank: np.array(lines)} if lines else {}
    return found


def rule(steps: NDArray[np.float64], relative: bool, each: float | None = None) -> tuple[float, Residuals]:
    """Return ``each`` (None: fitted), what an adapter adds, ``relative`` to a step (BLIS) or in s; and its errors."""
    plain, seconds, adapters = steps.T
    part = adapters * (plain if relative else 1.0) / seconds
    found = float(part @ (1 - plain / seconds) / (part @ part)) if each is None else each
    return found, Residuals(plain / seconds + found * part - 1)


def lora_block(results: Path, options: Options) -> dict[str, Any]:
    """Return the block `lora` of BLIS's `LoRAConfig`. `ConfigError`: no recorded loads, or no steps with adapters."""
    loads, size = load_cost(results, options.machine, options.base), model_bytes(options.base)
    steps = recorded_steps(results, options.machine, options.base)
    if not steps:
        raise ConfigError(f"machine={options.machine} has no steps of {options.base} with adapters: choose another")
    footprint = float(size.lora * size.itemsize)
    return {
        "adapter_capacity": MAX_BATCH,
        "load_base_latency_us": 1e6 * loads.host_base,
        "load_bandwidth_bytes_us": footprint / (1e6 * loads.host_rank),
        "footprint_bytes_per_rank": footprint,
        "step_overhead_tiers": {rank: {"k6": rule(part, relative=True)[0], "k7": 1.0} for rank, part in steps.items()},
        "adapters": [{"id": f"client-{number}", "rank": max(steps)} for number in range(options.tenants)],
    }


def export(options: Options) -> None:
    options.out.write_text(OmegaConf.to_yaml({"lora": lora_block(REPOSITORY / "results", options)}), encoding="utf-8")


if __name__ == "__main__":
    with_options("blis", __doc__ or "", "cluster.blis", Options, export)
