"""The path of vLLM."""

from punica.layers.base_linear import ReplicatedLinearWithLoRA as ReplicatedLinearWithLoRA
