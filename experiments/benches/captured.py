"""A call as one CUDA graph, which the host replays: how the engine runs decode steps (`punica.engine.cuda_graph`)."""

from collections.abc import Callable

import torch

from punica.layers import rehearsal


class CapturedRun:
    """A function as a CUDA graph; `function` is kept because it holds what the graph reads by address.

    It runs once before, as it will in the graph, so that a capture finds every kernel compiled and loaded.
    """

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self.function, self.graph = function, torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), rehearsal():
            function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph):
            self.output = function()

    def __call__(self) -> torch.Tensor:
        """Run it again; the result is overwritten by the next call."""
        self.graph.replay()
        return self.output
