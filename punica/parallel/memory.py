"""What this rank can still allocate, asked before something large is."""

import psutil
import torch

from punica.parallel.group import get_tensor_model_parallel_world_size


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device: on CUDA also what torch has reserved and does not use; on a CPU,
    what the operating system can give without swapping, shared out over the ranks of this group.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available // get_tensor_model_parallel_world_size()


def check_free(what: str, wanted: int, device: torch.device, remedy: str) -> None:
    """ValueError if `wanted` bytes are more than what is free on the device; `what` takes them, `remedy` takes fewer.

    Memory that a CPU only promises counts as well: a step that first writes to it would otherwise end the process.
    """
    if device.type != "meta" and wanted > (free := free_bytes(device)):
        raise ValueError(f"{what} would take {wanted} bytes, {free} are free on {device}; {remedy}")
