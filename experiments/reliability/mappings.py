"""Bad input of a wrapper, drawn by Hypothesis: mappings, tables of slots, and layouts of rows."""

from typing import Any

import torch
from hypothesis import given, seed
from hypothesis import strategies as st

from experiments.reliability.input import drawn
from experiments.reliability.trial import Outcome, Setting, trial
from punica.metadata import LoRAMapping
from punica.wrapper import PunicaWrapperCPU

SLOTS, ROWS, RUNS = 3, 8, 3
"""Limits of the wrapper: slots, rows, and runs of equal slot in a prefill."""
INPUTS, WIDTHS, RANK, SCALE, VOCABULARY = 6, (4, 2), 2, 0.5, 100
IDS = (0, 11, 12, 13)
WRONG_IDS = (-1, 99, True, 1.5, None, "11")
LAYOUTS = ("contiguous", "transposed", "gaps", "stacked", "swapped")
"""Storage of rows; the last, of an even number of rows, cannot be viewed as 2-D: no output is written to it."""


@st.composite
def steps(draw: Any) -> dict[str, Any]:
    """Draw a mapping, a table of slots and layouts of x and y; half of them have a mistake."""
    wrong = draw(st.integers(0, 11))
    ids = st.sampled_from(IDS) if wrong else st.sampled_from(IDS + WRONG_IDS)
    most = ROWS + (wrong == 1)
    index = draw(st.lists(ids, min_size=0 if wrong > 1 else ROWS - 1, max_size=most))
    table = list(draw(st.permutations([11, 12, 13])))
    if wrong == 2:
        table[draw(st.integers(0, 2))] = draw(st.sampled_from([None, 0, -3, 11, True, "12", 99]))
    elif wrong == 3:
        table.append(draw(st.sampled_from([None, 14])))
    return {
        "index": index, "prompt": index if draw(st.booleans()) else draw(st.lists(ids, max_size=most)),
        "prefill": draw(st.booleans()) if wrong != 4 else draw(st.sampled_from([None, 1, "yes"])),
        "table": table, "max_loras": draw(st.sampled_from([3, 4] if wrong != 5 else [0, 2, True, 3.0])),
        "x": draw(st.sampled_from(LAYOUTS)), "y": draw(st.sampled_from(LAYOUTS if wrong == 6 else LAYOUTS[:-1])),
    }  # fmt: skip


def is_valid(step: dict[str, Any]) -> bool:
    """Check a step against the definition of a mapping, without the library's own checks."""
    table, index, limit = step["table"], step["index"], step["max_loras"]
    if type(step["prefill"]) is not bool or type(limit) is not int or not len(table) <= min(limit, SLOTS):
        return False
    if any(type(one) is not int or one < 1 for one in table if one is not None):
        return False
    known = [one for one in table if one is not None]
    for ids in (index, step["prompt"]):
        if len(ids) > ROWS or any(type(one) is not int or one not in (0, *known) for one in ids):
            return False
    runs = sum(number == 0 or one != index[number - 1] for number, one in enumerate(index))
    return len(set(known)) == len(known) and (not step["prefill"] or runs <= RUNS)


def rows_of(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Store rows ``[T, K]`` in a layout; one of ``stacked`` and ``swapped`` has three dimensions."""
    count, width = values.shape
    if layout == "stacked":
        return values.clone().unsqueeze(0)
    if _has_no_2d_view(layout, count):
        return values.reshape(2, count // 2, width).transpose(0, 1).contiguous().transpose(0, 1)
    stored = {
        "transposed": torch.empty(width, count).T, "gaps": torch.empty(count, 2 * width)[:, :width],
    }.get(layout, torch.empty(count, width))  # fmt: skip
    return stored.copy_(values)


class Steps:
    """A wrapper on the CPU, weights, and the rows that its steps must give."""

    def __init__(self, start: int) -> None:
        self.make = torch.Generator().manual_seed(start)
        self.wrapper = PunicaWrapperCPU(ROWS, RUNS, "cpu", max_loras=SLOTS)
        self.a = tuple(self._numbers(SLOTS, RANK, INPUTS) for _ in WIDTHS)
        self.b = tuple(self._numbers(SLOTS, width, RANK) for width in WIDTHS)
        self.slots: list[int] = []
        self.wrapper.update_metadata(LoRAMapping([], [], False), [None] * SLOTS, SLOTS, VOCABULARY)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.make)

    def update(self, step: dict[str, Any]) -> Exception | None:
        """Begin a step; return the error of one that is refused."""
        try:
            mapping = LoRAMapping(step["index"], step["prompt"], step["prefill"])
            self.wrapper.update_metadata(mapping, step["table"], step["max_loras"], VOCABULARY)
        except Exception as error:  # any: what is no clear error is counted as lost
            return error
        self.slots = [-1 if one == 0 else step["table"].index(one) for one in step["index"]]
        return None

    def fault(self, x_layout: str, y_layout: str) -> str:
        """Apply the current step to new rows; return what differs from the definition, else an empty text."""
        count = len(self.slots)
        x, y = self._numbers(count, INPUTS), self._numbers(count, sum(WIDTHS))
        given, out = rows_of(x, x_layout), rows_of(y, y_layout)
        in_place = not _has_no_2d_view(y_layout, count)
        expected = self._defined(x, y) if in_place else y
        error = None
        try:
            self.wrapper.add_lora_linear(out, given, self.a, self.b, SCALE, WIDTHS)
        except Exception as caught:  # any: the caller compares
            error = caught
        if not torch.allclose(out.reshape(y.shape), expected, 1e-4, 1e-4):
            return f"{error!r} and {out.tolist()} instead of {expected.tolist()}"
        right = error is None if in_place else isinstance(error, ValueError) and "strides" in str(error)
        return "" if right else repr(error)

    def _defined(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        expected = y.clone()
        for row, slot in enumerate(self.slots):
            if slot >= 0:
                parts = [b[slot] @ (a[slot] @ x[row]) for a, b in zip(self.a, self.b, strict=True)]
                expected[row] += SCALE * torch.cat(parts)
        return expected


def _has_no_2d_view(layout: str, count: int) -> bool:
    return layout == LAYOUTS[-1] and count > 2 and count % 2 == 0


@trial("input", smoke=60, laptop=3_000, full=100_000, seconds=25)
def wrapper_steps(setting: Setting) -> Outcome:
    """Random mappings, slot tables and layouts: the rows of the definition, or an error and the step of before."""
    outcome, wrapper_and_rows = Outcome(), Steps(setting.seed)

    @seed(setting.seed)
    @drawn(setting.count)
    @given(steps())
    def run(step: dict[str, Any]) -> None:
        valid, error = is_valid(step), wrapper_and_rows.update(step)
        outcome.injected += not valid
        clear = error is None if valid else isinstance(error, (TypeError, ValueError)) and bool(str(error))
        fault = wrapper_and_rows.fault(step["x"], step["y"])
        outcome.expect(clear and not fault, f"{step}: {error!r} {fault}")

    run()
    return outcome
