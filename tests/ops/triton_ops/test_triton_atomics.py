"""The atomic variant that the price of determinism is measured against: the same result, within tolerance."""

import pytest
import torch
from triton_batches import EXPANDS, SHRINKS, Batch, assert_close, random_slots

from experiments.benches.atomics import prepare_lora_atomics


@pytest.mark.parametrize(("shrink", "expand"), [("rows", "rows"), ("tiles", "tiles")])
def test_atomics_compute_the_same(shrink, expand, device):
    batch = Batch(random_slots(19, 3), 200, (40, 33), 20, 3, torch.float16, device, scaling=1.0)
    schedules = SHRINKS[shrink]._replace(block_k=32, split_k=3), EXPANDS[expand]
    y = batch.y.clone()
    args = (*batch.args, *batch.count.values())
    overlap = device == "cuda"
    call = prepare_lora_atomics(y, batch.x, batch.a, batch.b, args, *schedules, overlap=overlap)
    call(y, batch.x, batch.a, batch.b)
    want = torch.where(
        batch.has_adapter, batch.y.cpu().double() + batch.expanded(batch.shrunk()), batch.y.cpu().double()
    )
    assert_close(y, want, torch.float16)
