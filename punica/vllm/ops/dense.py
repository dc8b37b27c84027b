"""`lora_shrink`, `lora_expand` and `lora_linear` with the step (`TensorBatch`) and the weights given by their tensors.

Ops that end in ``_fp8`` take weights in FP8 and their scales:

    out[i, t, c] = scaling * a(t) * b_i[l, c] * sum_k x[t, k] * A_i[l, c, k]       l = slot(t), A_i [L, r, K] float8

and the other modes of `punica.ops.scales`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.checks import as_int
from punica.metadata import StepShape
from punica.ops.expect import INT32, expect
from punica.ops.scales import PLAIN, Scheme
from punica.ops.triton_ops.configs import Options
from punica.ops.triton_ops.step_ops import TritonOps
from punica.ops.weights import FLAT, Stack
from punica.vllm.ops.signature import STEP, Given, flat_op
from punica.vllm.weights import known_stack, known_weights

*NAMES, _FLAG = STEP.split(", ")
_FP8 = FLAT._replace(a_scale="b_scale", b_scale="b_scale")
_SCHEME = "group_k=0, group_n=0, use_fp8_w8a8=False, per_channel_quant=False"
_OPTIONS = "lora_ranks=None, batch_invariant=False, tuned_dir=None"


@flat_op(
    f"inputs, lora_a_weights, output_tensor, {STEP}, scaling, *, num_active_loras=None, accumulate=False, {_OPTIONS}",
    writes="output_tensor",
)
def lora_shrink(given: Given) -> None:
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
    _product(given, "shrink", "lora_a_weights", "scaling", "accumulate")


@flat_op(
    f"inputs, lora_a_weights, output_tensor, {STEP}, num_active_loras, scaling, b_scale, a_scale=None, {_SCHEME}, *, "
    f"accumulate=False, {_OPTIONS}",
    writes="output_tensor",
)
def lora_shrink_fp8(given: Given) -> None:
    """Run `lora_shrink` with A in FP8. Arguments and errors as there, and:

    Args:
        inputs: any float, or (``use_fp8_w8a8``) float8 with ``a_scale``.
        lora_a_weights: all float8_e4m3fn or all float8_e5m2. Without ``b_scale`` weights of `lora_shrink`.
        b_scale: n float32 tensors [L] (per tensor), [L, r] (``per_channel_quant``) or [L, ceil(r/group_n),
            ceil(K/group_k)] (block-wise); a 1 may follow L; any strides.
        a_scale: float32, one element, [T], [T, 1], or block-wise [T, ceil(K/group_k)].
        group_k, group_n: block sizes; group_k a power of two >= 16, or at least K.
    """
    _product(given, "shrink", "lora_a_weights", "scaling", "accumulate")


@flat_op(
    f"inputs, lora_b_weights, output_tensor, {STEP}, *, num_active_loras=None, offset_start=0, add_inputs=False, "
    f"{_OPTIONS}",
    writes="output_tensor",
)
def lora_expand(given: Given) -> None:
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
    _product(given, "expand", "lora_b_weights", "offset_start", "add_inputs")


@flat_op(
    f"inputs, lora_b_weights, output_tensor, {STEP}, num_active_loras, b_scale, a_scale=None, offset_start=0, "
    f"add_inputs=False, {_SCHEME}, *, {_OPTIONS}",
    writes="output_tensor",
)
def lora_expand_fp8(given: Given) -> None:
    """Run `lora_expand` with B in FP8. Arguments and errors as there and of `lora_shrink_fp8`, and:

    Args:
        b_scale: n float32 tensors [L] (per tensor), [L, N_i] (``per_channel_quant``) or [L, ceil(N_i/group_n),
            ceil(r/group_k)] (block-wise); a 1 may follow L; any strides.
        a_scale: K is the rank; all slices of a row share its scales.
    """
    _product(given, "expand", "lora_b_weights", "offset_start", "add_inputs")


@flat_op(
    f"output_tensor, inputs, lora_a_weights, lora_b_weights, {STEP}, scaling, *, num_active_loras=None, "
    "add_inputs=True, lora_ranks=None, lora_a_scale=None, lora_b_scale=None, a_scale=None, schemes=None, "
    "batch_invariant=False, pdl=True, tuned_dir=None",
    writes="output_tensor",
)
def lora_linear(given: Given) -> None:
    """Compute ``output_tensor[t] (+)= scaling * (inputs[t] @ A[slot(t)]^T) @ B[slot(t)]^T``, slice by slice, in place.

    Args:
        output_tensor: [T, W] with last stride 1.
        inputs: [T, K], any strides.
        lora_a_weights, lora_b_weights: n x [L, (1,) r, K] and n x [L, (1,) N_i, r].
        lora_a_scale, lora_b_scale: of FP8 weights, as ``b_scale`` of `lora_shrink_fp8` and `lora_expand_fp8`.
        a_scale: of FP8 inputs (w8a8), as there.
        schemes: the fields of both `punica.ops.scales.Scheme`, ``(group_k, group_n, use_fp8_w8a8,
            per_channel_quant)`` of A and then of B (None: one scale per slot, where there are scales).
        pdl: let the kernels start early where the GPU can; ``False`` starts them one after the other.

    The other arguments, the treatment of rows at slot -1 and the errors are those of `lora_shrink` and `lora_expand`.
    """
    batch = _step(given)
    if batch.no_lora:
        return
    lora_a, lora_b, ranks = given["lora_a_weights"], given["lora_b_weights"], given["lora_ranks"]
    scales = given["lora_a_scale"], given["lora_b_scale"]
    weights = known_weights(lora_a, lora_b, ranks, scales, _schemes(given["schemes"]), FLAT)
    ops = TritonOps(Options(given["batch_invariant"], given["pdl"], given["tuned_dir"]))
    output, inputs, add = given["output_tensor"], given["inputs"], given["add_inputs"]
    ops.linear(output, inputs, weights, batch, given["scaling"], add, given["a_scale"])


class TensorBatch(NamedTuple):
    """A step given by its tensors, a `punica.ops.triton_ops.plan.Batch`; ``shape`` with the rows spread evenly."""

    tensors: tuple[Tensor, ...]
    max_segments: int
    no_lora: bool
    form: tuple
    shape: StepShape
    listed: bool = False  # there are no lists of tiles (`punica.metadata.rows`)

    @classmethod
    def given(cls, *tensors: Tensor, flag: Tensor, count: int | Tensor | None) -> "TensorBatch":
        """Build a step from five tensors, the no-adapter flag (set: nothing else is looked at) and the active count
        (None: all entries of the ids). `check_tensors` checks the tensors, once per ``form``.
        """
        if not isinstance(flag, Tensor) or flag.numel() != 1 or flag.dtype != torch.bool or flag.device.type != "cpu":
            what = f"{flag.dtype} {tuple(flag.shape)} on {flag.device}" if isinstance(flag, Tensor) else repr(flag)
            raise ValueError(f"{_FLAG} must be a bool tensor with one element on the CPU, got {what}")
        if bool(flag):
            return cls(tensors, 0, True, (), StepShape(0, 0))
        entries = tensors[4].numel()
        form = tuple([(t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors])
        active = entries if count is None else _active(count, entries)
        return cls(tensors, active, False, form, StepShape.even(active, tensors[0].numel()))

    def tiles(self, height: int) -> tuple[Any, ...]:
        """Raise RuntimeError: tensors come without lists."""
        raise RuntimeError("a step given by its tensors has no lists of tiles")

    def check_rows(self, rows: int, slots: int = 1 << 62) -> None:
        """Check nothing: the lengths of the tensors are part of their form, and slots are on the device."""

    def check_tensors(self, rows: int, device: torch.device) -> None:
        """Check dtype, device, strides and lengths, which ``rows`` and the number of counts ask for."""
        entries = self.tensors[2].numel()
        lengths = (rows, rows, entries, entries + 1, entries)
        for name, tensor, length in zip(NAMES, self.tensors, lengths, strict=True):
            expect(name, tensor, "M", dtype=INT32, device=device, sizes={"M": length}, contiguous=True)


def _active(count: Any, entries: int) -> int:
    if isinstance(count, Tensor) and count.device.type != "cpu":
        raise ValueError(f"num_active_loras is on {count.device}: its value is needed here, keep it on the CPU")
    number = as_int("num_active_loras", count)
    if not 0 <= number <= entries:
        raise ValueError(f"num_active_loras is {number}; it must be in [0, {entries}], the entries of lora_ids")
    return number


def _product(given: Given, name: str, weights: str, *options: str) -> None:
    """Run shrink or expand with those of the arguments that only it has."""
    batch = _step(given)
    if not batch.no_lora:
        ops = TritonOps(Options(given["batch_invariant"], tuned_dir=given["tuned_dir"]))
        own, stack = [given[option] for option in options], _stack(given, weights)
        getattr(ops, name)(given["output_tensor"], given["inputs"], stack, batch, *own, given.get("a_scale"))


def _step(given: Given) -> TensorBatch:
    tensors = [given[name] for name in NAMES]
    return TensorBatch.given(*tensors, flag=given[_FLAG], count=given["num_active_loras"])


def _stack(given: Given, name: str) -> Stack:
    scheme, names, rank_dim = PLAIN, FLAT, -2 if name == "lora_a_weights" else -1
    if "group_k" in given:
        scheme, names = Scheme._make([given[field] for field in Scheme._fields]), _FP8
    return known_stack(given[name], rank_dim, given["lora_ranks"], given.get("b_scale"), scheme, names)


def _schemes(fields: Sequence[int] | None) -> tuple[Scheme, Scheme]:
    if fields is None:
        return PLAIN, PLAIN
    if len(fields) != 2 * len(PLAIN):
        raise ValueError(f"schemes has {len(fields)} entries; expected the fields of two Schemes, {2 * len(PLAIN)}")
    shrink, expand = (Scheme(k, n, bool(w8a8), bool(channel)) for k, n, w8a8, channel in (fields[:4], fields[4:]))
    return shrink, expand
