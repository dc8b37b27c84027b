"""Shared test set-up: fixed seeds, no network, GPU tests skipped (with the reason) where there is no GPU."""

import gc
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import torch

if not torch.cuda.is_available():  # Triton reads it when first imported, by torch.compile or peft perhaps
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

gc.disable()  # until the tests are collected: what is made here stays, and a full collection takes a second


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s), this machine has {gpus}"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # the other keeps a traceback of each call, for a GPU to come
