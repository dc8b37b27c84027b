"""Adapters of a GPU as a router sees them: from its residency, or without one from its members."""

from punica.cluster.gpu import Gpu


def is_home(gpu: Gpu, adapter: int) -> bool:
    """Check that ``adapter`` has a slot of ``gpu``, or will have one for a member or a load. The plain backbone (0)
    needs none.
    """
    if not adapter or gpu.requests_of[adapter]:
        return True
    residency = gpu.residency
    return residency is not None and (residency.in_slot(adapter) or residency.loading(adapter))


def is_warm(gpu: Gpu, adapter: int) -> bool:
    """Check that the host memory of ``gpu`` has ``adapter``."""
    return gpu.residency is not None and gpu.residency.on_host(adapter)


def free_slots(gpu: Gpu) -> int:
    """Count the slots of ``gpu`` without an adapter; without a residency every member could have one."""
    return gpu.max_batch_size - len(gpu.requests_of) if gpu.residency is None else gpu.residency.free_slots


def num_slots(gpu: Gpu) -> int:
    """Count the slots of ``gpu``."""
    return gpu.max_batch_size if gpu.residency is None else gpu.residency.num_slots
