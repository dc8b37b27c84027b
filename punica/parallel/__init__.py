"""The base layers that LoRA wraps, and the tensor-parallel group they talk through; attribute names follow vLLM.

group.py            tensor-parallel groups and their collectives; launch.py starts the processes
agreement.py        failures and arguments compared over the ranks of a group
embedding.py        vocabulary-parallel embedding and head
linear.py           replicated, column and row parallel layers: split, multiply, gather or reduce
matmul.py           their dense product
moe.py              router, experts, and their placement on ranks
memory.py           free-memory checks before large allocations
logits.py           hidden states and the head to logits
"""

from punica.parallel.agreement import all_ranks_agree, check_in_step, check_same_on_all_ranks, gathered_bytes, in_step
from punica.parallel.embedding import ParallelLMHead, VocabParallelEmbedding, VocabShardIndices
from punica.parallel.group import (
    SingleProcessGroup,
    TensorParallelGroup,
    TorchDistGroup,
    collectives_can_be_captured,
    current_group,
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    set_tensor_parallel_group,
    split_tensor_along_last_dim,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_gather,
    tensor_parallel,
)
from punica.parallel.launch import init_tensor_parallel, spawn_tensor_parallel
from punica.parallel.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    check_batch_invariant,
    dense_layers,
    set_batch_invariant,
)
from punica.parallel.logits import LogitsProcessor
from punica.parallel.memory import Need, check_free, free_bytes
from punica.parallel.moe import FusedMoE, MoEConfig, MoEParallelConfig, place_experts, route
