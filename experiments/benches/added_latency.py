"""A layer's base projection y = x W [h1, h2], alone and followed by LoRA, for `ext_added_latency`.

Under `cuda_graph` the weights W rotate as the adapters do, so that both come from memory.
"""

from collections.abc import Sequence
from functools import partial

import torch

from experiments.benches import operators
from experiments.benches.layer_call import beside
from experiments.benches.operator_conf import operator_conf
from experiments.benches.operators import Prepared, Problem, layer_calls
from experiments.harness.schema import Config
from punica.layers.dual_stream import DualStream
from punica.measure.timing import Call


def projection(cfg: Config) -> torch.Tensor:
    """The weights W [copies, h1, h2], random, scaled so that y has unit variance."""
    figure, device = operator_conf(cfg), cfg.hardware.device
    copies = operators.copies(cfg, figure.h1 * figure.h2 * figure.dtype.bytes)
    generator = torch.Generator(device).manual_seed(2)
    weights = torch.empty(copies, figure.h1, figure.h2, device=device, dtype=getattr(torch, figure.dtype.name))
    for one in weights:
        one.copy_(torch.randn(one.shape, generator=generator, device=device) * figure.h1**-0.5)
    return weights


def behind_products(products: Sequence[Call], batches: Sequence[Problem]) -> list[Call]:
    """Prepare base product and LoRA call of a layer for each of `batches`, on two streams on a GPU."""
    x = batches[0].x
    streams = DualStream(x.device) if x.is_cuda else None
    return [partial(beside, streams, x, *pair) for pair in zip(products, layer_calls(batches), strict=True)]


def checked_calls(batches: Sequence[Problem], weights: torch.Tensor, with_lora: bool) -> list[Call]:
    """Prepare y = x W of every batch and, `with_lora`, a layer's LoRA; `CheckFailed` when the first is wrong."""
    products: list[Call] = [
        partial(torch.mm, one.x, weights[i % len(weights)], out=one.y) for i, one in enumerate(batches)
    ]
    chains, first = behind_products(products, batches) if with_lora else products, batches[0]

    def expected() -> torch.Tensor:
        y = first.x.double() @ weights[0].double()
        return y + first.expected() if with_lora else y

    name = f"base projection {'with' if with_lora else 'without'} LoRA"
    return operators.checked(name, [Prepared(chain, lambda: first.y, expected) for chain in chains])
