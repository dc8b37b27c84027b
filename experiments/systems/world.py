"""What the systems of Figure 11 are built on, and what their tokens are checked with."""

from functools import cached_property

from experiments.systems.hf_backend import PeftBackend
from experiments.systems.stream import Job
from experiments.systems.weights import Weights


class World(Weights):
    """Weights and, once asked for, Hugging Face's model around them. Built once; systems are cheap to build on it."""

    @cached_property
    def peft(self) -> PeftBackend:
        """The Hugging Face model with its PEFT adapters: two of the systems, and the reference of the check."""
        return PeftBackend(self)

    @cached_property
    def references(self) -> dict[tuple[Job, bool], list[int]]:
        """Tokens that Hugging Face generates for a job alone, with and without LoRA; `systems.check` fills it."""
        return {}
