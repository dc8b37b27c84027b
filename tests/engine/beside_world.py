"""Engines on the CPU that read adapters as those on a GPU do."""

from punica.engine import Engine
from punica.engine.residency import AdapterResidency


def reading_beside(engine: Engine) -> Engine:
    """With a thread that reads folders, and slots that are filled beside the steps of others."""
    assert engine.manager is not None
    engine._residency = residency = AdapterResidency(engine.manager, reads_beside=True)
    scheduler = engine.scheduler
    scheduler.on_leave, scheduler.is_resident = residency.release, residency.is_resident
    scheduler.is_loaded = residency.is_loaded
    return engine
