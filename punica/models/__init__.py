"""Backbones: Llama 2 / 3, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE, from Hugging Face configs and safetensors.

    families.py         which configs are served, and what each family says in its own way
    llama.py            the model, and which tensor of a checkpoint belongs to which parameter
    mixture_of_experts.py  what Mixtral and Qwen3-MoE have instead of its MLP
    rotary.py           how a position enters queries and keys
    checkpoint.py       filling the parameters, from safetensors files or with random numbers
    auto.py             the model of a folder, whichever of these it is

A model knows no cache and no batch: it asks an :class:`Attention`, which the engine is.
"""

from punica.models.auto import load_model
from punica.models.llama import Attention, LlamaForCausalLM
from punica.models.mixture_of_experts import MixtureOfExpertsForCausalLM
