"""Backbones: Llama 2 / 3, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE, from Hugging Face configs and safetensors.

    families.py:            supported configs, normalised to common field names
    llama.py:               the dense model, and its mapping of checkpoint tensors to parameters
    mixture_of_experts.py:  the experts of Mixtral and Qwen3-MoE
    rotary.py:              rotary position embedding
    stored.py:              tensors in the safetensors files of a folder, by name
    checkpoint.py:          parameters from those, or random ones
    auto.py:                the model of a folder, of any family

Attention is injected: the engine implements :class:`Attention`, with the cache and the batch layout.
"""

from punica.models.auto import load_model
from punica.models.llama import Attention, LlamaForCausalLM
from punica.models.mixture_of_experts import MixtureOfExpertsForCausalLM
