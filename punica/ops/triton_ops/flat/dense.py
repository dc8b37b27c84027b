"""`lora_shrink`, `lora_expand` and `lora_linear`: the step and the weights given by their tensors."""

from collections.abc import Sequence

from torch import Tensor

from punica.ops.checks import FLAT
from punica.ops.fp8_checks import PLAIN, Scheme
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.flat.tensor_batch import TensorBatch
from punica.ops.triton_ops.op import custom_op
from punica.ops.triton_ops.step_ops import TritonOps
from punica.ops.weights import LoRAWeights, Stack


@custom_op(mutates="output_tensor")
def lora_shrink(
    inputs: Tensor, lora_a_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor,
    scaling: float,
    *, num_active_loras: int | Tensor | None = None, accumulate: bool = False, lora_ranks: Tensor | None = None,
    batch_invariant: bool = False, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """Compute ``output_tensor[i, t] (+)= scaling * inputs[t] @ A_i[slot(t)]^T`` for every slice i, in place.

    Args:
        inputs: [T, K], float16, bfloat16 or float32, any strides.
        lora_a_weights: n x [L, (1,) r, K], dtype of the inputs, contiguous (or with the last two dimensions swapped).
        output_tensor: [n, T, r] contiguous; float32 keeps the precision of the sums.
        token_lora_mapping, ..., no_lora_flag_cpu: the first six of `LoRAKernelMeta.meta_args`.
        scaling: finite factor.
        num_active_loras: the seventh, how many entries of ``lora_ids`` may be in use (None: all).
        accumulate: add to the output instead of overwriting it.
        lora_ranks: int32 [n, L], true rank per slice and slot (None: r).
        batch_invariant, tuned_dir: as in `punica.config.LoRAConfig`.

    Rows at slot -1: 0, or unchanged with ``accumulate``. With the no-adapter flag set nothing is written. TypeError for
    dtypes, ValueError for shapes, ranges and devices, before any write.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    if not batch.no_lora:
        a, options = Stack.of_a(lora_a_weights, lora_ranks, names=FLAT), Options(batch_invariant, tuned_dir=tuned_dir)
        TritonOps(options).shrink(output_tensor, inputs, a, batch, scaling, accumulate)


@custom_op(mutates="output_tensor")
def lora_expand(
    inputs: Tensor, lora_b_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor,
    *, num_active_loras: int | Tensor | None = None, offset_start: int = 0, add_inputs: bool = False,
    lora_ranks: Tensor | None = None, batch_invariant: bool = False, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """Compute ``output_tensor[t, o_i : o_i + N_i] (+)= inputs[i, t] @ B_i[slot(t)]^T`` for every slice i, in place.

    Args:
        inputs: [n, T, r], float32 or the dtype of B, any strides.
        lora_b_weights: n x [L, (1,) N_i, r], contiguous (or with the last two dimensions swapped).
        output_tensor: [T, W] with last stride 1; ``o_0 = offset_start``, ``o_{i+1} = o_i + N_i``.
        offset_start: first column written.
        add_inputs: add to the columns, else overwrite them.

    The other arguments and the errors are those of `lora_shrink`. Rows at slot -1 and all other columns are never
    written.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    if not batch.no_lora:
        b, options = Stack.of_b(lora_b_weights, lora_ranks, names=FLAT), Options(batch_invariant, tuned_dir=tuned_dir)
        TritonOps(options).expand(output_tensor, inputs, b, batch, offset_start, add_inputs)


@custom_op(mutates="output_tensor")
def lora_linear(
    output_tensor: Tensor, inputs: Tensor, lora_a_weights: Sequence[Tensor], lora_b_weights: Sequence[Tensor],
    token_lora_mapping: Tensor, token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor, lora_ids: Tensor, no_lora_flag_cpu: Tensor,
    scaling: float,
    *, num_active_loras: int | Tensor | None = None, add_inputs: bool = True, lora_ranks: Tensor | None = None,
    lora_a_scale: Sequence[Tensor] | None = None, lora_b_scale: Sequence[Tensor] | None = None,
    a_scale: Tensor | None = None, schemes: Sequence[int] | None = None,
    batch_invariant: bool = False, pdl: bool = True, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """Compute ``output_tensor[t] (+)= scaling * (inputs[t] @ A[slot(t)]^T) @ B[slot(t)]^T``, slice by slice, in place.

    Args:
        output_tensor: [T, W] with last stride 1.
        inputs: [T, K], any strides.
        lora_a_weights, lora_b_weights: n x [L, (1,) r, K] and n x [L, (1,) N_i, r].
        lora_a_scale, lora_b_scale: of FP8 weights, as ``b_scale`` of `lora_shrink_fp8` and `lora_expand_fp8`.
        a_scale: of FP8 inputs (w8a8), as there.
        schemes: the fields of both `punica.ops.fp8_checks.Scheme`, ``(group_k, group_n, use_fp8_w8a8,
            per_channel_quant)`` of A and then of B (None: one scale per slot, where there are scales).
        pdl: let the kernels start early where the GPU can; ``False`` starts them one after the other.

    The other arguments, the treatment of rows at slot -1 and the errors are those of `lora_shrink` and `lora_expand`.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    if not batch.no_lora:
        scales, both = (lora_a_scale, lora_b_scale), _schemes(schemes)
        weights = LoRAWeights.of(lora_a_weights, lora_b_weights, lora_ranks, scales, both, FLAT)
        ops = TritonOps(Options(batch_invariant, pdl, tuned_dir))
        ops.linear(output_tensor, inputs, weights, batch, scaling, add_inputs, a_scale)


def _schemes(fields: Sequence[int] | None) -> tuple[Scheme, Scheme]:
    """Return the schemes of A and B; ValueError for another number of fields."""
    if fields is None:
        return PLAIN, PLAIN
    if len(fields) != 2 * len(PLAIN):
        raise ValueError(f"schemes has {len(fields)} entries; expected the fields of two Schemes, {2 * len(PLAIN)}")
    shrink, expand = (Scheme(k, n, bool(w8a8), bool(channel)) for k, n, w8a8, channel in (fields[:4], fields[4:]))
    return shrink, expand
