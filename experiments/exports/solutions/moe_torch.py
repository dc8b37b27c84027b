"""Grouped products of torch 2.10 and newer, `torch.nn.functional.grouped_mm`: rows by adapter and expert."""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


def run(y: Tensor, x: Tensor, a: Tensor, b: Tensor, experts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    groups = (slots[:, None] * a.shape[1] + experts).flatten()  # below 0: no adapter
    rows = groups.argsort()[(groups < 0).sum() :]
    ends = groups[rows].bincount(minlength=a.shape[0] * a.shape[1]).cumsum(0, dtype=torch.int32)
    low = grouped_mm(x.flatten(0, 1)[rows], a.flatten(0, 1).mT, offs=ends)
    added = weights.flatten()[rows, None] * grouped_mm(low, b.flatten(0, 1).mT, offs=ends)
    return y.flatten(0, 1).float().index_add(0, rows, added).view(y.shape).to(y.dtype)
