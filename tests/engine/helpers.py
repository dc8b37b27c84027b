"""What tests of the engine share."""

from types import SimpleNamespace

import torch

from punica.engine import GenerationResult


def tokens_of(results: list[GenerationResult]) -> list[list[int]]:
    """What was generated; every request must have ended well."""
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids for result in results]


def torch_without_gpu() -> SimpleNamespace:
    """What `punica.engine.cuda_graph` needs of torch to capture, where whoever captures is replaced."""
    device = SimpleNamespace(
        graph_pool_handle=lambda: None, mem_get_info=lambda _: (0, 0), synchronize=lambda _: None,
        empty_cache=lambda: None, Stream=lambda _: None, CUDAGraph=torch.cuda.CUDAGraph,
    )  # fmt: skip
    return SimpleNamespace(cuda=device, device=torch.device, OutOfMemoryError=torch.OutOfMemoryError)
