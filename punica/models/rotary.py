"""Rotary position embedding (RoPE): a query and a key are rotated by angles that grow with their position.

For a head of size D, pair i (0 <= i < D/2) of a vector at position m is turned by the angle ``m * f_i``:

    out_i       = x_i       * cos(m f_i) - x_{i+D/2} * sin(m f_i)
    out_{i+D/2} = x_{i+D/2} * cos(m f_i) + x_i       * sin(m f_i),        f_i = theta ** (-2 i / D)

(the halves layout of Hugging Face checkpoints). The scalar product of a rotated query and key then depends only on
the distance of their positions. Long-context models change the frequencies, see :func:`inverse_frequencies`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

ROPE_TYPES = ("default", "linear", "llama3")


def head_size(config: LlamaConfig) -> int:
    """Width D of one attention head: ``head_dim`` where the config has it, else ``hidden_size /
    num_attention_heads``.
    """
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Frequencies ``f`` as float32 ``[D/2]`` on the CPU, for ``config.rope_parameters["rope_type"]``:

    * ``default``: ``theta ** (-2 i / D)``;
    * ``linear``: all divided by ``factor``, so that positions are squeezed into the trained range;
    * ``llama3``: wavelengths ``2 pi / f`` shorter than ``L / high_freq_factor`` stay, longer than ``L /
      low_freq_factor`` are divided by ``factor``, in between the two are blended, with ``L =
      original_max_position_embeddings``.

    ValueError for another type: its rule is not implemented here.
    """
    rope: dict[str, Any] = {**(config.rope_parameters or {})}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"rope_type {kind!r} is not supported, must be one of {list(ROPE_TYPES)}; use a model with one of these"
        )
    size = head_size(config)
    frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = (
        rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    )  # full turns within the trained length
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / rope["factor"]


class RotaryEmbedding(nn.Module):
    """Cosines and sines of one step. Computed per step (a few thousand values), so there is no table and no length
    limit.
    """

    inverse_frequencies: Tensor

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("inverse_frequencies", inverse_frequencies(config).to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions ``[T]`` (int64) to ``(cos, sin)``, each ``[T, 1, D/2]``: float32 angles, the model's dtype."""
        angles = (positions.unsqueeze(-1) * self.inverse_frequencies).unsqueeze(1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``x [T, H, D]`` by ``(cos, sin)`` of :class:`RotaryEmbedding`; returns a new tensor."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
