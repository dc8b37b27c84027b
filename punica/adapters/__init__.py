"""LoRA adapters, from a PEFT folder to a slot on the device. In the order of that path:

    request.py       `LoRARequest`: id, name and folder of an adapter; one id is one source
    tensors.py       `AdapterTensors`: tensors and config in memory
    load.py          `AdapterLoader`: a folder, checked on arrival and loaded when it is needed
    peft_config.py   `adapter_config.json`: rank and scaling of every module
    patterns.py      its regular expressions, matched in bounded time
    doubts.py        warnings of adapters that load, and whose outputs may be wrong
    read.py          tensors of `adapter_model.safetensors`
    source.py        `AdapterFolder`, both files, open, or `AdapterMemory`
    check.py         rules for names, dtypes, shapes and numbers
    lora_model.py    `LoRAModel`: all modules of one adapter
    weights.py       `ModuleWeights`: A and B of one module, one pair per slice
    pack.py          q, k, v into qkv, as the layers hold them; for a GPU one block of memory
    pack_experts.py  the experts of a layer, from either spelling of PEFT
    cache.py         `AdapterCache`: registered in host memory, active in slots, pinned (lru.py: order of use)
    write.py         copies into a slot of all layers, asynchronous on CUDA
    manager.py       `LoRAModelManager`: the cache, with loading and the metadata of a step
    wrap.py          layers of a model that can carry LoRA, and their names
    synthetic.py     random adapters, and zero ones for warm-up

An adapter takes four forms on that path: tensors (:class:`~punica.ops.quant.Fp8Matrix` in FP8), the
:class:`ModuleWeights` of a :class:`LoRAModel`, the :class:`~punica.layers.SlotPart` of each matrix, and the image that
the copy kernel reads. Its shapes are checked once, from the header of its file: see :class:`Certificate`.
"""

from punica.adapters.cache import LoadedAdapter
from punica.adapters.lora_model import LoRAModel
from punica.adapters.lru import LRUCache
from punica.adapters.manager import LoRAModelManager
from punica.adapters.peft_config import PEFTHelper
from punica.adapters.read import parse_fine_tuned_lora_name
from punica.adapters.request import LoRARequest, resolve_adapter_path
from punica.adapters.synthetic import random_adapter, random_adapter_tensors, write_random_adapter
from punica.adapters.weights import LoRALayerWeights, ModuleWeights, PackedLoRALayerWeights
from punica.adapters.wrap import MoEEPSpec, is_in_target_modules
from punica.adapters.write import CopyHandle, LayerSlotWriter, SlotWriter
