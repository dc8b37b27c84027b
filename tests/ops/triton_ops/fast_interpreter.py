"""Triton's interpreter without work that has no result: the same operations in about half the time.

Each value of an interpreted kernel gets a block type and a shape of constexprs, new every time though only few differ.
Each sum of integers is computed a second time, in 64 bits, for an assertion that is only made with ``debug``.
Each operation of two values of one type is asked which type they become, and each call passes two wrappers.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_original_np_dtype = interpreter._get_np_dtype
_original_block_type = core.block_type.__init__
_original_broadcast = TritonSemantic.broadcast_impl_value
_original_operands = TritonSemantic.binary_op_type_checking_impl
_np_dtypes: dict[str, np.dtype] = {}
_block_types: dict[tuple, dict[str, Any]] = {}
_patched: set[str] = set()


def _np_dtype(of: tl.dtype) -> np.dtype:
    name = of.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _original_np_dtype(of)
    return _np_dtypes[name]


def _init_block_type(self: core.block_type, element_ty: tl.dtype, shape: Any) -> None:
    sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
    key = element_ty.name, sizes
    if key not in _block_types:
        _original_block_type(self, element_ty, shape)
        _block_types[key] = {name: getattr(self, name) for name in ("shape", "numel", "name")}
        _block_types[key]["of_tensors"] = _of_tensors(sizes)
    self.element_ty = element_ty
    self.__dict__.update(_block_types[key])


@cache
def _of_tensors(sizes: tuple[int, ...]) -> tuple[core.constexpr, core.tuple]:
    """Return ``numel`` and ``shape`` of tensors, the same objects for the same sizes."""
    return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])


_OF_SCALARS = _of_tensors(())


def _init_tensor(self: core.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_tensors if type.is_block() else _OF_SCALARS


def _broadcast(self: TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return _original_broadcast(self, lhs, rhs)


_SIGNED = "int32", "int64"


def _operands(
    self: TritonSemantic, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True, div_or_mod: bool = False,
) -> tuple[core.tensor, core.tensor]:  # fmt: skip
    """Two tensors of one type, pointers and offsets, signed tensors and small integers keep their types."""
    if type(lhs) is core.tensor and not div_or_mod:
        kind = lhs.dtype
        if type(rhs) is core.tensor:
            if allow_lhs_ptr and rhs.dtype.name in _SIGNED if kind.is_ptr() else rhs.dtype.name == kind.name:
                return _broadcast(self, lhs, rhs)
        elif type(rhs) is int and kind.name in _SIGNED and arithmetic_check and abs(rhs) < 1 << 31:
            return _broadcast(self, lhs, self.scalar_constant(rhs, kind))
    return _original_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Call what is inside of the wrapper that asks for ``_semantic``, with it."""
    inner = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Patch the language once per module, not at every call."""
    if function.fn.__module__ not in _patched:
        _patched.add(function.fn.__module__)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


def install() -> None:
    """Replace the interpreter's slow parts, for the whole process."""
    interpreter._get_np_dtype = _np_dtype
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _operands
    interpreter._patch_attr = _patch_attr
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = _call_device_function
