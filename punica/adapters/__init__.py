"""What a tenant owns, on its way from a PEFT folder to a slot on the device; each file is a station.

    request.py    which adapter is wanted: id, name, folder; one id stands for one source
    peft_config.py  `adapter_config.json`: the rank and scaling of every module
    patterns.py   the expressions in it, matched in bounded time
    read.py       the tensors of `adapter_model.safetensors`, names first
    check.py      is it legal, and does it fit the model? The rules, asked by the stations around it
    weights.py    what travels: a pair A, B per module, scaled, alone or in the form of a packed layer
    lora_model.py all pairs of one adapter, from tensors or a folder: a `LoRAModel`
    pack.py       q, k, v become one qkv as the model computes it; for a GPU, everything becomes one block of memory
    pack_experts.py  the experts of a layer, from either spelling, become what its LoRA layer takes
    load.py       a request's folder, checked on arrival and loaded when it is needed
    hold.py       registered in host memory, active in a slot, pinned; the least recently used one makes room
    write.py      into a slot of all layers: on the spot on a CPU, on a stream of its own beside the steps on CUDA

:class:`LoRAModelManager` in `manager.py` stands in front and leads an adapter through them; `registered.py` is what it
can do with those that are loaded, `wrap.py` is its model side (which layers can carry LoRA, under which names),
`synthetic.py` makes random adapters and zero ones.
"""

from punica.adapters.cache import LoadedAdapter, LRUCache
from punica.adapters.lora_model import LoRAModel
from punica.adapters.manager import LoRAModelManager
from punica.adapters.peft_config import PEFTHelper
from punica.adapters.read import parse_fine_tuned_lora_name
from punica.adapters.request import LoRARequest, resolve_adapter_path
from punica.adapters.synthetic import random_adapter, random_adapter_tensors, write_random_adapter
from punica.adapters.weights import LoRALayerWeights, ModuleWeights, PackedLoRALayerWeights
from punica.adapters.wrap import MoEEPSpec, is_in_target_modules
from punica.adapters.write import CopyHandle, LayerSlotWriter, SlotWriter
