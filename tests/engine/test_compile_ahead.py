"""Kernels of an engine, compiled ahead of it by a process that has no GPU."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from punica.engine.compile_ahead import main
from punica.ops import absent_gpu
from punica.ops.absent_gpu import AbsentTensor, GpuDescription, stand_in

ROOT = Path(__file__).resolve().parents[2]
H200 = GpuDescription("an H200", 9, 0, 132, 227 << 10, 3_201_000, 6144)
SIZES = {"max_model_len": 32, "max_batch_size": 1, "max_lora_rank": 16, "dtype": "float16"}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
PROGRAM = """
import sys
from triton import knobs
from punica.engine import Engine
from punica.vllm import ahead
hits = []
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
{}
print(f"run: {{hits.count(False)}} kernels compiled, {{hits.count(True)}} found")
"""
ENGINE = f"Engine.from_pretrained(sys.argv[1], device='cuda', warm_up=True, **{SIZES})"
FORM = [4, 16, 64, [48, 32], "float16", 40, [1, 5]]


def numbers_of(command: list[str], cache: Path) -> tuple[int, int]:
    """Kernels that a Python program says it compiled and found."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=cache.parent, env=environment
    )
    assert found.returncode == 0, found.stderr[-4000:]
    words = found.stdout.splitlines()[-1].partition(": ")[2].split()
    return int(words[0]), int(words[3])


def ahead(backbone: Any, gpu: GpuDescription, cache: Path) -> tuple[int, int]:
    """Of the command for the tiny model without its weights."""
    folder, description = cache.parent / "config_alone", cache.parent / "gpu.json"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((backbone.folder / "config.json").read_text())
    gpu.write(description)
    return numbers_of(["-m", "punica.engine.compile_ahead", str(folder), f"--gpu={description}", *OPTIONS], cache)


@pytest.mark.slow
def test_a_second_process_finds_every_kernel_of_the_first(backbone, tmp_path) -> None:
    new, found = ahead(backbone, H200, tmp_path / "cache")
    assert (new > 10, found) == (True, 0)
    assert ahead(backbone, H200, tmp_path / "cache") == (0, new)
    kernels = {path.stem for path in (tmp_path / "cache").rglob("*.cubin")}
    assert {"_lora_shrink_kernel", "_lora_expand_kernel", "_slot_write_kernel", "_decode_attention_kernel"} < kernels
    # products of one row: of queries, keys and values, of o_proj, of gate and up, of down_proj and of the head
    assert len(list((tmp_path / "cache").rglob("_gemm_rows_kernel.cubin"))) == 5


@pytest.mark.gpu
def test_an_engine_on_the_gpu_compiles_nothing_after_it(backbone, tmp_path) -> None:
    new, _ = ahead(backbone, GpuDescription.of_this_machine(), tmp_path / "cache")
    compiled, found = numbers_of(["-c", PROGRAM.format(ENGINE), str(backbone.folder)], tmp_path / "cache")
    assert compiled == 0
    assert 10 < found <= new


@pytest.mark.parametrize("gpu", [pytest.param(i, marks=m) for i, m in enumerate((pytest.mark.slow, pytest.mark.gpu))])
def test_a_second_process_finds_what_the_first_compiled_for_vllm(tmp_path, gpu) -> None:
    job = json.dumps({"gpu": asdict(GpuDescription.of_this_machine() if gpu else H200), "form": FORM})
    first = ["-c", PROGRAM.format("ahead.main(sys.argv[1:])"), job]
    second = ["-c", PROGRAM.format(f"ahead.launch_all(*{FORM})")] if gpu else first
    new, found = numbers_of(first, tmp_path / "cache")
    assert (new > 4, found) == (True, 0)
    assert numbers_of(second, tmp_path / "cache") == (0, new)


def test_tensors_of_the_absent_gpu_follow_shapes_and_places() -> None:
    with absent_gpu._OnAbsentGpu():
        x = torch.zeros(4, 6, dtype=torch.float16, device="cuda")
        assert isinstance(x, AbsentTensor)
        assert (x.is_cuda, x.device, x.get_device()) == (True, torch.device("cuda", 0), -1)
        assert x.add_(1) is x
        assert (x[2, 1:].data_ptr(), x[2, 1:].shape) == ((2 * 6 + 1) * 2, (5,))
        y = torch.ones(6, 3, dtype=torch.float16, pin_memory=True)
        assert (type(y), y.is_pinned(), y.pin_memory() is y) == (torch.Tensor, True, True)
        product = x @ y.to(x.device)
        assert (type(product), product.shape, product.is_cuda) == (AbsentTensor, (4, 3), True)
        assert torch.nn.Linear(3, 2, device="cuda").weight.is_cuda
        assert torch.ones(2).sum().item() == 2, "the host computes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"), (json.dumps({"name": "x"}), "must have the fields"),
        (json.dumps(asdict(H200) | {"name": 1}), "must have the fields"),
        (json.dumps(asdict(H200) | {"major": "9"}), "major"), (None, "No such file"),
    ],
)  # fmt: skip
def test_other_descriptions_are_refused_in_one_line(text, message, tmp_path) -> None:
    path = tmp_path / "gpu.json"
    if text is not None:
        H200.write(path)
        assert GpuDescription.read(path) == H200
        path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        main([str(tmp_path), f"--gpu={path}"])


def test_what_is_missing_is_said(tmp_path) -> None:
    with pytest.raises(SystemExit, match="no checkpoint is given"):
        main([])
    if not torch.cuda.is_available():
        for arguments in ([str(tmp_path)], ["--describe", str(tmp_path / "gpu.json")]):
            with pytest.raises(SystemExit, match="no NVIDIA GPU to describe"):
                main(arguments)


def test_interpreted_kernels_are_not_compiled(monkeypatch) -> None:
    monkeypatch.setattr("punica.ops.triton_ops.launch.INTERPRETED", True)
    with pytest.raises(RuntimeError, match="without TRITON_INTERPRET"):
        stand_in(H200)
