"""`TritonOps`: shrink, expand and linear on a step.

A call looks up its plan in the weights, by the form of the operands and the step, and launches it. A plan that is not
there is made after all checks, so that an error leaves nothing behind. Under a graph tracer a call is one node: the
flat op of the same name (`punica.vllm.ops`).
"""

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from punica.metadata import LoRABatch, MixedBatch
from punica.ops import interface, triton_ops
from punica.ops.expect import FLOATS, WITH_DOUBLE, check_scale, expect
from punica.ops.interface import ALONE, Beside
from punica.ops.quant import WITH_FP8
from punica.ops.scales import ACTIVATIONS, check_activation
from punica.ops.triton_ops.backbone.skinny_gemm import skinny_gemm
from punica.ops.triton_ops.configs import Options, choose
from punica.ops.triton_ops.fp8_device import as_operand, check_group_k
from punica.ops.triton_ops.launch import on_device, supports_pdl
from punica.ops.triton_ops.lora_expand import ExpandMode, LowRank, plan_expand
from punica.ops.triton_ops.lora_linear import (
    LinearMode,
    LinearPlan,
    check_base,
    check_base_switches,
    choose_linear,
    describe_base,
)
from punica.ops.triton_ops.lora_outer import outer_products
from punica.ops.triton_ops.lora_shrink import ShrinkMode, plan_shrink
from punica.ops.triton_ops.mixture import plan_mix
from punica.ops.triton_ops.op import check_runnable
from punica.ops.triton_ops.plan import Batch, KernelPlan, operands_of
from punica.ops.triton_ops.quantize_rows import quantized_rows
from punica.ops.triton_ops.schedules import Problem
from punica.ops.weights import FLAT, STEP, LoRAWeights, Names, Stack, check_stored, is_traced, kept


