"""The adapter of every row of a step: the step as one object, and the forms in which callers describe it.

`LoRABatch` is the step that wrapper and ops take. `LoRAMapping`, `convert_mapping`, `compute_meta` and `LoRAKernelMeta`
are for callers who have adapter ids or tensors of slots.
"""

from punica.metadata.batch import LoRABatch
from punica.metadata.kernel_meta import LoRAKernelMeta, MetaArgs, get_captured_lora_counts
from punica.metadata.mapping import (
    LoRAMapping,
    Segments,
    compute_meta,
    convert_mapping,
    embedding_offsets,
    mapped_rows,
    padded_slots,
)
from punica.metadata.mixture import MixedBatch, MixedRows
from punica.metadata.rows import HEIGHTS, RowGroups, StepShape, captured_adapters
from punica.metadata.segment_plan import SegmentPlan
