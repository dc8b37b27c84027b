"""Decode steps of a mixture-of-experts model through the engine, with adapters on its experts and without."""

from collections.abc import Mapping

import torch

from experiments.benches.engine_steps import EngineSteps, StepShape, check_adapters_matter, turns
from experiments.benches.moe_bench import model_config, random_experts
from punica.measure.timing import Protocol
from punica.models import MixtureOfExpertsForCausalLM

IN_A_ROW = 4
"""Timed steps of one kind before it is the next one's turn."""


class MoEEngine(EngineSteps):
    """An engine for the model `name` of `moe_bench.MODELS`, with an adapter of `rank` for each of `batch` requests
    (`fp8`: in slots of that format).
    """

    def __init__(
        self, name: str, rank: int, layers: int, divisor: int, batch: int, context: int, dtype: str, device: str,
        fp8: str | None = None,
    ) -> None:  # fmt: skip
        config = model_config(name, layers, divisor)
        model = MixtureOfExpertsForCausalLM(config, dtype=getattr(torch, dtype), device=device)
        model.init_random_weights(0)
        lora = {"target_modules": ["experts"], "fp8": fp8}
        super().__init__(model, rank, batch, context, lambda manager: random_experts(manager, rank), **lora)

    def decode_seconds(self, shapes: Mapping[str, StepShape], protocol: Protocol) -> dict[str, list[float]]:
        """Seconds of decode steps of every one of `shapes`, which take turns, by the host's clock.

        `CheckFailed` where adapters change no token, or the engine makes another step.
        """
        check_adapters_matter(self, list(shapes.values()))
        found: dict[str, list[float]] = {name: [] for name in shapes}
        for _ in turns(len(shapes), IN_A_ROW, protocol):
            for name, shape in shapes.items():
                self.settle(shape)
                found[name] += [self.step().seconds for _ in range(IN_A_ROW)]
        return found
