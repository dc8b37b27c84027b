"""Mixtures: rows of a step with several weighted adapters, beside those with one (`punica.metadata.batch`).

    y[t] += sum_j gate[t, j] * B[slot[t, j]] A[slot[t, j]] x[t]          terms in the order of j

`MixedRows` describes the rows on the host, `MixedBatch` holds those of the current step for operators. Rows with equal
lists of slots are a group, of which kernels compute a tile at once, whatever the gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from punica.checks import MOST_MIXED
from punica.metadata.batch import LoRABatch
from punica.metadata.rows import HEIGHTS, RowGroups
from punica.metadata.staging import StagedBuffer

TILE_ROWS = 16
HEIGHT = HEIGHTS.index(TILE_ROWS)


class MixedRows(NamedTuple):
    """T rows with up to k adapters each: ``groups``, the number of each row's list (-1: no mixture); ``lists``, slots,
    int64 ``[G, k]``, -1 for none; ``gates``, float32 ``[T, k]``.
    """

    groups: RowGroups
    lists: np.ndarray
    gates: np.ndarray

    @classmethod
    def of_runs(cls, slots: np.ndarray, gates: np.ndarray, lengths: Sequence[int]) -> MixedRows:
        """Build them from B runs of rows: slots and gates ``[B, k]`` (slot -1: none), and rows of each run."""
        lists, numbers = np.unique(slots, axis=0, return_inverse=True)
        bare = int(len(lists) > 0 and lists[0].max() < 0)  # the list without a slot comes first
        groups = RowGroups.of_runs((numbers.reshape(-1) - bare).tolist(), lengths)
        return cls(groups, lists[bare:], gates.astype(np.float32).repeat(lengths, axis=0))

    @classmethod
    def of_gates(cls, gates: torch.Tensor, slots: Sequence[int] | None = None) -> tuple[RowGroups, MixedRows]:
        """Split ``gates [T, n]``, column i for ``slots[i]`` (None: i), into rows with one adapter and mixtures. A row
        whose only gate is 1 has that adapter, and one of zeros none.

        TypeError: no tensor of floats. ValueError: its shape, a gate that is not finite, or a row with more than
        `MOST_MIXED` gates besides 0.
        """
        if not isinstance(gates, torch.Tensor) or not gates.is_floating_point():
            raise TypeError(f"gates must be a tensor of floats [T, n], got {getattr(gates, 'dtype', type(gates))}")
        if gates.ndim != 2 or not gates.shape[1] or (slots is not None and len(slots) != gates.shape[1]):
            names = "" if slots is None else f" for {len(slots)} slots"
            raise ValueError(f"gates has shape {tuple(gates.shape)}{names}; expected [T, n], a column for each adapter")
        values = gates.detach().float().cpu().numpy()
        counts = np.count_nonzero(values, axis=1)
        for row in np.flatnonzero(~np.isfinite(values).all(axis=1) | (counts > MOST_MIXED))[:1].tolist():
            raise ValueError(f"gates[{row}] is {values[row]}; a row has up to {MOST_MIXED} finite gates besides 0")
        order = (values == 0).argsort(axis=1, kind="stable")[:, : max(1, counts.max(initial=0))]
        chosen = np.take_along_axis(values, order, 1)
        numbers = np.arange(values.shape[1]) if slots is None else np.asarray(slots, np.int64)
        lists = np.where(chosen != 0, numbers[order], -1)
        single = (counts == 1) & (chosen[:, 0] == 1)
        mixed = cls.of_runs(np.where(single[:, None], -1, lists), chosen, [1] * len(values))
        return RowGroups.of_rows(np.where(single, lists[:, 0], -1)), mixed


class MixedBatch:
    """The mixtures of the current step, of up to ``max_rows`` rows and ``max_loras`` slots (None: no limit).

    ``groups``: numbers of lists in place of slots; ``fan``: k; ``highest``: slot.
    """

    def __init__(self, max_rows: int, max_loras: int | None, device: torch.device | str) -> None:
        self._max_rows, self._max_loras, self._device = max_rows, max_loras, torch.device(device)
        self.groups = LoRABatch(max_rows, max_rows, device)
        self._buffer: StagedBuffer | None = None

    def check(self, rows: MixedRows) -> int:
        """Return the highest slot. ValueError: it, the rows, or lists (`MOST_MIXED`) are beyond their limit."""
        fan, highest = rows.lists.shape[1], int(rows.lists.max(initial=-1))
        if fan > MOST_MIXED or (self._max_loras is not None and highest >= self._max_loras):
            raise ValueError(
                f"mixtures have up to {fan} adapters a row and slot {highest}; the limits are {MOST_MIXED} adapters "
                f"and slots below max_loras={self._max_loras}"
            )
        if rows.groups.num_rows > self._max_rows:
            raise ValueError(f"mixtures have {rows.groups.num_rows} rows, more than max_rows={self._max_rows}")
        return highest

    def fill(self, rows: MixedRows) -> None:
        """Begin a step. Asynchronous on the current stream. ValueError, and no change: as :meth:`check`."""
        highest = self.check(rows)
        self.groups.fill(rows.groups)
        self._rows, self.fan, self.highest = rows, rows.lists.shape[1], highest
        self.__dict__.pop("places", None)
        self._stage()

    @cached_property
    def places(self) -> list[tuple[LoRABatch, torch.Tensor]]:
        """For each place j the slots of the rows as a step of the torch operators, and gates ``[T, 1]``."""
        lists = np.append(self._rows.lists, np.full((1, self.fan), -1), axis=0)[self._rows.groups.row_slots]  # [T, k]
        slots, gates = torch.from_numpy(lists), torch.from_numpy(self._rows.gates)
        places = [(LoRABatch.of_slots(slots[:, j]), gates[:, j : j + 1]) for j in range(self.fan)]
        return [place for place in places if not place[0].no_lora]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lists ``[G, k]``, int32, and gates ``[T, k]`` as kernels read them, flat and at full length."""
        if self._buffer is None:
            self._buffer = StagedBuffer((2, self._max_rows * MOST_MIXED), torch.int32, self._device)
            self._stage()
        lists, gates = self._buffer.tensor
        return lists, gates.view(torch.float32)

    def _stage(self) -> None:
        if self._buffer is not None:
            host = self._buffer.begin()
            for place, values in zip(host, (self._rows.lists, self._rows.gates.view(np.int32)), strict=True):
                place[: values.size] = values.reshape(-1)
            self._buffer.commit(len(host))
