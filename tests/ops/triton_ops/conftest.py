"""Kernel tests: compiled on a GPU, in Triton's interpreter on a machine without one (same code, small shapes).

Triton decides when it is first imported whether kernels are interpreted, so `tests/conftest.py` sets TRITON_INTERPRET.
"""

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import fast_interpreter  # noqa: E402

from punica.ops.triton_ops import configs, moe_ops, moe_plan  # noqa: E402
from punica.ops.weights import forget_plans  # noqa: E402

CHOOSING = ("step_ops", "lora_linear")

if not HAS_GPU:
    fast_interpreter.install()


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def use_schedules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``use_schedules(shrink=..., expand=...)``: run the kernels with these until the test ends."""

    def use(**chosen: Any) -> None:
        def choose(op_type: str, *arguments: Any, **options: Any) -> Any:
            return chosen.get(op_type) or configs.choose(op_type, *arguments, **options)

        for name in CHOOSING:
            monkeypatch.setattr(import_module(f"punica.ops.triton_ops.{name}"), "choose", choose)
        forget_plans()

    yield use
    forget_plans()


@pytest.fixture
def use_expert_schedules(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], None]:
    """``use_expert_schedules(shrink, expand)``: run the kernels of experts with these until the test ends."""

    def use(shrink: Any, expand: Any) -> None:
        monkeypatch.setattr(moe_ops, "_PLANS", {})
        monkeypatch.setattr(moe_plan, "choose_shrink", lambda work: shrink)
        monkeypatch.setattr(moe_plan, "choose_expand", lambda work: expand)

    return use
