"""FP8 weights in every mode, and what they mean, computed apart from the library: in float64, element by scale."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODES: dict[str, dict[str, Any]] = {
    "tensor": {},
    "channel": {"per_channel_quant": True},
    "128x128": {"group_n": 128, "group_k": 128},
    "r x 32": {"group_n": 16, "group_k": 32},
    "32 x r": {"group_n": 32, "group_k": 16},
}


def grid(scale: Tensor, rows: int, columns: int, mode: dict[str, Any]) -> Tensor:
    """One slot's scales as float64 ``[rows, columns]``."""
    scale = scale.double().cpu()
    if mode.get("group_k"):
        blocks = scale.reshape(scale.shape[-2:])
        return blocks[torch.arange(rows) // mode["group_n"]][:, torch.arange(columns) // mode["group_k"]]
    return scale.reshape(-1, 1).expand(rows, columns)


def fp8(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """Random values, the least and the largest ones of the format among them."""
    return (torch.randn(*shape) * spread).clamp(-400, 400).to(dtype)


@dataclass
class Stack:
    """Weights ``[L, 1, N, K]`` of one slice, and scales different in every slot, channel and block."""

    stored: Tensor
    scale: Tensor
    mode: dict[str, Any]

    @classmethod
    def random(cls, slots: int, n: int, k: int, mode: dict[str, Any], dtype: torch.dtype, device: str) -> "Stack":
        shape: tuple[int, ...] = (slots,)
        if mode.get("per_channel_quant"):
            shape = (slots, n)
        elif mode.get("group_k"):
            shape = (slots, -(-n // mode["group_n"]), -(-k // mode["group_k"]))
        return cls(fp8((slots, 1, n, k), dtype).to(device), (torch.rand(shape) + 0.1).to(device) * k**-0.5, mode)

    def real(self) -> Tensor:
        """float64 ``[L, N, K]`` on the CPU."""
        values = self.stored[:, 0].cpu().float().double()
        return torch.stack([v * grid(s, *v.shape, self.mode) for v, s in zip(values, self.scale, strict=True)])


def real_rows(x: Tensor, a_scale: Tensor | None, mode: dict[str, Any]) -> Tensor:
    """Activations as float64 on the CPU."""
    values = x.cpu().float().double() if x.dtype in (E4M3, E5M2) else x.cpu().double()
    if a_scale is None:
        return values
    scale = a_scale.cpu().double()
    if scale.numel() == 1 or scale.ndim == 1 or scale.shape[1] == 1:
        return values * scale.reshape(-1, 1)
    return values * scale[:, torch.arange(x.shape[-1]) // mode["group_k"]]
