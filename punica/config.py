"""`LoRAConfig`: capacity for adapters, their dtype, and the switches of the kernels.

Every switch of the library is a field here; the library reads no environment variable.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from punica.checks import check_bool, check_count

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_FP8_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class LoRAConfig:
    """Settings of adapter memory and of the LoRA ops.

    Checked when built: TypeError for a wrong type or an unsupported torch dtype, ValueError for a value out of range.

    Capacity
        max_lora_rank: largest adapter rank; the rank dimension of every stacked weight.
        max_loras: slots on the device, i.e. distinct adapters in one batch.
        max_cpu_loras: adapters kept in host memory, at least ``max_loras`` (``None``: equal to it).
        lora_dtype: ``"auto"`` (the model's), ``"float16"``, ``"bfloat16"``, ``"float32"`` or such a torch dtype.
        fp8: ``"float8_e4m3fn"``, ``"float8_e5m2"`` or such a torch dtype: adapters are quantised when registered and
            stored in FP8 with one float32 scale per channel, about half the bytes of 16 bits; ``lora_dtype`` is then
            the dtype of their activations. ``None``: stored in ``lora_dtype``.
        target_modules: deployment filter, suffixes or full module names; ``None`` wraps every supported module.

    Layout
        fully_sharded_loras: shard A as well as B over tensor-parallel ranks.
        enable_mixed_moe_lora_format: always use the 2D MoE class and convert 3D adapters.

    Execution
        specialize_active_lora: metadata counts the active adapters, rounded up to the captured counts, for callers of
            the flat ops. Kernels of a layer follow the step either way.
        batch_invariant: one fixed kernel schedule, so that a row's bits do not depend on its batch.
        tuned_dir: folder with tuned kernel tables; ``None``: the GPU's shipped table, else the cost model.
        debug_checks: the wrapper verifies the indices on the device once per step (synchronises; for debugging).
        pdl: programmatic dependent launch where the GPU has it: a kernel starts before its predecessor has ended.
        dual_stream: overlap shrink with the base product in decode steps. With ``max_lora_rank`` up to 16 and a plain
            16-bit product of 3 to 32 rows both share one launch; else shrink runs on a second stream during CUDA graph
            capture. Outside of a graph they run one after the other, without early start by ``pdl``.
    """

    max_lora_rank: int = 16
    max_loras: int = 1
    max_cpu_loras: int | None = None
    fully_sharded_loras: bool = False
    lora_dtype: str | torch.dtype = "auto"
    fp8: str | torch.dtype | None = None
    target_modules: list[str] | None = None
    specialize_active_lora: bool = False
    enable_mixed_moe_lora_format: bool = False
    batch_invariant: bool = False
    tuned_dir: str | Path | None = None
    debug_checks: bool = False
    pdl: bool = True
    dual_stream: bool = True

    def __post_init__(self) -> None:
        def put(name: str, value: object, lowest: int = 1, meaning: str = "") -> None:
            object.__setattr__(self, name, check_count(name, value, lowest, meaning))

        put("max_lora_rank", self.max_lora_rank)
        put("max_loras", self.max_loras)
        in_memory = self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
        put("max_cpu_loras", in_memory, self.max_loras, "max_loras: host memory has a copy of every slot")
        for field in fields(self):
            if field.type is bool:
                check_bool(field.name, getattr(self, field.name))
        if not (isinstance(self.lora_dtype, str) and self.lora_dtype == "auto"):
            _as_dtype("lora_dtype", self.lora_dtype)
        if self.fp8 is not None:
            object.__setattr__(self, "fp8", _as_dtype("fp8", self.fp8, _FP8_DTYPES))
        if self.target_modules is not None:
            object.__setattr__(self, "target_modules", _module_names(self.target_modules))
        if self.tuned_dir is not None and not isinstance(self.tuned_dir, (str, Path)):
            raise TypeError(f"tuned_dir must be a path or None, got {type(self.tuned_dir).__name__}")

    def verify_with_model_config(self, model_config: Any) -> None:
        """Resolve ``lora_dtype`` to a torch dtype, in place; ``"auto"`` takes the dtype of the model. ``model_config``
        is a Hugging Face config or anything with ``dtype`` (or ``torch_dtype``), a torch dtype or its name. ValueError
        when ``"auto"`` meets a model config without one.
        """
        if self.lora_dtype != "auto":
            object.__setattr__(self, "lora_dtype", _as_dtype("lora_dtype", self.lora_dtype))
            return
        model_dtype = getattr(model_config, "dtype", None) or getattr(model_config, "torch_dtype", None)
        if model_dtype is None:
            raise ValueError(
                f'lora_dtype "auto" needs a model config with a dtype, {type(model_config).__name__} has none; '
                f"set lora_dtype to one of {list(_DTYPES)}"
            )
        object.__setattr__(self, "lora_dtype", _as_dtype("the model's dtype", model_dtype))


def _as_dtype(name: str, value: Any, known: Mapping[str, torch.dtype] = _DTYPES) -> torch.dtype:
    if isinstance(value, torch.dtype):
        if value not in known.values():
            raise TypeError(f"{name} is {value}; adapters are stored as one of {list(known)}")
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str or a torch dtype, got {type(value).__name__} {value!r}")
    if value not in known:
        raise ValueError(f'{name} is {value!r}, must be one of {list(known)} (lora_dtype also takes "auto")')
    return known[value]


def _module_names(names: Any) -> list[str]:
    if isinstance(names, str) or not isinstance(names, (list, tuple, set, frozenset)):
        raise TypeError(f"target_modules must be a list of module names or None, got {names!r}")
    for position, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(f"target_modules[{position}] must be a str, got {type(name).__name__} {name!r}")
        if not name:
            raise ValueError(f"target_modules[{position}] is empty; give a suffix such as 'q_proj' or a full name")
    return list(names)
