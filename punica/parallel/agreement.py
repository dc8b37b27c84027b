"""What fails on one rank fails on all of them, before any of them goes on.

Ranks read the same folders, but not the same disks. If one of them cannot load an adapter and the others compute with
it, the ranks never meet again in the same collective: everybody's requests end in a time-out that names no cause.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from punica.parallel.group import current_group

_KINDS: tuple[type[Exception], ...] = (FileNotFoundError, TypeError, ValueError, RuntimeError)
_MESSAGE_BYTES = 2048


@contextmanager
def all_ranks_agree() -> Iterator[None]:
    """Inside, this rank does what all ranks of the group do; on leaving they tell each other whether it worked.

    If it failed anywhere, every rank raises: the kind of error and the message of the first rank that failed, with its
    number in front. FileNotFoundError, TypeError and ValueError stay what they are, others become a RuntimeError. With
    one rank nothing is exchanged. All ranks must come here, in the same order as to their other collectives.
    """
    group = current_group()
    if group.world_size == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    device = getattr(group, "message_device", torch.device("cpu"))
    kind = 0 if failure is None else 1 + next((i for i, k in enumerate(_KINDS) if isinstance(failure, k)), 3)
    verdicts = group.all_gather(torch.tensor([kind], dtype=torch.int64, device=device), 0).tolist()
    if not any(verdicts):
        return
    texts = group.all_gather(_as_bytes(failure).to(device), 0).cpu()
    rank = next(rank for rank, verdict in enumerate(verdicts) if verdict)
    text = bytes(texts[rank].tolist()).rstrip(b"\0").decode("utf-8", errors="replace")
    raise _KINDS[verdicts[rank] - 1](f"rank {rank} of {group.world_size}: {text}") from failure


def _as_bytes(failure: Exception | None) -> torch.Tensor:
    """The message, uint8 `[1, _MESSAGE_BYTES]`, zeros behind it."""
    named = "" if failure is None else str(failure)
    if failure is not None and not isinstance(failure, _KINDS):
        named = f"{type(failure).__name__}: {failure}"
    text = named.encode("utf-8", errors="backslashreplace")[:_MESSAGE_BYTES]
    return torch.tensor([list(text.ljust(_MESSAGE_BYTES, b"\0"))], dtype=torch.uint8, device="cpu")
