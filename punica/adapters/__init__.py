"""LoRA adapters, from a PEFT folder to a slot on the device. In the order of that path:

    request.py    `LoRARequest`: id, name and source of an adapter; one id is one source
    config.py     `adapter_config.json`: rank and scaling of every module (patterns.py: its regular expressions)
    activation.py invocation tokens of activated LoRA, and where in a prompt it begins
    names.py      from the names of tensors to modules, and which of them are read
    read.py       `AdapterFolder`, an open weights file with a config, and `AdapterTensors` in memory
    check.py      rules for dtypes, shapes and numbers
    weights.py    `LoRAModel`: A and B of all modules of one adapter
    load.py       `AdapterLoader`: a source, checked on arrival and loaded when it is needed
    pack.py       q, k, v into qkv, and experts, as the layers hold them
    cache.py      `AdapterCache`: registered in host memory, active in slots, pinned (lru.py: order of use)
    write.py      copies into a slot of all layers, asynchronous on CUDA
    manager.py    `LoRAModelManager`: the cache, with loading and the metadata of a step
    wrap.py       layers of a model that can carry LoRA, and their names
    synthetic.py  random adapters

An adapter takes four forms on that path: tensors, the :class:`ModuleWeights` of a :class:`LoRAModel`
(:class:`~punica.ops.quant.Fp8Matrix` in FP8), the :class:`~punica.layers.SlotPart` of each matrix, and the image that
the copy kernel reads. Its shapes are checked once, from the header of its file: see :class:`Certificate`.
"""

from punica.adapters.activation import activation_start
from punica.adapters.cache import LoadedAdapter
from punica.adapters.config import PEFTHelper, resolve_adapter_path
from punica.adapters.lru import LRUCache
from punica.adapters.manager import LoRAModelManager
from punica.adapters.names import MoEEPSpec, parse_fine_tuned_lora_name
from punica.adapters.request import LoRARequest
from punica.adapters.synthetic import random_adapter, random_adapter_tensors, write_random_adapter
from punica.adapters.weights import LoRALayerWeights, LoRAModel, ModuleWeights, PackedLoRALayerWeights
from punica.adapters.wrap import is_in_target_modules
from punica.adapters.write import CopyHandle, LayerSlotWriter, SlotWriter
