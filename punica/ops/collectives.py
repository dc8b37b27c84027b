"""Collectives of the ops, which know no process groups: `punica.parallel` installs its own here.

One op needs them: fully sharded fused MoE LoRA, whose low-rank tensor is cut among the ranks
(`punica.layers.fused_moe`). Without an installation there is one rank.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class WorldSize(Protocol):
    """Number of ranks in the current group."""

    def __call__(self) -> int: ...


class Rank(Protocol):
    """Place in the current group."""

    def __call__(self) -> int: ...


class AllReduce(Protocol):
    """Sum over the ranks of the current group; possibly in place; returns the result."""

    def __call__(self, tensor: Tensor) -> Tensor: ...


class AllGather(Protocol):
    """Every rank's tensor, concatenated along the last dimension in rank order."""

    def __call__(self, tensor: Tensor) -> Tensor: ...


class Collectives(NamedTuple):
    """The current group, looked up at every call."""

    world_size: WorldSize
    rank: Rank
    all_reduce: AllReduce
    all_gather: AllGather


_installed = Collectives(lambda: 1, lambda: 0, lambda tensor: tensor, lambda tensor: tensor)


def install(collectives: Collectives) -> None:
    """Use these from now on."""
    global _installed
    _installed = collectives


def current() -> Collectives:
    """Return the collectives installed last, or those of a single rank."""
    return _installed
