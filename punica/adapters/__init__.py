"""What a tenant owns: from a PEFT folder to checked weights to a slot on the device."""

from punica.adapters.lru import LRUCache
from punica.adapters.manager import LoRAModelManager
from punica.adapters.peft import LoRARequest, PEFTHelper, parse_fine_tuned_lora_name, resolve_adapter_path
from punica.adapters.random_adapter import random_adapter, random_adapter_tensors, write_random_adapter
from punica.adapters.slot_writer import CopyHandle, LayerSlotWriter, SlotWriter
from punica.adapters.weights import LoRALayerWeights, LoRAModel, PackedLoRALayerWeights
from punica.adapters.wrapping import is_in_target_modules

__all__ = [
    "CopyHandle",
    "LRUCache",
    "LayerSlotWriter",
    "LoRALayerWeights",
    "LoRAModel",
    "LoRAModelManager",
    "LoRARequest",
    "PEFTHelper",
    "PackedLoRALayerWeights",
    "SlotWriter",
    "is_in_target_modules",
    "parse_fine_tuned_lora_name",
    "random_adapter",
    "random_adapter_tensors",
    "resolve_adapter_path",
    "write_random_adapter",
]
