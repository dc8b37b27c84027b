"""The six operators named after the paper's, on top of two products that a module supplies.

``bgmv_*`` take one slot per row, ``sgmv_*`` one slot per segment of consecutive rows. `punica.ops.reference` and
`punica.ops.torch_ops` both offer them, with the same arguments, meaning and errors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from punica.ops.expect import WITH_DOUBLE, Sizes, check_columns, check_scale, expect
from punica.ops.weights import weights_3d

Shrink = Callable[[Tensor, Tensor, Tensor, Tensor, float], None]
"""``shrink(inputs [T, K], weights [L, r, K], lanes [T, r], slots, scaling)``, all arguments checked."""
Expand = Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
"""``expand(inputs [T, r], weights [L, N, r], columns [T, N], slots, add_inputs)``, all arguments checked."""
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class PaperOps:
    """The operators as methods. All write in place, return None, and are left undone by an exception.

    TypeError: a dtype is not floating (indices: not integer), or inputs and weights differ. ValueError: shapes, devices
    or slots do not fit, segments do not cover exactly ``token_nums`` rows, or ``scaling`` is not finite.
    """

    def __init__(self, shrink: Shrink, expand: Expand) -> None:
        self._shrink, self._expand = shrink, expand

    def bgmv_shrink(
        self, inputs: Tensor, lora_a_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor,
        scaling: float = 1.0,
    ) -> None:  # fmt: skip
        """Compute ``out[t, :r] = scaling * x[t] @ A[l_t]^T``; rows at -1 become 0.

        Args:
            inputs: ``[T, K]`` floating.
            lora_a_weights: ``[L, r, K]`` or ``[L, 1, r, K]``, dtype of ``inputs``.
            output_tensor: ``[T, >= r]``; only columns ``:r`` are written.
            lora_indices_tensor: integer ``[T]``; rows beyond a shorter vector are padding (slot -1).
            scaling: finite factor.
        """
        check_scale("scaling", scaling)
        sizes: Sizes = {}
        expect("lora_a_weights", lora_a_weights, "L (1) r K", dtype=WITH_DOUBLE, sizes=sizes)
        _check_rows(inputs, "T K", lora_a_weights, (), output_tensor, lora_indices_tensor, sizes)
        columns, rank = output_tensor.shape[1], lora_a_weights.shape[-2]
        if columns < rank:
            raise ValueError(f"output_tensor has {columns} columns; the rank of lora_a_weights is {rank}")
        weights, lanes = weights_3d(lora_a_weights), output_tensor[:, :rank]
        self._shrink(inputs, weights, lanes, lora_indices_tensor, scaling)

    def bgmv_expand(
        self, inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor,
        add_inputs: bool = True,
    ) -> None:  # fmt: skip
        """Compute ``out[t, :c] (+)= x[t] @ B[l_t]^T`` with ``c = min(N, out.shape[1])``; rows at -1 are not written.

        Args:
            inputs: ``[T, r]``, float32 or the dtype of the weights.
            lora_b_weights: ``[L, N, r]`` or ``[L, 1, N, r]``.
            output_tensor: ``[T, W]``.
            lora_indices_tensor: integer ``[T]``, as in `bgmv_shrink`.
            add_inputs: add to the output (True) or overwrite the columns (False).
        """
        weights = _check_expand(inputs, lora_b_weights, output_tensor, lora_indices_tensor)
        columns = min(weights.shape[1], output_tensor.shape[1])
        self._expand(inputs, weights[:, :columns], output_tensor[:, :columns], lora_indices_tensor, add_inputs)

    def bgmv_expand_slice(
        self, inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor,
        slice_offset: int, slice_size: int, add_inputs: bool = True,
    ) -> None:  # fmt: skip
        """Run `bgmv_expand` into columns ``[slice_offset, slice_offset + slice_size)``; ``slice_size`` must equal N.
        ValueError also when the slice does not fit the output or the weights.
        """
        weights = _check_expand(inputs, lora_b_weights, output_tensor, lora_indices_tensor)
        if slice_size != weights.shape[1]:
            raise ValueError(f"slice_size is {slice_size}, lora_b_weights' output size {weights.shape[1]}; not equal")
        check_columns("output_tensor", output_tensor, "slice_offset", slice_offset, (slice_size,))
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
        slots = _slots_of_rows(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
        self.bgmv_shrink(inputs, lora_a_weights, output_tensor, slots, scaling)

    def sgmv_expand(
        self, inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, b_seq_start_loc: Tensor,
        seq_len_tensor: Tensor, lora_indices_tensor: Tensor,
        batches: int, max_seq_length: int, token_nums: int,
        add_inputs: bool = False,
    ) -> None:  # fmt: skip
        """Run `bgmv_expand` with slots given per segment, as in `sgmv_shrink`."""
        slots = _slots_of_rows(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
        self.bgmv_expand(inputs, lora_b_weights, output_tensor, slots, add_inputs)

    def sgmv_expand_slice(
        self, inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, b_seq_start_loc: Tensor,
        seq_len_tensor: Tensor, lora_indices_tensor: Tensor,
        batches: int, max_seq_length: int, token_nums: int, slice_offset: int, slice_size: int,
        add_inputs: bool = False,
    ) -> None:  # fmt: skip
        """Run `bgmv_expand_slice` with slots given per segment, as in `sgmv_shrink`."""
        slots = _slots_of_rows(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
        self.bgmv_expand_slice(inputs, lora_b_weights, output_tensor, slots, slice_offset, slice_size, add_inputs)


def _check_expand(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor) -> Tensor:
    sizes: Sizes = {}
    expect("lora_b_weights", weights, "L (1) N r", dtype=WITH_DOUBLE, sizes=sizes)
    _check_rows(inputs, "T r", weights, (torch.float32,), output, slots, sizes)
    return weights_3d(weights)


def _check_rows(
    inputs: Tensor, dims: str, weights: Tensor, also: tuple[torch.dtype, ...], output: Tensor, slots: Tensor,
    sizes: Sizes,
) -> None:  # fmt: skip
    """Check inputs (``also``: their dtypes), output and slots, one per row; rows beyond ``slots`` are padding. One slot
    for several rows could only be a hoped-for broadcast.
    """
    expect("inputs", inputs, dims, dtype=WITH_DOUBLE, device=weights.device, sizes=sizes)
    expect("output_tensor", output, "T *", dtype=WITH_DOUBLE, device=weights.device, sizes=sizes)
    # float64 anywhere selects float64 arithmetic; the input of an expand may be the float32 result of a shrink
    if inputs.dtype != weights.dtype and torch.float64 not in (inputs.dtype, weights.dtype):
        expect("inputs", inputs, dtype=(weights.dtype, *also))
    expect("lora_indices_tensor", slots, "*", dtype=_INTEGERS)
    rows, entries = inputs.shape[0], slots.shape[0]
    if entries > rows or (entries == 1 and rows > 1):
        raise ValueError(f"lora_indices_tensor has {entries} entries for {rows} rows; expected one slot per row")


def _slots_of_rows(
    inputs: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, batches: int, token_nums: int
) -> Tensor:
    """Return per-row slots ``[T]`` of segments: slot b ``lengths[b]`` times, -1 for rows from ``token_nums`` on."""
    expect("inputs", inputs, "T *")
    for name, tensor in (("b_seq_start_loc", starts), ("seq_len_tensor", lengths), ("lora_indices_tensor", slots)):
        expect(name, tensor, "*", dtype=_INTEGERS)
        if tensor.shape[0] < batches:
            raise ValueError(f"{name} has {tensor.shape[0]} entries for {batches} segments")
    rows = inputs.shape[0]
    if not 0 <= token_nums <= rows:
        raise ValueError(f"token_nums is {token_nums}; inputs has {rows} rows")
    if any(tensor.is_meta for tensor in (starts, lengths, slots)):
        return torch.empty(rows, dtype=slots.dtype, device="meta")
    lengths, starts = lengths[:batches].long(), starts[:batches].long()  # no sum or start wraps
    if (covered := int(lengths.sum())) != token_nums or (lengths < 0).any():
        raise ValueError(f"seq_len_tensor has sum {covered}; expected lengths >= 0, of sum token_nums, {token_nums}")
    if not torch.equal(starts.to(lengths.device), torch.cumsum(lengths, 0) - lengths):
        raise ValueError(f"b_seq_start_loc is {starts.tolist()}; expected the running sum of seq_len_tensor from 0")
    per_row = slots.new_full((rows,), -1)
    per_row[:token_nums] = torch.repeat_interleave(slots[:batches], lengths)
    return per_row
