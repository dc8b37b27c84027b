"""The six operators named after the paper's, on top of two products that a module supplies.

``bgmv_*`` take one slot per row, ``sgmv_*`` one slot per segment of consecutive rows. `punica.ops.reference` and
`punica.ops.torch_ops` both offer them, with the same arguments, meaning and errors.
"""

from collections.abc import Callable

from torch import Tensor

from punica.ops.checks import check_bgmv, check_slice, segment_slots

Shrink = Callable[[Tensor, Tensor, Tensor, Tensor, float], None]
"""``shrink(inputs [T, K], weights [L, r, K], lanes [T, r], slots, scaling)``, all arguments checked."""
Expand = Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
"""``expand(inputs [T, r], weights [L, N, r], columns [T, N], slots, add_inputs)``, all arguments checked."""


class PaperOps:
    """The operators as methods. All write in place, return None, and are left undone by an exception.

    TypeError: a dtype is not floating (indices: not integer), or inputs and weights differ. ValueError: shapes, devices
    or slots do not fit, segments do not cover exactly ``token_nums`` rows, or ``scaling`` is not finite.
    """

    def __init__(self, shrink: Shrink, expand: Expand) -> None:
        self._shrink, self._expand = shrink, expand

    def bgmv_shrink(
        self,
        inputs: Tensor,
        lora_a_weights: Tensor,
        output_tensor: Tensor,
        lora_indices_tensor: Tensor,
        scaling: float = 1.0,
    ) -> None:
        """Compute ``out[t, :r] = scaling * x[t] @ A[l_t]^T``; rows at -1 become 0.

        Args:
            inputs: ``[T, K]`` floating.
            lora_a_weights: ``[L, r, K]`` or ``[L, 1, r, K]``, dtype of ``inputs``.
            output_tensor: ``[T, >= r]``; only columns ``:r`` are written.
            lora_indices_tensor: integer ``[T]``; rows beyond a shorter vector are padding (slot -1).
            scaling: finite factor.
        """
        weights = check_bgmv(
            inputs, lora_a_weights, output_tensor, lora_indices_tensor, "lora_a_weights", shrink=True, scaling=scaling
        )
        self._shrink(inputs, weights, output_tensor[:, : weights.shape[1]], lora_indices_tensor, scaling)

    def bgmv_expand(
        self,
        inputs: Tensor,
        lora_b_weights: Tensor,
        output_tensor: Tensor,
        lora_indices_tensor: Tensor,
        add_inputs: bool = True,
    ) -> None:
        """Compute ``out[t, :c] (+)= x[t] @ B[l_t]^T`` with ``c = min(N, out.shape[1])``; rows at -1 are not written.

        Args:
            inputs: ``[T, r]``, float32 or the dtype of the weights.
            lora_b_weights: ``[L, N, r]`` or ``[L, 1, N, r]``.
            output_tensor: ``[T, W]``.
            lora_indices_tensor: integer ``[T]``, as in `bgmv_shrink`.
            add_inputs: add to the output (True) or overwrite the columns (False).
        """
        weights = check_bgmv(inputs, lora_b_weights, output_tensor, lora_indices_tensor, "lora_b_weights", shrink=False)
        columns = min(weights.shape[1], output_tensor.shape[1])
        self._expand(inputs, weights[:, :columns], output_tensor[:, :columns], lora_indices_tensor, add_inputs)

    def bgmv_expand_slice(
        self,
        inputs: Tensor,
        lora_b_weights: Tensor,
        output_tensor: Tensor,
        lora_indices_tensor: Tensor,
        slice_offset: int,
        slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        """Run `bgmv_expand` into columns ``[slice_offset, slice_offset + slice_size)``; ``slice_size`` must equal N.

        ValueError also when the slice does not fit the output or the weights.
        """
        weights = check_bgmv(inputs, lora_b_weights, output_tensor, lora_indices_tensor, "lora_b_weights", shrink=False)
        check_slice(weights, output_tensor, slice_offset, slice_size)
        columns = output_tensor[:, slice_offset : slice_offset + slice_size]
        self._expand(inputs, weights, columns, lora_indices_tensor, add_inputs)

    def sgmv_shrink(
        self, inputs: Tensor, lora_a_weights: Tensor, output_tensor: Tensor, b_seq_start_loc: Tensor,
        seq_len_tensor: Tensor, lora_indices_tensor: Tensor,
        batches: int, max_seq_length: int, token_nums: int, scaling: float,
    ) -> None:  # fmt: skip
        """Run `bgmv_shrink` with slots given per segment (the outputs of `punica.metadata.compute_meta`).

        Segment b covers rows ``[b_seq_start_loc[b], b_seq_start_loc[b] + seq_len_tensor[b])`` and uses slot
        ``lora_indices_tensor[b]``. The ``batches`` segments cover the first ``token_nums`` rows; later rows have slot
        -1. ``max_seq_length`` is the longest segment; torch needs it for nothing, kernels with a grid do.
        """
        slots = segment_slots(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
        self.bgmv_shrink(inputs, lora_a_weights, output_tensor, slots, scaling)

    def sgmv_expand(
        self, inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, b_seq_start_loc: Tensor,
        seq_len_tensor: Tensor, lora_indices_tensor: Tensor,
        batches: int, max_seq_length: int, token_nums: int,
        add_inputs: bool = False,
    ) -> None:  # fmt: skip
        """Run `bgmv_expand` with slots given per segment, as in `sgmv_shrink`."""
        slots = segment_slots(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
        self.bgmv_expand(inputs, lora_b_weights, output_tensor, slots, add_inputs)

    def sgmv_expand_slice(
        self, inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, b_seq_start_loc: Tensor,
        seq_len_tensor: Tensor, lora_indices_tensor: Tensor,
        batches: int, max_seq_length: int, token_nums: int, slice_offset: int, slice_size: int,
        add_inputs: bool = False,
    ) -> None:  # fmt: skip
        """Run `bgmv_expand_slice` with slots given per segment, as in `sgmv_shrink`."""
        slots = segment_slots(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
        self.bgmv_expand_slice(inputs, lora_b_weights, output_tensor, slots, slice_offset, slice_size, add_inputs)
