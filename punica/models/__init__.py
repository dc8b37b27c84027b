"""Backbones: Llama 2 / 3, from Hugging Face configs and safetensors names."""

from punica.models.llama import Attention, LlamaForCausalLM

__all__ = ["Attention", "LlamaForCausalLM"]
