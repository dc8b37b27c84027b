"""`flat_op`: an op of ``torch.ops.punica`` from its parameters.

A parameter has one type in all ops (`TYPES`), so an op names its parameters and their defaults alone. From these come a
Python function with that signature and the schema of the registered op, which is one node for a graph tracer.
"""

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from punica.ops.weights import is_traced

_LIBRARY = Library("punica", "FRAGMENT")
Given = dict[str, Any]
"""Arguments of a call, by name."""

STEP = (
    "token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids, "
    "no_lora_flag_cpu"
)
"""The first six of `punica.metadata.LoRAKernelMeta.meta_args`."""
TYPES = {
    "int": "max_lora_rank top_k_num block_size_m block_size_n block_size_k group_size_m num_warps num_stages split_k "
    "offset offset_start group_k group_n",
    "bool": "accumulate add_inputs batch_invariant pdl mul_routed_weight fully_sharded use_fp8_w8a8 per_channel_quant",
    "float": "scaling",
    "str?": "tuned_dir",
    "int[]?": "schemes block_shape",
    "Tensor[]": "lora_a_weights lora_b_weights lora_a_stacked lora_b_stacked",
    "Tensor[]?": "b_scale lora_a_scale lora_b_scale lora_a_scale_stacked lora_b_scale_stacked",
    "Tensor?": "sorted_token_ids num_tokens_post_padded lora_ranks a_scale act_scale shrink_act_scale expand_act_scale",
    "int|Tensor?": "num_active_loras",
}
"""Type -> names of parameters; all others are tensors."""
_TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}


def flat_op(parameters: str, writes: str) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Make an op of a function of its arguments; it writes the parameter ``writes``.

    Called by its own name it runs as a plain function (torch's dispatcher costs as much as a launch), except where
    `is_traced`. No schema type is ``int | Tensor | None``: such a parameter is two in the schema, so that a tensor
    stays data for tracers. Nor is ``Tensor[] | None``: None becomes an empty list.
    """

    def make(body: Callable[[Given], None]) -> Callable[..., None]:
        name = body.__name__
        given = ast.parse(f"def f({parameters}): ...").body[0].args  # type: ignore[attr-defined]
        schema, passed, numbers = [], [], []
        positional = [None] * (len(given.args) - len(given.defaults)) + given.defaults
        for one, default in zip(given.args + given.kwonlyargs, positional + given.kw_defaults, strict=True):
            parameter, kind = one.arg, _type_of(one.arg)
            if one in given.kwonlyargs[:1]:
                schema.append("*")
            if kind == "int|Tensor?":
                numbers.append(f"SymInt? {parameter}_number=None")
                passed.append(f"{parameter}_number={parameter} if isinstance({parameter}, int) else None")
                passed.append(f"{parameter}=None if isinstance({parameter}, int) else {parameter}")
                kind = "Tensor?"
            else:
                passed.append(f"{parameter}={parameter}" + (" or []" if kind == "Tensor[]?" else ""))
            if kind == "Tensor[]?":
                kind, default = "Tensor[]", None
            kind = "Tensor(a!)" if parameter == writes else kind.replace("int", "SymInt")
            schema.append(f"{kind} {parameter}" + ("" if default is None else f"={ast.unparse(default)}"))
        schema += ([] if given.kwonlyargs else ["*"]) + numbers

        tail = ", ".join((parameters, *([] if given.kwonlyargs else ["*"]), "num_active_loras_number=None"))
        source = (
            f"def {name}({parameters}):\n    if is_traced():\n        registered({', '.join(passed)})\n"
            f"    else:\n        body(locals())\n\n"
            f"def implementation({tail}):\n    if num_active_loras_number is not None:\n"
            "        num_active_loras = num_active_loras_number\n    body(locals())\n"
        )
        scope: dict[str, Any] = {"is_traced": is_traced, "body": body}
        exec(source, scope)
        scope["registered"] = register_op(name, f"({', '.join(schema)}) -> ()", scope["implementation"])
        function: Callable[..., None] = scope[name]
        function.__doc__, function.__module__ = body.__doc__, body.__module__
        return function

    return make


def _type_of(parameter: str) -> str:
    product, _, plain = parameter.partition("_")
    return _TYPE_OF.get(plain if product in ("shrink", "expand") and parameter not in _TYPE_OF else parameter, "Tensor")


def register_op(name: str, schema: str, function: Callable[..., None]) -> Callable[..., None]:
    """Register ``function``, which only writes tensors that it is given, and return ``torch.ops.punica.<name>``."""
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"punica::{name}", lambda *args, **kwargs: None, lib=_LIBRARY)
    return getattr(torch.ops.punica, name).default
