"""Which row of a step uses which adapter: mappings, SGMV segments and the integers that the kernels read."""

from punica.metadata.kernel_meta import LoRAKernelMeta, MetaArgs, get_captured_lora_counts
from punica.metadata.mapping import HostIndices, LoRAMapping, Segments, compute_meta, convert_mapping, host_indices
from punica.metadata.staging import StagedBuffer, aligned_offsets

__all__ = [
    "HostIndices",
    "LoRAKernelMeta",
    "LoRAMapping",
    "MetaArgs",
    "Segments",
    "StagedBuffer",
    "aligned_offsets",
    "compute_meta",
    "convert_mapping",
    "get_captured_lora_counts",
    "host_indices",
]
