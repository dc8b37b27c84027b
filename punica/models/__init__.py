"""Backbones: Llama 2 / 3, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE, from Hugging Face configs and safetensors.

    families.py:            supported configs, normalised to common field names
    llama.py:               the dense model, and its mapping of checkpoint tensors to parameters
    mixture_of_experts.py:  the experts of Mixtral and Qwen3-MoE; `load_model`, of any family
    rotary.py:              rotary position embedding
    checkpoint.py:          tensors of a folder's safetensors files, and the parameters that they fill

Attention is injected: the engine implements :class:`Attention`, with the cache and the batch layout.
"""

from punica.models.llama import Attention, LlamaForCausalLM
from punica.models.mixture_of_experts import MixtureOfExpertsForCausalLM, load_model
