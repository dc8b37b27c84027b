"""Failures and arguments compared over the ranks of a tensor-parallel group, so that no rank computes without another.

If one rank cannot load an adapter and the others compute with it, they wait for it in a collective until a time-out
that names no cause. Outside of steps `all_ranks_agree` makes a failure common to all; inside, `in_step` ends the group.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from punica.parallel.group import check_not_broken, current_group

_KINDS: tuple[type[Exception], ...] = (
    FileNotFoundError, TypeError, ValueError, MemoryError, torch.OutOfMemoryError, RuntimeError,
)  # fmt: skip
_MESSAGE_BYTES = 2048


@contextmanager
def all_ranks_agree() -> Iterator[list[object]]:
    """Make an error of one rank inside the block an error of all ranks at its end.

    Every rank raises the error of the first rank that failed, its message preceded by that rank's number; types beside
    FileNotFoundError, TypeError, ValueError and errors of too little memory become a RuntimeError. Ranks that have all
    succeeded raise ValueError unless the lists, which the block appends to, have equal reprs. With one rank nothing is
    exchanged. This is a collective, in one order on all ranks: not nested, and without collectives inside.
    """
    group = current_group()
    found: list[object] = []
    if group.world_size == 1:
        yield found
        return
    failure: Exception | None = None
    try:
        yield found
    except Exception as error:
        failure = error
    kind = 0 if failure is None else next((i for i, k in enumerate(_KINDS, 1) if isinstance(failure, k)), len(_KINDS))
    gathered = _gathered([kind, zlib.crc32(repr(found).encode(errors="replace"))])
    verdicts = [kind for kind, _ in gathered]
    if not any(verdicts):
        if len({digest for _, digest in gathered}) > 1:
            raise ValueError("the ranks have read different files: give all the same, and change none while it is read")
        return
    named = "" if failure is None else str(failure)
    if failure is not None and not isinstance(failure, _KINDS):
        named = f"{type(failure).__name__}: {failure}"
    own = named.encode("utf-8", errors="backslashreplace")[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    rank = next(rank for rank, verdict in enumerate(verdicts) if verdict)
    text = bytes(_gathered(own, torch.uint8)[rank]).rstrip(b"\0").decode("utf-8", errors="replace")
    raise _KINDS[verdicts[rank] - 1](f"rank {rank} of {group.world_size}: {text}") from failure


@contextmanager
def in_step() -> Iterator[None]:
    """Break the group on this rank where the block, a forward pass with collectives, fails.

    The other ranks cannot be told: they wait in the next collective, and would take any message for it. All further
    collectives and steps of this rank are a RuntimeError; the others fail by their backend's time-out, or as soon as
    this process ends. With one rank nothing happens.
    """
    try:
        yield
    except BaseException as error:
        group = current_group()
        if group.world_size > 1 and (break_off := getattr(group, "break_off", None)) is not None:
            break_off(f"{type(error).__name__}: {error}")
        raise


def check_in_step() -> None:
    """RuntimeError on a rank that failed :func:`in_step`."""
    check_not_broken(current_group())


def check_same_on_all_ranks(what: str, values: Sequence[int]) -> None:
    """RuntimeError on every rank unless all have the same integers, as many on each; ``what`` names them. A collective,
    which all ranks must reach in one order; with one rank nothing is exchanged.
    """
    found = [values] if current_group().world_size == 1 else _gathered(values)
    if any(other != found[0] for other in found):
        raise RuntimeError(f"{what} must be the same on all ranks, got {found}; give all the same requests in order")


def gathered_bytes(own: bytes) -> list[bytes]:
    """Return the bytes of every rank, as many on each, in rank order. With several ranks this is a collective."""
    return [own] if current_group().world_size == 1 else [bytes(each) for each in _gathered(own, torch.uint8)]


def _gathered(values: Sequence[int], dtype: torch.dtype = torch.int64) -> list[list[int]]:
    group = current_group()
    device = getattr(group, "message_device", torch.device("cpu"))
    found: list[list[int]] = group.all_gather(torch.tensor([list(values)], dtype=dtype, device=device), 0).tolist()
    return found
