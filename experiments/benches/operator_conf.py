"""Shapes of the LoRA projection in Figures 7, 8, 9, README and the extensions. Imports no torch."""

from dataclasses import dataclass
from typing import Any, cast

from omegaconf import MISSING

from experiments.harness.schema import Config, DType, FigureConf


@dataclass
class OperatorConf(FigureConf):
    """Shapes of one LoRA projection: x [T, h1], A [r, h1], B [h2, r]."""

    h1: int = MISSING
    h2: int = MISSING
    batch_sizes: list[int] = MISSING
    dtype: DType = MISSING

    def settings(self, cfg: Config) -> dict[str, Any]:
        """Return the settings that decide an operator's time beside batch, popularity and rank."""
        return {"h1": self.h1, "h2": self.h2, "dtype": self.dtype.name, "resident": self.resident(cfg)}

    def resident(self, cfg: Config) -> int:
        """Return the adapters on the device: a server's slots hold more than one batch uses."""
        return cfg.adapters.slots or max(self.batch_sizes)


def operator_conf(cfg: Config) -> OperatorConf:
    """`cfg.figure` with its type."""
    return cast(OperatorConf, cfg.figure)
