"""The shapes that Figures 7, 8, 9 and README and the extensions compute. Imports no torch."""

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
        """What decides an operator's time beside batch, popularity and rank."""
        return {"h1": self.h1, "h2": self.h2, "dtype": self.dtype.name, "resident": self.resident(cfg)}

    def resident(self, cfg: Config) -> int:
        """Adapters on the device, as in a server whose slots hold more than this batch uses."""
        return cfg.adapters.slots or max(self.batch_sizes)


def operator_conf(cfg: Config) -> OperatorConf:
    """`cfg.figure` with its type."""
    return cast(OperatorConf, cfg.figure)
