"""The paper's roofline: arithmetic and bytes of one SGMV launch, and the ceilings of the machine.

For `s` rows, `n` distinct adapters and a weight of `h_in x h_out` (paper, section 7.1)::

    FLOP      = 2 s h_in h_out
    I/O bytes = e (s (h_in + h_out) + n h_in h_out)        e bytes per element; Y is counted once
    intensity = FLOP / I/O bytes

Distinct (n = s) has an intensity that does not depend on `s`, 0.94 FLOP/byte at 16 x 4096 and two bytes per element;
Identical (n = 1) climbs with `s`. A machine with bandwidth `b` and rate `p` reaches at most `min(p, intensity b)`.
"""

from collections.abc import Callable
from functools import cache

COPY_MIB = 256
GEMM_SIZE = 2048
ATTEMPTS = 5


def sgmv_flop(rows: int, h_in: int, h_out: int) -> int:
    return 2 * rows * h_in * h_out


def sgmv_io_bytes(rows: int, adapters: int, h_in: int, h_out: int, element_bytes: int = 2) -> int:
    """Bytes that one SGMV launch must move: X once, Y once, each of the `adapters` weights once."""
    return element_bytes * (rows * (h_in + h_out) + adapters * h_in * h_out)


def sgmv_intensity(rows: int, adapters: int, h_in: int, h_out: int, element_bytes: int = 2) -> float:
    return sgmv_flop(rows, h_in, h_out) / sgmv_io_bytes(rows, adapters, h_in, h_out, element_bytes)


@cache
def copy_bandwidth(device: str) -> float:
    """Measure bytes per second, read and written, of a large copy, once per process."""
    import torch

    source = torch.ones(COPY_MIB << 18, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _least_seconds(lambda: target.copy_(source), device)


def product_flops(device: str, dtype: str) -> float:
    """Measure FLOP/s of a square product."""
    import torch

    left = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=getattr(torch, dtype), device=device)
    product = torch.empty_like(left)
    return 2 * GEMM_SIZE**3 / _least_seconds(lambda: torch.mm(left, left, out=product), device)


def _least_seconds(call: Callable[[], object], device: str) -> float:
    from experiments.measure.timing import Protocol, time_side_by_side

    timer = "cuda_graph" if device.startswith("cuda") else "host_clock"
    clock = Protocol(timer, device, warmup=1, repeats=ATTEMPTS, min_repeats=ATTEMPTS, seconds=0.0, flush_mib=0)
    return min(time_side_by_side({"call": [call]}, clock)["call"])
