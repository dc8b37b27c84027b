"""Shapes of the LoRA projection in Figures 7, 8, 9, README and the extensions. Imports no torch."""

from typing import Any, cast

from experiments.harness.schema import Config, Count, Counts, DType, FigureConf


class OperatorConf(FigureConf):
    """Shapes of one LoRA projection: x [T, h1], A [r, h1], B [h2, r]."""

    h1: Count
    h2: Count
    batch_sizes: Counts
    dtype: DType

    def settings(self, cfg: Config) -> dict[str, Any]:
        """Return the settings that decide an operator's time beside batch, popularity and rank."""
        return {"h1": self.h1, "h2": self.h2, "dtype": self.dtype.name, "resident": self.resident(cfg)}

    def resident(self, cfg: Config) -> int:
        """Return the adapters on the device: a server's slots hold more than one batch uses."""
        return cfg.adapters.slots or max(self.batch_sizes)


def operator_conf(cfg: Config) -> OperatorConf:
    """`cfg.figure` with its type."""
    return cast(OperatorConf, cfg.figure)
