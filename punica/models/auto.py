"""Model of a checkpoint folder, of any supported family."""

from pathlib import Path

import torch

from punica.models.families import EXPERTS, model_type_of
from punica.models.llama import LlamaForCausalLM
from punica.models.mixture_of_experts import MixtureOfExpertsForCausalLM


def load_model(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    """Build the model of ``config.json`` in ``folder``, and load its weights.

    ``dtype``: of the weights; ``None`` takes the config's. Raises FileNotFoundError (no folder, config or weights),
    ValueError (an unsupported family; a damaged or wrong config; damaged weights).
    """
    model_class = MixtureOfExpertsForCausalLM if model_type_of(folder) in EXPERTS else LlamaForCausalLM
    model = model_class(folder, dtype, device)
    model.load_weights(folder)
    return model
