"""The paper's roofline: arithmetic and bytes of one SGMV launch, and the ceilings of the machine.

For `s` rows, `n` distinct adapters and a weight of `h_in x h_out` (paper, section 7.1)::

    FLOP      = 2 s h_in h_out
    I/O bytes = e (s (h_in + h_out) + n h_in h_out)        e bytes per element; Y is counted once
    intensity = FLOP / I/O bytes

Distinct (n = s) has an intensity that does not depend on `s`, 0.94 FLOP/byte at 16 x 4096 and two bytes per element;
Identical (n = 1) climbs with `s`. A machine with bandwidth `b` and rate `p` reaches at most `min(p, intensity b)`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of the machine: memory traffic in bytes/s (read + written) and arithmetic in FLOP/s."""

    bandwidth: float
    flops: float


def measured_ceilings(device: str, dtype: str) -> Ceilings:
    """Ceilings of `device`: a large copy (read + written) and a square product, the best of a few attempts."""
    import torch

    def best(call: Callable[[], object]) -> float:
        times = []
        for _ in range(1 + ATTEMPTS):
            started = time.perf_counter()
            call()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return min(times[1:])

    source = torch.ones(COPY_MIB << 18, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    left = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=getattr(torch, dtype), device=device)
    product = torch.empty_like(left)
    copy = best(lambda: target.copy_(source))
    gemm = best(lambda: torch.mm(left, left, out=product))
    return Ceilings(2 * source.nbytes / copy, 2 * GEMM_SIZE**3 / gemm)
