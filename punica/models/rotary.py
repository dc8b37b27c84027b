"""Angles of the rotary position embedding (RoPE); :mod:`punica.ops.backbone` rotates queries and keys by them.

In a head of size D at position m, pair i (0 <= i < D/2) is rotated by the angle ``m * f_i``:

    out_i       = x_i       * cos(m f_i) - x_{i+D/2} * sin(m f_i)
    out_{i+D/2} = x_{i+D/2} * cos(m f_i) + x_i       * sin(m f_i),        f_i = theta ** (-2 i / D)

(the halves layout of Hugging Face checkpoints). Long-context models change the frequencies, and some scale the result.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from punica.checks import clip
from punica.ops.backbone import rotary_angles

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies no length decides: else a request's tokens would depend on its batch's longest sequence.
"""


def inverse_frequencies(config: Any) -> tuple[Tensor, float]:
    """Return frequencies ``f``, float32 ``[D/2]`` on the CPU, and the factor of cosines and sines, by the config's
    ``rope_parameters``. ValueError for a ``rope_type`` that is not in :data:`ROPE_TYPES`.
    """
    rope, kind = config.rope_parameters, config.rope_parameters["rope_type"]
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not supported, must be one of {list(ROPE_TYPES)}")
    with torch.device("cpu"):
        if kind == "default":
            size = config.head_dim
            return rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
        try:
            return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        except Exception as error:  # any exception of transformers, which checks no values
            raise ValueError(f"the config's rope_parameters are {clip(rope)}: {error}; correct them") from error


class RotaryEmbedding(nn.Module):
    """Cosines and sines of one step (a few thousand values: no table, and no limit of the length)."""

    inverse_frequencies: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.dtype = cast(torch.dtype, config.dtype)
        frequencies, self.factor = inverse_frequencies(config)
        self.register_buffer("inverse_frequencies", frequencies.to(torch.get_default_device()), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Map positions ``[T]`` (int64) to ``(cos, sin)``, each ``[T, 1, D/2]``: float32 angles, the model's dtype."""
        return rotary_angles(positions, self.inverse_frequencies, self.factor, self.dtype)
