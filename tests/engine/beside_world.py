"""Engines on the CPU that read adapters as those on a GPU do."""

from punica.engine import Engine


def reading_beside(engine: Engine) -> Engine:
    """Have threads read folders, and slots filled beside the steps of other requests."""
    assert engine._residency is not None
    engine._residency._reads_beside = True
    return engine
