"""Layers with LoRA: each wraps a base layer of :mod:`punica.parallel` and adds every row's own adapter.

``from_layer`` picks the class; ``set_mapping`` connects the layer to the step's metadata; ``set_lora`` fills a slot.

    selection.py        which class wraps which base layer
    base.py             base layer, slots with adapters, and wrapper of every layer; packing.py splits fused adapters
    base_linear.py      ``apply`` of linear layers: the base layer's product, then ``punica_wrapper.add_lora_linear``,
                        which launches the kernels (dual_stream.py: shrink beside the base product); replicated and row
    column_parallel_linear.py
                        B split by rows: plain, merged and QKV layers
    fully_sharded.py    both A and B sharded over the ranks: shrink, a collective, expand
    fused_moe.py        experts; moe_context.py: their slots as the base layer's products take them
    trainable.py        a linear layer whose adapters train
    vocab_parallel_embedding.py, logits_processor.py
                        the two ends of a model
    utils.py            rules that all layers share
"""

from punica.layers.base import BaseLayerWithLoRA, SlotPart
from punica.layers.base_linear import BaseLinearLayerWithLoRA, ReplicatedLinearWithLoRA, RowParallelLinearWithLoRA
from punica.layers.column_parallel_linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
)
from punica.layers.fully_sharded import (
    ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithShardedLoRA,
    RowParallelLinearWithShardedLoRA,
)
from punica.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from punica.layers.logits_processor import LogitsProcessorWithLoRA
from punica.layers.packing import expand_groups
from punica.layers.selection import LORA_CLASSES, from_layer, from_layer_logits_processor
from punica.layers.trainable import TrainableLinear
from punica.layers.utils import capturing_vocabulary, register_layer_class, rehearsal, resolve_layer_class
from punica.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA
