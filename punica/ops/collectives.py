"""What an op needs of the other ranks. The ops know no process groups: `punica.parallel` installs its collectives here.

One op talks to other ranks in its middle, fully sharded fused MoE LoRA, whose low-rank tensor lies in parts on all of
them (`punica.layers.fused_moe`). Without an installation there is one rank.
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
    """What was installed last, or those of a single rank."""
    return _installed
