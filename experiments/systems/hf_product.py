"""The matrix product of Hugging Face's linear layers: ours, so that a comparison of systems is none of products.

On a GPU adapters' factors stay with torch: PEFT launches thousands of small kernels per step and waits for its host,
which takes longer to launch ours.
"""

import torch
from torch import nn

from punica.parallel.matmul import linear


class SameProduct(nn.Linear):
    """A linear layer on the product that our engine's layers use (`punica.parallel.matmul`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [..., in]` to `[..., out]`."""
        rows = linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return rows.view(*x.shape[:-1], -1)


def linear_layers(model: nn.Module, device: str) -> list[nn.Linear]:
    """The linear layers of `model` whose product is ours on `device`."""
    return [
        module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, SameProduct) and (device == "cpu" or ".lora_" not in name)
    ]


def use_product(kind: type[nn.Linear], layers: list[nn.Linear]) -> None:
    """Make every one of `layers` a `SameProduct`, or torch's own linear layer, in place."""
    for layer in layers:
        layer.__class__ = kind
