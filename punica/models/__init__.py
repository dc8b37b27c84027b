"""Backbones: Llama 2 / 3, from Hugging Face configs and safetensors names.

    llama.py            the model, and which tensor of a checkpoint belongs to which parameter
    rotary.py           how a position enters queries and keys
    checkpoint.py       filling the parameters, from safetensors files or with random numbers
"""

from punica.models.llama import Attention, LlamaForCausalLM

__all__ = ["Attention", "LlamaForCausalLM"]
