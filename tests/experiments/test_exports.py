"""Exports: FlashInfer-Bench reads its data set, and finds references, workloads and solutions right on a CPU."""

from pathlib import Path

import pytest
import torch

from experiments.exports.flashinfer_bench import write

DENSE, MOE = {"K": 64, "N": 48, "R": 8}, {"K": 48, "N": 32, "R": 4, "E": 4, "J": 2}


@pytest.mark.slow
def test_flashinfer_bench_finds_our_solutions_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = pytest.importorskip(
        "flashinfer_bench", reason="pip install --no-deps flashinfer-bench==0.1.2 docstring-parser, as .ci/run does"
    )
    from flashinfer_bench.bench.evaluators.default import DefaultEvaluator
    from flashinfer_bench.compile import BuilderRegistry

    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    write(tmp_path / "set", DENSE, MOE)
    found = bench.TraceSet.from_path(str(tmp_path / "set"))
    config = bench.BenchmarkConfig(num_trials=1, profile_baseline=False)
    checked = 0
    for name, definition in found.definitions.items():
        for trace in found.workloads[name]:
            assert set(trace.workload.axes) == set(definition.var_axes)
            given = definition, trace.workload, config, "cpu"
            baseline = DefaultEvaluator.build_baseline(*given, trace_set_root=found.root)
            for solution in (one for one in found.solutions[name] if "vllm" not in one.name):
                run = BuilderRegistry.get_instance().build(definition, solution)
                inputs, outputs = baseline.inputs, baseline.outputs
                _, wrong = DefaultEvaluator.check_correctness(definition, run, inputs, outputs, config, "", "cpu")
                assert wrong is None, (trace.workload, wrong)
                assert not torch.equal(outputs[0][0], inputs[0][0]), "the adapters add nothing"
                checked += 1
    assert checked == 24


def test_workloads_repeat_and_have_rows_without_adapter(tmp_path: Path) -> None:
    for place in ("one", "two"):
        write(tmp_path / place, DENSE, MOE)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*")]
    assert len(files) == 2 + 3 + 2 + 24
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)
