"""The contract room: everything that has vLLM's shape, and vLLM with this library's LoRA products.

    wrapper.py   Methods with tensors and adapter ids in place of weights and steps.
    experts.py   Those of experts.
    indices.py   The step as index tensors.
    ops/         Flat ops, which take a step's tensors; a configuration by name and sizes.
    weights.py   Weights by their tensors, recognised from call to call.
    plugin.py    Replacement of vLLM's operators where it is installed; ``PUNICA_VLLM=0`` switches it off.

Rooms below call none of it. A name that they offer from here is imported at its first use.
"""

from typing import Any

from punica.lazy import lazily

_HOMES = {
    "punica.vllm.plugin": ("register", "SWITCH", "SUPPORTED"),
    "punica.vllm.wrapper": ("PunicaWrapperABC", "PunicaWrapperBase", "PunicaWrapperCPU", "PunicaWrapperGPU"),
}


def __getattr__(name: str) -> Any:
    return lazily(__name__, name, _HOMES)
