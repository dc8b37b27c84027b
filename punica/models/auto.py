"""Model of a checkpoint folder, of any supported family."""

from pathlib import Path

import torch

from punica.models.families import EXPERTS, model_type_of
from punica.models.llama import LlamaForCausalLM
from punica.models.mixture_of_experts import MixtureOfExpertsForCausalLM
from punica.models.stored import FLOATS, NO_WEIGHTS, stored_tensors


def load_model(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    """Build the model of ``config.json`` in ``folder``, and load its weights.

    ``dtype``: of the weights; ``None`` takes the config's, or that of the first tensor when it has none, as
    transformers does. Raises FileNotFoundError (no folder, config or weights), ValueError (an unsupported family; a
    damaged or wrong config; damaged or quantised weights).
    """
    model_class = MixtureOfExpertsForCausalLM if model_type_of(folder) in EXPERTS else LlamaForCausalLM
    config = model_class.resolve_config(folder)
    stored = stored_tensors(folder, NO_WEIGHTS)  # what is refused takes no memory of the device
    of_tensors = FLOATS[next(iter(stored.values())).dtype] if stored else None
    model = model_class(config, dtype or config.dtype or of_tensors, device)
    model.load_weights(folder)
    return model
