"""Failures and arguments compared over the ranks of a tensor-parallel group, so that no rank computes without another.

Ranks read the same folders, but not the same disks. If one rank cannot load an adapter and the others compute with it,
they wait for it in a collective until a time-out that names no cause. Outside of steps `all_ranks_agree` makes a
failure common to all; inside of one `in_step` ends the group.
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

    Ranks that have all succeeded raise ValueError unless the lists, which the block appends to, have equal reprs.

    Every rank then raises the error of the first rank that failed, its message preceded by that rank's number.
    FileNotFoundError, TypeError, ValueError and errors of too little memory keep their type, others become a
    RuntimeError. With one rank nothing is exchanged. This is a collective: all ranks must reach it, in one order. So it
    must not be nested, and there must be no collectives inside: a rank that failed would be missing in them
    (:func:`in_step` is for those).
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
    device = getattr(group, "message_device", torch.device("cpu"))
    kind = 0 if failure is None else next((i for i, k in enumerate(_KINDS, 1) if isinstance(failure, k)), len(_KINDS))
    verdict = [kind, zlib.crc32(repr(found).encode(errors="replace"))]
    gathered = group.all_gather(torch.tensor([verdict], dtype=torch.int64, device=device), 0).tolist()
    verdicts = [kind for kind, _ in gathered]
    if not any(verdicts):
        if len({digest for _, digest in gathered}) > 1:
            raise ValueError("the ranks have read different files: give all the same, and change none while it is read")
        return
    texts = group.all_gather(_as_bytes(failure).to(device), 0).cpu()
    rank = next(rank for rank, verdict in enumerate(verdicts) if verdict)
    text = bytes(texts[rank].tolist()).rstrip(b"\0").decode("utf-8", errors="replace")
    raise _KINDS[verdicts[rank] - 1](f"rank {rank} of {group.world_size}: {text}") from failure


@contextmanager
def in_step() -> Iterator[None]:
    """Break the group on this rank where the block, a forward pass with collectives, fails.

    The other ranks cannot be told: they wait in the next collective (on GPUs in kernels that are enqueued already), and
    would take any message for it. All further collectives and steps of this rank are a RuntimeError that says to
    restart; the others fail by their backend's time-out, or as soon as this process ends. With one rank nothing
    happens.
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
    """RuntimeError on every rank unless all have the same integers, as many on each; ``what`` names them.

    With one rank nothing is exchanged. This is a collective: all ranks must reach it, in one order.
    """
    group = current_group()
    if group.world_size == 1:
        return
    device = getattr(group, "message_device", torch.device("cpu"))
    found = group.all_gather(torch.tensor([list(values)], dtype=torch.int64, device=device), 0).tolist()
    if any(other != found[0] for other in found):
        raise RuntimeError(
            f"{what} must be the same on all ranks, got {found} in rank order; give every rank the same requests in "
            "the same order, with the same config"
        )


def _as_bytes(failure: Exception | None) -> torch.Tensor:
    """The message, uint8 `[1, _MESSAGE_BYTES]`, padded with zeros."""
    named = "" if failure is None else str(failure)
    if failure is not None and not isinstance(failure, _KINDS):
        named = f"{type(failure).__name__}: {failure}"
    text = named.encode("utf-8", errors="backslashreplace")[:_MESSAGE_BYTES]
    return torch.tensor([list(text.ljust(_MESSAGE_BYTES, b"\0"))], dtype=torch.uint8, device="cpu")
