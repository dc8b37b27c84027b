"""Exports: FlashInfer-Bench reads its data set, and finds references, workloads and solutions right on a CPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from experiments.exports.flashinfer_bench import write

DENSE, MOE = {"K": 64, "N": 48, "R": 8}, {"K": 48, "N": 32, "R": 8, "E": 4, "J": 2}


@pytest.mark.slow
def test_flashinfer_bench_finds_solutions_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = pytest.importorskip("flashinfer_bench", reason=".ci/run installs it, without its dependencies")
    from flashinfer_bench.bench.evaluators.default import DefaultEvaluator
    from flashinfer_bench.compile import BuilderRegistry

    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    write(tmp_path / "set", DENSE, MOE)
    found = bench.TraceSet.from_path(str(tmp_path / "set"))
    config = bench.BenchmarkConfig(num_trials=1, profile_baseline=False)
    assert [len(one) for one in found.workloads.values()] == [12, 12]
    for name, definition in found.definitions.items():
        for trace in found.workloads[name]:
            assert set(trace.workload.axes) == set(definition.var_axes)
            made = DefaultEvaluator.build_baseline(definition, trace.workload, config, "cpu", found.root)
            for one in found.solutions[name]:
                if "vllm" not in one.spec.dependencies:  # whose kernels need a GPU
                    run = BuilderRegistry.get_instance().build(definition, one)
                    given = definition, run, made.inputs, made.outputs, config, "", "cpu"
                    assert DefaultEvaluator.check_correctness(*given)[1] is None, (one.name, trace.workload)
            assert not torch.equal(made.outputs[0][0], made.inputs[0][0]), "the adapters add nothing"


def test_workloads_repeat_and_have_rows_without_adapter(tmp_path: Path) -> None:
    for place in ("one", "two"):
        write(tmp_path / place, DENSE, MOE)
    one, two = (sorted(path for path in (tmp_path / place).rglob("*.*")) for place in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    blobs = [load_file(path)["slots"] for path in one if path.suffix == ".safetensors"]
    assert sorted(int((slots == -1).sum()) for slots in blobs) == [0] * 8 + [2] * 8 + [8] * 8
