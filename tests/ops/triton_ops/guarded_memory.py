"""Operands amid NaN, and outputs of which a call writes a part: for `random_calls.py`."""

import torch
from torch import Tensor

SMALL = not torch.cuda.is_available()
DEVICE, MOST_ROWS = ("cpu", 9) if SMALL else ("cuda", 640)
MARGIN, NAN = 64, float("nan")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ROUNDING = {
    torch.float16: 2**-11, torch.bfloat16: 2**-7 if SMALL else 2**-8, torch.float32: 2**-23, torch.float8_e4m3fn: 2**-4,
}  # fmt: skip
"""Largest error of a rounded value, in parts of it (Triton's interpreter truncates bfloat16)."""
SUMMED = 1e-5
"""Largest error of a sum in float32, in parts of the sum of magnitudes."""


def placed(values: Tensor, off: bool = False, layout: str = "rows") -> tuple[Tensor, Tensor]:
    """A copy of ``values`` amid NaN, and all of that memory."""
    *lead, rows, columns = values.shape
    inner = {"rows": (rows, columns), "gaps": (rows, columns + 3), "columns": (columns, MOST_ROWS)}
    shape = torch.Size((*lead, *inner.get(layout, (rows, 2 * columns))))
    whole = torch.empty(shape.numel() + 2 * MARGIN + 1, dtype=values.dtype, device=DEVICE).fill_(NAN)
    base = whole[MARGIN + off :][: shape.numel()].view(shape)
    view = base.mT[..., :rows, :] if layout == "columns" else base[..., :: 2 if layout == "steps" else 1]
    return view[..., :columns].copy_(values), whole


class Output:
    """Memory that a call writes; ``touched``: the elements of it, which are NaN before unless it adds."""

    def __init__(self, values: Tensor, touched: Tensor, add: bool, off: bool, layout: str = "rows") -> None:
        self.view, self.whole = placed(values if add else values.masked_fill(touched, NAN), off, layout)
        self.touched, self.before = touched, self.whole.clone()
        self.old = self.view.double() if add else 0

    def fault(self, want: Tensor, bound: Tensor) -> str:
        """What differs from ``want`` by more than ``bound``, or has changed elsewhere; "": nothing."""
        bits, free = BITS[self.whole.element_size()], torch.ones_like(self.whole, dtype=torch.bool)
        free.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).copy_(~self.touched)
        changed = (self.whole.view(bits) != self.before.view(bits)) & free
        if bool(changed.any()):
            places = (changed.nonzero().flatten() - self.view.storage_offset()).tolist()
            return f"{len(places)} elements changed that must not be written, {places[:9]} from the output's start"
        got, bound = self.view.double(), bound + 1.1 * ROUNDING[self.view.dtype] * want.abs() + 1e-7
        error = (got - want).abs() / bound
        at = (self.touched & ~(error <= 1)).nonzero()
        if not len(at):
            return ""
        first, each = tuple(at[0].tolist()), [sorted({*column.tolist()})[:12] for column in at.mT]
        return (
            f"{len(at)} of {int(self.touched.sum())} elements wrong; at {first} is {float(got[first])} for "
            f"{float(want[first])}, error {float(error[first]):.3g} times the bound; indices per dimension {each}"
        )
