"""A linear with FP8 weights whose every value that must not be read is NaN."""

import torch
from triton_batches import assert_close, linear

from punica.ops.scales import Scheme
from tests.ops.helpers import E4M3, MODES, Fp8Stack, by_ranks, products, step

FP16 = torch.float16


class Case:
    """Rows of ``slots`` with adapters of ``ranks``, and one slot that no row uses. Ranks beyond an adapter's own, the
    unused slot and their scales are NaN.
    """

    def __init__(self, slots, widths, rank, ranks, device, fp8=E4M3, dtype=FP16, mode="channel", k=64, by_rows=False):
        self.slots, self.ranks, self.widths = slots, [*ranks, rank], widths
        self.dtype, self.device = dtype, device
        self.a, self.b = ([Fp8Stack.random(len(self.ranks), *shape, MODES[mode], fp8, device) for shape in shapes]
                          for shapes in ([(rank, k)] * len(widths), [(width, rank) for width in widths]))  # fmt: skip
        self.real = [(first.real(), second.real()) for first, second in zip(self.a, self.b, strict=True)]
        for slot, live in enumerate([*ranks, 0]):
            for first, second in zip(self.a, self.b, strict=True):
                first.stored[slot, :, live:] = second.stored[slot, :, :, live:] = float("nan")
                if mode == "channel":
                    first.scale[slot, live:] = float("nan")
                if live == 0:
                    second.scale[slot] = float("nan")
        rows = len(self.slots)
        self.x, self.before = (torch.randn(rows, size).to(dtype).to(device) for size in (k, sum(widths)))
        self.scheme, self.by_rows = Scheme(**MODES[mode]), by_rows

    def run(self, y=None, batch=None, linear=linear, **options):
        """y after one call."""
        y = self.before.clone() if y is None else y
        batch = batch or step(self.slots, self.device, rows=len(self.slots))
        true = torch.tensor([self.ranks] * len(self.widths), dtype=torch.int32, device=self.device)
        options = {"lora_ranks": true} | options
        linear(
            y, self.x, [s.stored for s in self.a],
            [s.stored if self.by_rows else by_ranks(s.stored) for s in self.b], batch, 0.5,
            lora_a_scale=[s.scale for s in self.a], lora_b_scale=[s.scale for s in self.b],
            shrink=self.scheme, expand=self.scheme, **options,
        )  # fmt: skip
        return y

    def check(self, y, calls=1):
        """That y holds what so many calls add (in bfloat16 each rounds visibly); 0: what one leaves that overwrites."""
        deltas = []
        for a_real, b_real in self.real:
            h = products(self.x, a_real, self.slots, 0.5, self.ranks)
            deltas.append(products(h, b_real, self.slots, 1.0, self.ranks, of_b=True))
        delta, bare = torch.cat(deltas, 1), torch.tensor(self.slots) < 0
        expected = calls * delta + self.before.cpu().double() if calls else delta
        assert_close(y[~bare], expected[~bare], self.dtype, calls if calls and self.dtype == torch.bfloat16 else 1)
        assert torch.equal(y[bare], self.before[bare])
