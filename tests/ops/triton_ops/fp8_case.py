"""A linear with FP8 weights whose every value that must not be read is NaN."""

import torch
from triton_batches import Batch, assert_close, linear

from punica.ops.scales import Scheme
from tests.ops.helpers import E4M3, MODES, Fp8Stack, by_ranks, step

FP16 = torch.float16


class Case(Batch):
    """Rows of ``slots`` with adapters of ``ranks``, and one slot that no row uses. Ranks beyond an adapter's own, the
    unused slot and their scales are NaN; ``a`` and ``b`` are what the values stand for.
    """

    def __init__(self, slots, widths, rank, ranks, device, fp8=E4M3, dtype=FP16, mode="channel", k=64, by_rows=False):
        super().__init__(slots, k, widths, rank, len(ranks) + 1, dtype, device, [[*ranks, rank]] * len(widths))
        shapes = [(rank, k)] * len(widths), [(width, rank) for width in widths]
        self.stacks = [[Fp8Stack.random(self.slot_count, *shape, MODES[mode], fp8, device) for shape in of_side]
                       for of_side in shapes]  # fmt: skip
        self.a, self.b = ([stack.real() for stack in side] for side in self.stacks)
        for slot, live in enumerate([*ranks, 0]):
            for first, second in zip(*self.stacks, strict=True):
                first.stored[slot, :, live:] = second.stored[slot, :, :, live:] = float("nan")
                if mode == "channel":
                    first.scale[slot, live:] = float("nan")
                if live == 0:
                    second.scale[slot] = float("nan")
        self.scheme, self.by_rows = Scheme(**MODES[mode]), by_rows

    def run(self, y=None, batch=None, linear=linear, **options):
        """y after one call."""
        y, (a, b) = self.y.clone() if y is None else y, self.stacks
        batch = batch or step(self.slots, self.device, self.slot_count, len(self.slots))
        options = {"lora_ranks": self.lora_ranks} | options
        linear(
            y, self.x, [s.stored for s in a], [s.stored if self.by_rows else by_ranks(s.stored) for s in b], batch, 0.5,
            lora_a_scale=[s.scale for s in a], lora_b_scale=[s.scale for s in b],
            shrink=self.scheme, expand=self.scheme, **options,
        )  # fmt: skip
        return y

    def check(self, y, calls=1):
        """That y holds what so many calls add (in bfloat16 each rounds visibly); 0: what one leaves that overwrites."""
        delta, used = self.expanded(self.shrunk()), self.has_adapter[:, 0]
        expected = calls * delta + self.y.cpu().double() if calls else delta
        assert_close(y[used], expected[used], self.dtype, calls if calls and self.dtype == torch.bfloat16 else 1)
        assert torch.equal(y[~used], self.y[~used])
