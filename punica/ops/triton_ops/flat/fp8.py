"""`lora_shrink_fp8` and `lora_expand_fp8`: the same with weights in FP8 and their scales.

    out[i, t, c] = scaling * a(t) * b_i[l, c] * sum_k x[t, k] * A_i[l, c, k]       l = slot(t), A_i [L, r, K] float8

and the other modes of `punica.ops.fp8_checks`.
"""

from collections.abc import Sequence

from torch import Tensor

from punica.ops.checks import FLAT
from punica.ops.fp8_checks import Scheme
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.flat.tensor_batch import TensorBatch
from punica.ops.triton_ops.op import custom_op
from punica.ops.triton_ops.step_ops import TritonOps
from punica.ops.weights import Stack

_NAMES = FLAT._replace(a_scale="b_scale", b_scale="b_scale")


@custom_op(mutates="output_tensor")
def lora_shrink_fp8(
    inputs: Tensor, lora_a_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor, num_active_loras: int | Tensor | None,
    scaling: float, b_scale: Sequence[Tensor], a_scale: Tensor | None = None,
    group_k: int = 0, group_n: int = 0, use_fp8_w8a8: bool = False, per_channel_quant: bool = False,
    *, accumulate: bool = False, lora_ranks: Tensor | None = None, batch_invariant: bool = False,
    tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """Compute ``output_tensor[i, t] (+)= scaling * inputs[t] @ A_i[slot(t)]^T`` for every slice i, A in FP8, in place.

    Arguments and errors as of `lora_shrink`, and:

    Args:
        inputs: any float, or (``use_fp8_w8a8``) float8 with ``a_scale``.
        lora_a_weights: all float8_e4m3fn or all float8_e5m2. Without ``b_scale`` weights of `lora_shrink`.
        b_scale: n float32 tensors [L] (per tensor), [L, r] (``per_channel_quant``) or [L, ceil(r/group_n),
            ceil(K/group_k)] (block-wise); a 1 may follow L; any strides.
        a_scale: float32, one element, [T], [T, 1], or block-wise [T, ceil(K/group_k)].
        group_k, group_n: block sizes; group_k a power of two >= 16, or at least K.

    TypeError, ValueError also for scales and sizes that do not fit, or are missing.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    if not batch.no_lora:
        scheme = Scheme(group_k, group_n, use_fp8_w8a8, per_channel_quant)
        a = Stack.of_a(lora_a_weights, lora_ranks, b_scale, scheme, _NAMES)
        ops = TritonOps(Options(batch_invariant, tuned_dir=tuned_dir))
        ops.shrink(output_tensor, inputs, a, batch, scaling, accumulate, a_scale)


@custom_op(mutates="output_tensor")
def lora_expand_fp8(
    inputs: Tensor, lora_b_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor, num_active_loras: int | Tensor | None,
    b_scale: Sequence[Tensor], a_scale: Tensor | None = None, offset_start: int = 0, add_inputs: bool = False,
    group_k: int = 0, group_n: int = 0, use_fp8_w8a8: bool = False, per_channel_quant: bool = False,
    *, lora_ranks: Tensor | None = None, batch_invariant: bool = False, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """Compute ``output_tensor[t, o_i : o_i + N_i] (+)= inputs[i, t] @ B_i[slot(t)]^T`` for every slice i, B in FP8.

    Arguments and errors as of `lora_expand` and `lora_shrink_fp8`, and:

    Args:
        b_scale: n float32 tensors [L] (per tensor), [L, N_i] (``per_channel_quant``) or [L, ceil(N_i/group_n),
            ceil(r/group_k)] (block-wise); a 1 may follow L; any strides.
        a_scale: K is the rank; all slices of a row share its scales.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    if not batch.no_lora:
        scheme = Scheme(group_k, group_n, use_fp8_w8a8, per_channel_quant)
        b = Stack.of_b(lora_b_weights, lora_ranks, b_scale, scheme, _NAMES)
        ops = TritonOps(Options(batch_invariant, tuned_dir=tuned_dir))
        ops.expand(output_tensor, inputs, b, batch, offset_start, add_inputs, a_scale)
