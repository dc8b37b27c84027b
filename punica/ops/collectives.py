"""Collectives of the ops, which know no process groups: `punica.parallel` installs its own here.

One op needs them: fully sharded fused MoE LoRA, whose low-rank tensor is cut among the ranks
(`punica.layers.fused_moe`). Without an installation there is one rank.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Collectives(NamedTuple):
    """The current group, looked up at every call: number of ranks and place of this one, the sum over ranks (possibly
    in place), and every rank's tensor concatenated along the last dimension in rank order.
    """

    world_size: Callable[[], int]
    rank: Callable[[], int]
    all_reduce: Callable[[Tensor], Tensor]
    all_gather: Callable[[Tensor], Tensor]


_installed = Collectives(lambda: 1, lambda: 0, lambda tensor: tensor, lambda tensor: tensor)


def install(collectives: Collectives) -> None:
    global _installed
    _installed = collectives


def current() -> Collectives:
    """Return the collectives installed last, or those of a single rank."""
    return _installed
