"""vLLM with this library's LoRA products: a plugin, which vLLM finds.

    plugin.py   what it replaces, where, and when it leaves vLLM as it is

Installed beside a supported vLLM it is on; ``PUNICA_VLLM=0`` in the environment switches it off.
"""

from punica.vllm.plugin import SUPPORTED, SWITCH, register
