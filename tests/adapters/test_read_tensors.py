"""What a `WeightsFile` tells and reads, by safetensors' own word; and several folders read at once."""

import json
import math
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from punica.adapters.names import NameRules
from punica.adapters.read import WeightsFile
from punica.adapters.weights import LoRAModel

NAME = "base_model.model.layers.0.q_proj.lora_A.weight"
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def write(folder: Path, dtype: str, shape: list[int], size: int, numbers: bytes = b"") -> Path:
    """A file with one tensor of `size` bytes: `numbers`, then a hole."""
    header = json.dumps({NAME: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + numbers)
        file.truncate(8 + len(header) + size)
    return folder


def read(folder: Path, with_numbers: bool = True) -> torch.Tensor:
    with WeightsFile(folder) as file:
        entries = file.entries(NameRules({"q_proj"}))
        return file.numbers(entries).tensors[NAME] if with_numbers else entries[NAME].meta()


@pytest.mark.parametrize("shape", [[], [8, 0], [4, 8], [2, 3, 8]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_shapes_are_those_of_the_file(tmp_path: Path, dtype: str, shape: list[int]) -> None:
    size = math.prod(shape) * DTYPES[dtype].itemsize
    numbers = bytes(i % 251 for i in range(size))
    write(tmp_path, dtype, shape, size, numbers)
    told, found = read(tmp_path, with_numbers=False), read(tmp_path)
    assert told.is_meta
    assert (told.dtype, told.shape) == (found.dtype, found.shape) == (DTYPES[dtype], torch.Size(shape))
    assert bytes(found.reshape(-1).view(torch.uint8).tolist()) == numbers


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "error"),
    [
        ("I32", [2, 2], 16, TypeError), ("F8_E5M2", [4], 4, TypeError), ("F4", [4], 2, TypeError),
        ("F6_E2M3", [4], 3, TypeError), ("nonsense", [4], 4, ValueError), ("F16", [4], 7, ValueError),
        ("F32", [0, 1 << 63], 0, ValueError),
    ],
)  # fmt: skip
def test_types_and_shapes_that_no_adapter_has_are_refused(tmp_path: Path, dtype, shape, size, error) -> None:
    write(tmp_path, dtype, shape, size)
    with pytest.raises(error, match=dtype if error is TypeError else "not a valid safetensors file"):
        read(tmp_path, with_numbers=False)


def test_types_and_shapes_cost_no_memory(tmp_path: Path) -> None:
    """A hole of 4 GiB: to touch it all would fault each of its million pages."""
    write(tmp_path, "F16", [1 << 11, 1 << 20], 1 << 32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert read(tmp_path, with_numbers=False).shape == (1 << 11, 1 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10_000


def test_readers_beside_each_other_find_what_each_finds_alone(make_manager, tenants) -> None:
    """Rank patterns too, whose matches are remembered; folder 7 is that of 1 under another id."""
    manager = make_manager()
    for i in range(1, 7):
        tenants.write(i, rank=i, target_modules="all-linear", rank_pattern={"no_such_module": 8})
    requests = [tenants.request(i) for i in range(1, 7)]
    requests.append(tenants.request(7, lora_path=requests[0].lora_path))
    for request in requests[::2]:
        manager.check_adapter(request)
    alone = [tensors_of(manager.read_adapter(request)) for request in requests]
    with ThreadPoolExecutor(4) as readers:
        order = [i for _ in range(5) for i in (0, 6, 1, 1, 2, 3, 4, 5)]
        readings = [(i, readers.submit(manager.read_adapter, requests[i])) for i in order]
        for request in requests:
            manager.check_adapter(request)
    for i, reading in readings:
        assert reading.result().id == i + 1
        found = tensors_of(reading.result())
        assert all(torch.equal(one, other) for one, other in zip(found, alone[i], strict=True))
    assert manager.list_adapters() == {}


def tensors_of(lora: LoRAModel) -> list[torch.Tensor]:
    pairs = [weights.pair() for _, weights in sorted(lora.loras.items())]
    flat = [each for pair in pairs for side in pair for each in (side if isinstance(side, list) else [side])]
    return [each for each in flat if each is not None]


def many(folder: Path, dtype: torch.dtype = torch.float16, wrong: float | None = None) -> dict[str, torch.Tensor]:
    """Tensors of several sizes, of which the last B may hold a wrong number, saved as a folder's weights."""
    tensors = {}
    for i in range(60):
        name = f"base_model.model.layers.{i}.q_proj.lora_"
        tensors[f"{name}A.weight"] = torch.randn(1 + i % 5, 33).to(dtype)
        tensors[f"{name}B.weight"] = torch.randn(21, 1 + i % 5).to(dtype)
    if wrong is not None:
        tensors[name + "B.weight"][-1, -1] = wrong
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


@pytest.mark.parametrize(("run", "at_once"), [(1 << 22, 777), (1 << 10, 1 << 30), (1, 777)], ids=str)
def test_tensors_read_in_runs_are_those_of_the_file(tmp_path: Path, run: int, at_once: int, monkeypatch) -> None:
    expected = many(tmp_path)

    def limited(descriptor: int, targets: list[memoryview], start: int) -> int:
        return os.preadv(descriptor, [targets[0][:at_once]] if at_once < 1 << 30 else targets, start)

    monkeypatch.setattr("punica.adapters.read.RUN_BYTES", run)
    monkeypatch.setattr("punica.adapters.read.os", SimpleNamespace(preadv=limited, fstat=os.fstat))
    with WeightsFile(tmp_path) as file:
        numbers = file.numbers(file.entries(NameRules({"q_proj"})))
    assert numbers.finite
    assert numbers.tensors.keys() == expected.keys()
    assert all(torch.equal(numbers.tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("run", "dtype"), [(1 << 22, None), (1 << 22, torch.bfloat16), (1, torch.bfloat16)], ids=str)
def test_tensors_are_cast_and_each_is_scaled_by_its_own(tmp_path: Path, run: int, dtype, monkeypatch) -> None:
    """Cast first, then scaled: rounded as those of a caller are. Neighbours differ in rank, in scaling, or in both."""
    monkeypatch.setattr("punica.adapters.read.RUN_BYTES", run)
    stored = many(tmp_path)
    scalings = {name: (1, 1 / 3, -7.0)[i // 14 % 3] for i, name in enumerate(stored) if "lora_B" in name}
    with WeightsFile(tmp_path) as file:
        numbers = file.numbers(file.entries(NameRules({"q_proj"})), dtype, scalings)
    assert numbers.finite
    assert numbers.tensors.keys() == stored.keys()
    for name, tensor in stored.items():
        expected = tensor.to(dtype or tensor.dtype) * scalings.get(name, 1)
        assert numbers.tensors[name].dtype == expected.dtype
        assert torch.equal(numbers.tensors[name], expected), name


@pytest.mark.parametrize(("dtype", "scaling"), [(torch.float16, 1.0), (None, 1e38)])
def test_numbers_that_are_finite_only_in_the_file_are_noticed(tmp_path: Path, dtype, scaling: float) -> None:
    stored = many(tmp_path, torch.float32, wrong=1e5)
    last = list(stored)[-1]
    with WeightsFile(tmp_path) as file:
        entries = file.entries(NameRules({"q_proj"}))
        assert file.numbers(entries, None, {last: 1.0}).finite
        assert not file.numbers(entries, dtype, {last: scaling}).finite
