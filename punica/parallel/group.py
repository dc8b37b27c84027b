"""Tensor-parallel groups and their collectives.

A *group* is any object with ``rank``, ``world_size``, ``all_reduce(t)``, ``all_gather(t, dim)`` and
``gather(t, dst, dim)``: :class:`SingleProcessGroup` or :class:`TorchDistGroup` (gloo on CPUs, NCCL on GPUs). Optional:
``can_be_captured`` (collectives in CUDA graphs), ``before_close`` (callbacks), ``break_off(reason)``, after which all
collectives fail, and ``broken``, that reason. The layers call the ``tensor_model_parallel_*`` functions, which look the
current group up at call time. With one rank they return their input untouched.
"""

import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class TensorParallelGroup(Protocol):
    """A group's required members."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks; may work in place; returns the result."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenation of every rank's tensor along ``dim``, in rank order."""

    def gather(self, tensor: Tensor, dst: int, dim: int) -> Tensor | None:
        """:meth:`all_gather` on rank ``dst``; ``None`` on the others."""


class SingleProcessGroup:
    """The group of one: every collective returns its input without copying."""

    rank = 0
    world_size = 1
    can_be_captured = True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor, dst: int, dim: int) -> Tensor | None:
        return tensor


# torch 2.13 renamed the collective and warns about the old name
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchDistGroup:
    """A ``torch.distributed`` process group (``None``: the world) as a tensor-parallel group.

    Use before ``torch.distributed.init_process_group``, after ``destroy_process_group`` or after :meth:`close` is a
    ``RuntimeError``. Collectives are issued on the current CUDA stream and can be captured in a CUDA graph with NCCL.
    All ranks must hold tensors of one shape and dtype; on CPU a disagreement is a ``ValueError`` on every rank.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._process_group = process_group
        self._closed = False
        self.broken = ""
        self._place: tuple[int, int] = (0, 1)
        self._world: weakref.ref[dist.ProcessGroup] | None = None  # the world in which _place was looked up
        self._dependents: list[weakref.WeakMethod[Callable[[], None]]] = []

    def before_close(self, release: Callable[[], None]) -> None:
        """Call the method ``release`` when the group ends: NCCL's communicator must outlive captured collectives."""
        self._dependents.append(weakref.WeakMethod(release))

    def close(self) -> None:
        """Release the process group, which must not outlive ``torch.distributed``; no collective afterwards."""
        for dependent in self._dependents:
            if (release := dependent()) is not None:
                release()
        self._dependents.clear()
        self._process_group, self._closed = None, True

    def break_off(self, reason: str) -> None:
        """Make every later collective of this rank a RuntimeError that names the first ``reason``."""
        self.broken = self.broken or reason

    def _rank_and_size(self) -> tuple[int, int]:
        """This rank's place, asked of ``torch.distributed`` once per world."""
        world = dist.group.WORLD if dist.is_available() and not self._closed else None
        if world is None:
            raise RuntimeError(
                "TorchDistGroup used before torch.distributed is initialised or after it ended; call "
                "torch.distributed.init_process_group, or work inside punica.parallel.init_tensor_parallel"
            )
        if self._world is None or self._world() is not world:
            self._place = dist.get_rank(self._process_group), dist.get_world_size(self._process_group)
            self._world = weakref.ref(world)
        return self._place

    @property
    def rank(self) -> int:
        return self._rank_and_size()[0]

    @property
    def world_size(self) -> int:
        return self._rank_and_size()[1]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place where ``tensor`` is contiguous; returns the result."""
        self._rank_and_size()
        check_not_broken(self)
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._process_group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        _, size = self._check_ready(tensor)
        parts = tensor.new_empty(size, *tensor.shape)
        _all_gather_flat(parts.view(-1), tensor.contiguous().view(-1), group=self._process_group)
        return _concatenate(parts, dim)

    def gather(self, tensor: Tensor, dst: int, dim: int) -> Tensor | None:
        rank, size = self._check_ready(tensor)
        parts = tensor.new_empty(size, *tensor.shape) if rank == dst else None
        views = None if parts is None else list(parts.unbind(0))
        dist.gather(tensor.contiguous(), views, group=self._process_group, group_dst=dst)
        return None if parts is None else _concatenate(parts, dim)

    @property
    def message_device(self) -> torch.device:
        """Device for small messages between the ranks: the CPU if the backend reaches it, else this GPU."""
        self._rank_and_size()
        reached = dist.get_backend_config(self._process_group)
        return torch.device("cpu") if "cpu" in reached else torch.device("cuda", torch.cuda.current_device())

    @property
    def can_be_captured(self) -> bool:
        """True with NCCL."""
        self._rank_and_size()
        return "cuda:nccl" in dist.get_backend_config(self._process_group)

    def _check_ready(self, tensor: Tensor) -> tuple[int, int]:
        """Return rank and size. On a CPU shapes and dtypes are compared over ranks; CUDA would wait for that."""
        place = self._rank_and_size()
        check_not_broken(self)
        if tensor.device.type != "cpu":
            return place
        own = (tuple(tensor.shape), str(tensor.dtype))
        mine = torch.tensor([zlib.crc32(repr(own).encode())], device="cpu")
        theirs = mine.new_empty(place[1])
        _all_gather_flat(theirs, mine, group=self._process_group)
        if bool((theirs == mine).all()):
            return place
        found: list[object] = [None] * place[1]
        dist.all_gather_object(found, own, group=self._process_group)
        raise ValueError(f"tensors to gather must have one shape and dtype on all ranks, got {found} in rank order")


def check_not_broken(group: TensorParallelGroup) -> None:
    if reason := getattr(group, "broken", ""):
        raise RuntimeError(
            f"the tensor-parallel ranks are out of step: rank {group.rank} failed inside of a step ({reason}), so that "
            "they cannot meet again; restart the processes of all ranks"
        )


def _concatenate(parts: Tensor, dim: int) -> Tensor:
    """``parts [ranks, *shape]`` joined along ``dim`` of ``shape``: a view for the first dimension, else one copy."""
    dim += parts.ndim - 1 if dim < 0 else 0
    return parts.movedim(0, dim).flatten(dim, dim + 1)


_SINGLE = SingleProcessGroup()
_process_wide: TensorParallelGroup = _SINGLE
_this_thread = threading.local()


def current_group() -> TensorParallelGroup:
    """The group that layers and collectives find now: this thread's, else the process's."""
    group = getattr(_this_thread, "group", None)
    return _process_wide if group is None else group


def process_wide_group() -> TensorParallelGroup:
    """The group that :func:`set_tensor_parallel_group` installed last, or the single rank."""
    return _process_wide


def set_tensor_parallel_group(group: TensorParallelGroup | None) -> None:
    """Install ``group`` for the process (``None``: one rank), before layers are built, which read it then."""
    global _process_wide
    _process_wide = _SINGLE if group is None else group


@contextmanager
def tensor_parallel(group: TensorParallelGroup) -> Iterator[TensorParallelGroup]:
    """Use ``group`` inside the ``with`` block, in this thread only; the previous group comes back afterwards."""
    previous = getattr(_this_thread, "group", None)
    _this_thread.group = group
    try:
        yield group
    finally:
        _this_thread.group = previous


def get_tensor_model_parallel_rank() -> int:
    return current_group().rank


def get_tensor_model_parallel_world_size() -> int:
    return current_group().world_size


def collectives_can_be_captured() -> bool:
    return bool(getattr(current_group(), "can_be_captured", False))


def tensor_model_parallel_all_reduce(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over the ranks of the current group; possibly in place; returns the result."""
    group = current_group()
    return tensor if group.world_size == 1 else group.all_reduce(tensor)


def tensor_model_parallel_all_gather(tensor: Tensor, dim: int = -1) -> Tensor:
    """Concatenate every rank's ``tensor`` along ``dim`` in rank order."""
    group = current_group()
    return tensor if group.world_size == 1 else group.all_gather(tensor, dim)


def tensor_model_parallel_gather(tensor: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
    """:func:`tensor_model_parallel_all_gather` on rank ``dst``, ``None`` elsewhere."""
    group = current_group()
    return tensor if group.world_size == 1 else group.gather(tensor, dst, dim)


def divide(numerator: int, denominator: int) -> int:
    """``numerator // denominator``; ``ValueError`` for ``denominator < 1`` or a division that is not exact."""
    if denominator < 1 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}; choose sizes that are multiples of tp_size")
    return numerator // denominator


def split_tensor_along_last_dim(tensor: Tensor, num_partitions: int) -> tuple[Tensor, ...]:
    """``num_partitions`` equal views of ``tensor``; ``ValueError`` if its last dimension is not divisible by it."""
    return torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
