"""The contract room: everything that has vLLM's shape, and vLLM with this library's LoRA products.

    wrapper.py   the wrapper's methods with tensors and adapter ids in place of weights and steps
    experts.py   those of experts
    indices.py   the step as index tensors
    ops/         flat ops, which take a step's tensors, and the tuned files' look-up
    weights.py   weights by their tensors, recognised from call to call
    plugin.py    what replaces vLLM's operators where it is installed beside this library; ``PUNICA_VLLM=0``: nothing

The rooms below call none of it by their own: a name that they offer from here is imported when it is asked for.
"""

from typing import Any

from punica.lazy import lazily

_HOMES = {
    "punica.vllm.plugin": ("register", "SWITCH", "SUPPORTED"),
    "punica.vllm.wrapper": ("PunicaWrapperABC", "PunicaWrapperBase", "PunicaWrapperCPU", "PunicaWrapperGPU"),
}


def __getattr__(name: str) -> Any:
    return lazily(__name__, name, _HOMES)