class TritonOps:
    """The operations of `punica.ops.interface.Ops`, arguments and errors as there; ``options`` choose the kernels."""

    contiguous_shrinks = True

    def __init__(self, options: Options = Options()) -> None:
        self.options = options

    def shrink(
        self, y: Tensor, x: Tensor, a: Stack, batch: Batch, scale: float = 1.0,
        accumulate: bool = False, x_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Shrink hidden size to rank; y is contiguous."""
        if batch.no_lora:
            if isinstance(batch, LoRABatch) and not accumulate:
                y.zero_()  # with the flag of the flat form set, nothing is written
            return
        if isinstance(batch, LoRABatch) and is_traced():
            given = {"scaling": scale, "accumulate": accumulate}
            self._trace("lora_shrink", (x, a.tensors, y), batch, a, x_scale, given)
            return
        key = ("shrink", *_call(x, y, batch, a, scale), accumulate, _form_of(x_scale), self.options)
        plan = a.plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            plan = kept(a.plans, key, self._plan_shrink(y, x, a, batch, accumulate, x_scale))
        if plan is not None:
            aligned = _aligned(x, y, x_scale, a.low_bits)
            with on_device(x.get_device()):
                plan.run(as_operand(x), operands_of(a, x_scale), y, batch, a.ranks, aligned, float(scale))
        elif not accumulate:
            y.zero_()

    def expand(
        self, y: Tensor, x: Tensor, b: Stack, batch: Batch, offset_start: int = 0,
        add_inputs: bool = True, x_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        if batch.no_lora:
            return
        if isinstance(batch, LoRABatch) and is_traced():
            given = {"offset_start": offset_start, "add_inputs": add_inputs}
            self._trace("lora_expand", (x, b.tensors, y), batch, b, x_scale, given)
            return
        key = ("expand", *_call(x, y, batch, b), offset_start, add_inputs, _form_of(x_scale), self.options)
        plan = b.plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            plan = kept(b.plans, key, self._plan_expand(y, x, b, batch, (offset_start, add_inputs), x_scale))
        if plan is not None:
            aligned = _aligned(x, y, x_scale, b.low_bits)
            with on_device(x.get_device()):
                plan.run(as_operand(x), operands_of(b, x_scale), y, batch, b.ranks, aligned)

    def linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, batch: Batch, scale: float = 1.0,
        add_inputs: bool = True, x_scale: Tensor | None = None, beside: Beside = ALONE,
    ) -> None:  # fmt: skip
        """Run both, in two launches.

        ``beside.base`` is the product of up to 64 rows (`skinny_gemm`) with ``add_inputs``, and y is not x; the shrink
        is made beside it, or in the same launch. Under a graph tracer the product is one launch and the op another.
        """
        a, b, base = weights.a, weights.b, beside.base
        check_base_switches(base, add_inputs)
        if batch.no_lora:
            if base:
                skinny_gemm(y, x, *base)
            return
        if isinstance(batch, LoRABatch) and is_traced():
            self._trace_linear(y, x, weights, batch, scale, add_inputs, x_scale, beside)
            return
        if x_scale is not None or a.form.scheme.use_fp8_w8a8:
            self._linear_by_parts(y, x, weights, batch, scale, add_inputs, x_scale, beside)
            return
        key = (
            "linear", *_call(x, y, batch, a, scale), add_inputs, beside.aside is None, *[_form_of(one) for one in base],
            bool(base) and not base[0].data_ptr() & 15, b.low_bits & 3, self.options,
        )  # fmt: skip
        plan = weights.plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            plan = kept(weights.plans, key, self._plan_linear(y, x, weights, batch, add_inputs, beside))
        if plan is not None:
            bits = a.low_bits | b.low_bits
            for one in base:
                bits |= 0 if one is None else one.data_ptr()
            plan.run(y, x, weights, batch, _aligned(x, y, None, bits), float(scale), beside)
        elif base:
            skinny_gemm(y, x, *base)

    def _linear_by_parts(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, batch: Batch, scale: float, add_inputs: bool,
        x_scale: Tensor | None, beside: Beside,
    ) -> None:  # fmt: skip
        names, a, base = _names(batch), weights.a.form.stored, describe_base(beside.base)
        interface.check_equal_rows(names, x, y)
        if not x.shape[0]:
            return
        if base is not None:  # y is written in front of the checks of shrink and expand
            check_base(base, x, y)
            interface.check_input(names, x, a)
            interface.check_output(names, y, weights.b.form.stored, 0)
            interface.check_last_stride(names.output, y)
            _call(x, y, batch, weights.a, scale)
            skinny_gemm(y, x, *beside.base)
        with nullcontext() if beside.aside is None else beside.aside():
            low = interface.low_rank_of(self, x, weights, batch, scale, x_scale)
        interface.add_low_rank(self, y, low, weights, batch, add_inputs)

    def mix(self, y: Tensor, x: Tensor, weights: LoRAWeights, mixed: MixedBatch) -> None:
        """Run both launches of `punica.ops.triton_ops.mixture`. NotImplementedError: FP8, or under a graph tracer."""
        if is_traced():
            raise NotImplementedError("mixtures of adapters cannot be traced (torch.compile); run them eagerly")
        expect(STEP.input, x)
        expect(STEP.output, y)
        if mixed.highest >= (slots := weights.a.form.stored.slots):
            raise ValueError(f"the step uses slot {mixed.highest}; the weights have slots 0 to {slots - 1}")
        mixed.groups.check_rows(x.shape[0])
        key = ("mix", _form_of(x), _form_of(y), self.options)
        plan = weights.plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            plan = kept(weights.plans, key, plan_mix(y, x, weights, self.options.pdl))
        if plan is not None:
            plan.run(y, x, weights, mixed)

    def quantize(self, x: Tensor, group_k: int = 0) -> tuple[Tensor, Tensor]:
        return quantized_rows(x, group_k)

    def gradient(self, stack: Stack, low: Tensor, x: Tensor, batch: LoRABatch) -> tuple[Tensor, ...]:
        whole, _, gradients = stack.gradients(low, x)
        expect("x", x, dtype=FLOATS)
        batch.check_rows(x.shape[0], stack.form.stored.slots)
        batch.check_tensors(x.shape[0], x.device)
        if not batch.no_lora and whole.numel() and x.shape[0]:
            check_runnable(x.device)
            outer_products(whole, low, x, stack, batch)
        return gradients

    # plans: the remaining checks, then the launches; None where there is nothing to multiply
    def _plan_shrink(
        self, y: Tensor, x: Tensor, a: Stack, batch: Batch, accumulate: bool, x_scale: Tensor | None
    ) -> KernelPlan | None:
        names, form, stored = _names(batch), a.form, a.form.stored
        check_stored(a, names.a)
        expect(names.input, x, dtype=WITH_FP8)
        x_strides = interface.check_shrink(names, y, x, form, x_scale, FLOATS)
        check_group_k(form.scheme, stored.widths[0])
        tokens, k = x.shape
        expect(names.output, y, contiguous=True)
        batch.check_tensors(tokens, x.device)
        if 0 in (tokens, k, stored.rank, batch.max_segments):
            return None
        check_runnable(x.device)
        slices = (0,) * len(stored.widths)
        problem = Problem(batch.shape, tokens, k, slices, stored.rank, stored.dtype.itemsize, direct=True)
        schedule = choose("shrink", problem, self.options, x.device)
        return plan_shrink(x, form, batch, schedule, ShrinkMode(y.dtype, True, accumulate, x_strides=x_strides))

    def _plan_expand(
        self, y: Tensor, x: Tensor, b: Stack, batch: Batch, where: tuple[int, bool], x_scale: Tensor | None
    ) -> KernelPlan | None:
        names, form, stored, (offset_start, add_inputs) = _names(batch), b.form, b.form.stored, where
        check_stored(b, names.b)
        expect(names.input, x, dtype=WITH_FP8)
        x_strides = interface.check_expand(names, y, x, form, offset_start, x_scale, FLOATS)
        check_group_k(form.scheme, stored.rank)
        interface.check_last_stride(names.output, y)
        tokens, rank, width = y.shape[0], stored.rank, max(stored.widths)
        batch.check_tensors(tokens, x.device)
        if 0 in (tokens, rank, batch.max_segments, width):
            return None
        check_runnable(x.device)
        problem = Problem(batch.shape, tokens, 0, stored.widths, rank, stored.dtype.itemsize, stored.row_major)
        schedule = choose("expand", problem, self.options, x.device, add_inputs=add_inputs)
        mode = ExpandMode(offset_start, add_inputs, x_strides=x_strides)
        return plan_expand(LowRank.result(x), y, form, batch, schedule, mode)

    def _plan_linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, batch: Batch, add_inputs: bool, beside: Beside
    ) -> LinearPlan | None:
        names, form, b = _names(batch), weights.a.form, weights.b.form.stored
        check_stored(weights.a, names.a)
        check_stored(weights.b, names.b)
        a = form.stored
        expect(names.input, x, dtype=WITH_FP8)
        check_activation(names.input, x, None, a.widths[0], form.scheme, a)
        interface.check_input(names, x, a)
        interface.check_output(names, y, b, 0)
        interface.check_last_stride(names.output, y)
        tokens, k = x.shape
        interface.check_equal_rows(names, x, y)
        base = describe_base(beside.base)
        if base is not None:
            check_base(base, x, y)
        batch.check_tensors(tokens, x.device)
        check_group_k(form.scheme, k)
        check_group_k(weights.b.form.scheme, b.rank)
        if 0 in (tokens, k, a.rank, batch.max_segments, max(b.widths)):
            return None
        check_runnable(x.device)
        pdl, apart = self.options.pdl and supports_pdl(x.device), beside.aside is not None
        mode = LinearMode(add_inputs, pdl, apart, base, words=not weights.b.low_bits & 3)
        return choose_linear(y, x, (form, weights.b.form), batch, self.options, mode)

    def _trace(
        self, name: str, operands: tuple, batch: LoRABatch, stack: Stack, x_scale: Tensor | None, given: dict[str, Any]
    ) -> None:
        if stack.form.is_fp8 or x_scale is not None:
            name, given = f"{name}_fp8", given | stack.form.scheme._asdict()
            given |= {"b_scale": stack.scales, "a_scale": x_scale}
        given |= {"batch_invariant": self.options.batch_invariant, "tuned_dir": self.options.tuned_dir}
        _call_flat(name, operands, batch, operands[0].shape[-2], given | {"lora_ranks": stack.ranks})

    def _trace_linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, batch: LoRABatch, scale: float, add_inputs: bool,
        x_scale: Tensor | None, beside: Beside,
    ) -> None:  # fmt: skip
        a, b = weights.a, weights.b
        given: dict[str, Any] = {"scaling": scale, "add_inputs": add_inputs, "lora_ranks": a.ranks, "a_scale": x_scale}
        given |= {"lora_a_scale": a.scales, "lora_b_scale": b.scales}
        given["schemes"] = [int(field) for field in (*a.form.scheme, *b.form.scheme)]
        if beside.base:
            skinny_gemm(y, x, *beside.base)
        _call_flat("lora_linear", (y, x, a.tensors, b.tensors), batch, x.shape[0], given | self.options._asdict())


_UNKNOWN: Any = object()


def _call(x: Tensor, y: Tensor, batch: Batch, stack: Stack, scale: float = 1.0) -> tuple:
    """Return the forms of the operands and the step, which decide the plan; rows, slots and scale are checked."""
    names = _names(batch)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        expect(names.input, x, dtype=ACTIVATIONS)
        expect(names.output, y, dtype=WITH_DOUBLE)
    batch.check_rows(x.shape[-2] if x.ndim > 1 else 0, stack.form.stored.slots)
    check_scale(names.scale, scale)
    return (
        x.shape, x.stride(), x.dtype, x.get_device(), y.shape, y.stride(), y.dtype, y.get_device(),
        batch.shape, batch.max_segments, batch.form,
    )  # fmt: skip


def _form_of(tensor: Tensor | None) -> tuple | None:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())


def _aligned(x: Tensor, y: Tensor, x_scale: Tensor | None, bits: int) -> bool:
    bits |= x.data_ptr() | y.data_ptr() | (0 if x_scale is None else x_scale.data_ptr())
    return not bits & 15


def _names(batch: Batch) -> Names:
    return STEP if isinstance(batch, LoRABatch) else FLAT


def _call_flat(name: str, operands: tuple, batch: LoRABatch, rows: int, given: dict[str, Any]) -> None:
    batch.check_rows(rows)
    *tensors, count = batch.meta_args(rows)
    getattr(triton_ops, name)(*operands, *tensors, num_active_loras=count, **given)
