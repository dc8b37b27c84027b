"""The paper's baselines compute the same sum; the package stays free of Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from experiments.benches import baselines
from tests.ops.helpers import TOLERANCE, normal, products

SLOTS = [0, 0, 0, 1, 3, 3]
SEGMENTS = [(0, 0, 3), (1, 3, 4), (3, 4, 6)]


def run(name, y, x, a, b, scale):
    slots = torch.tensor(SLOTS)
    if name == "loop":
        baselines.lora_loop(y, x, a, b, SEGMENTS, scale)
    elif name == "gather_bmm":
        baselines.lora_gather_bmm(y, x, a, b, slots, scale)
    elif name == "bmm":
        baselines.lora_bmm(y, x, *baselines.gather_weights(a, b, slots), scale)
    else:
        baselines.lora_grouped_mm(y, x, a, b, baselines.slot_ends(slots, a.shape[0]), scale)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["loop", "gather_bmm", "bmm", "grouped_mm"])
def test_baseline_equals_float64(name, dtype, scale):
    if name == "grouped_mm" and not baselines.grouped_mm_available("cpu", dtype):
        pytest.skip(f"this torch has no grouped_mm for {dtype} on the CPU")
    x, y = normal(6, 64, dtype=dtype), normal(6, 48, dtype=dtype, seed=3)
    a, b = normal(4, 16, 64, dtype=dtype, scale=0.125, seed=1), normal(4, 48, 16, dtype=dtype, scale=0.25, seed=2)
    a[2], b[2] = torch.nan, torch.nan
    hidden = products(x, a, torch.tensor(SLOTS), scale)
    expected = y.double() + products(hidden, b, torch.tensor(SLOTS))
    run(name, y, x, a, b, scale)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=2 * rtol, atol=2 * atol)


def test_gather_refuses_slot_minus_one():
    with pytest.raises((IndexError, RuntimeError)):
        baselines.gather_weights(torch.ones(2, 1, 1), torch.ones(2, 1, 1), torch.tensor([-1]))


def test_grouped_mm_is_probed_not_guessed(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    baselines.grouped_mm_available.cache_clear()
    try:
        assert not baselines.grouped_mm_available("cpu", torch.float32)
        with pytest.raises(RuntimeError, match="no grouped_mm"):
            run("grouped_mm", torch.zeros(6, 4), torch.ones(6, 4), torch.ones(4, 4, 4), torch.ones(4, 4, 4), 1.0)
    finally:
        baselines.grouped_mm_available.cache_clear()


def test_slot_ends_counts_empty_slots():
    assert baselines.slot_ends(torch.tensor(SLOTS), 5).tolist() == [3, 4, 4, 6, 6]


def test_the_cpu_path_does_not_import_triton():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import punica.ops; "
        "assert before or 'triton' not in sys.modules; "
        "assert 'punica.ops.triton_ops' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors():
    import punica.ops

    with pytest.raises(AttributeError, match="no attribute 'lora_shrnk'"):
        _ = punica.ops.lora_shrnk
