"""The witnesses of a disturbed measurement: other work, a slow calibration, a throttled GPU; and quiet ones."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from experiments.measure import disturbance
from experiments.measure.disturbance import Calibration, CpuTimes, Disturbance, Watch

AFTER, QUIET = CpuTimes(10.0, 70.0, 40.0), ((100.0, 1000.0), (120.0, 1100.0))


@pytest.mark.parametrize(
    ("after", "calibrations", "gpu", "found"),
    [
        (AFTER, QUIET, None, Disturbance(False, 0.0, 110.0, 1050.0)),
        (None, QUIET, None, Disturbance(False, None, 110.0, 1050.0)),
        (CpuTimes(10.0, 69.0, 40.0), QUIET, None, Disturbance(False, 0.0, 110.0, 1050.0)),
        (CpuTimes(10.0, 70.75, 40.0), QUIET, None, Disturbance(False, 0.0375, 110.0, 1050.0)),
        (CpuTimes(10.0, 71.25, 40.0), QUIET, None, Disturbance(True, 0.0625, 110.0, 1050.0)),
        (CpuTimes(0.125, 50.03125, 20.0), QUIET, None, Disturbance(False, 0.125, 110.0, 1050.0)),
        (AFTER, ((100.0, 1000.0), (230.0, 1000.0)), None, Disturbance(True, 0.0, 165.0, 1000.0)),
        (AFTER, ((100.0, 1000.0), (100.0, 2100.0)), None, Disturbance(True, 0.0, 100.0, 1550.0)),
        (AFTER, ((100.0, 1000.0, 4.0), (100.0, 1000.0, 12.0)), None, Disturbance(False, 0.0, 100.0, 1000.0, None, 8.0)),
        (AFTER, QUIET, ("1980 MHz", "0x0000000000000004"), Disturbance(False, 0.0, 110.0, 1050.0, 1980.0)),
        (AFTER, QUIET, ("1980 MHz", "0x0000000000000040"), Disturbance(True, 0.0, 110.0, 1050.0, 1980.0)),
        (AFTER, QUIET, ("[N/A]",), Disturbance(False, 0.0, 110.0, 1050.0)),
    ],
    ids=[
        "quiet", "not known", "rounded", "below the limit", "above it", "a tick in a short interval", "slow product",
        "slow copy", "launches mark nothing", "GPU at its power cap", "GPU throttled by heat", "GPU says nothing",
    ],
)  # fmt: skip
def test_a_measurement_has_what_disturbed_it(monkeypatch, after, calibrations, gpu, found):
    times = iter([after and CpuTimes(0.0, 50.0, 20.0), after])
    monkeypatch.setattr(disturbance.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(disturbance, "cpu_times", lambda: next(times))
    left = iter(calibrations)
    fake = SimpleNamespace(quiet=Calibration(100.0, 1000.0), run=lambda: Calibration(*next(left)))
    monkeypatch.setattr(disturbance, "calibrator", lambda _: fake)
    monkeypatch.setattr(disturbance, "gpu_query", lambda *names: [dict(zip(names, gpu, strict=False))])
    assert Watch("cuda" if gpu else "cpu").stop() == found


def test_a_launch_is_the_median_burst_over_its_launches_and_a_cpu_has_none(monkeypatch):
    calibrator, clock, bursts = disturbance.calibrator("cpu"), [0.0], []
    assert disturbance.calibrator("cpu") is calibrator, "one for a process"
    found = calibrator.run()
    assert (min(found.gemm_us, found.copy_us) > 0, found.launch_us) == (True, None)

    def launch():
        clock[0] += 9e-6 if len(bursts) % 4 == 0 else 3e-6  # one burst of four is slow

    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(calibrator, "_launch", launch)
    monkeypatch.setattr(calibrator, "_wait", lambda: bursts.append(clock.__setitem__(0, clock[0] + 1e-3)))
    assert calibrator._per_launch() == pytest.approx(3.0)
    assert len(bursts) == disturbance._BURSTS


@pytest.mark.parametrize(
    ("times", "runs", "marks"),
    [
        ([100.0, 100.0, 50.0, 50.0] + [100.0] * 96 + [160.0] * 4, 26, [False] * 10 + [True]),
        ([100.0] * 12 + [200.0] * 1000, 100, [False] * 3 + [True] * 97),
    ],
    ids=["usual is not the rarest, half of it once marks nothing", "a machine that stays slow stays marked"],
)
def test_what_is_slow_is_marked_by_what_was_usual(monkeypatch, times, runs, marks):
    """Each measurement calibrates twice, of two times each."""
    calibrator, left = disturbance.Calibrator("cpu"), iter(times)
    monkeypatch.setattr(calibrator, "_microseconds", lambda call: next(left))
    monkeypatch.setattr(disturbance, "calibrator", lambda _: calibrator)
    monkeypatch.setattr(disturbance, "cpu_times", lambda: None)
    assert [Watch("cpu").stop().disturbed for _ in range(runs)][-len(marks) :] == marks


BUSY = [sys.executable, "-c", "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"]
ORPHAN = f"import subprocess\nprint(subprocess.Popen({BUSY!r}, stdout=subprocess.DEVNULL).pid)"


@pytest.mark.parametrize("ours", [False, True])
def test_another_process_is_seen_and_our_own_work_is_not(ours):
    """In CPU seconds of both, whatever else wants the cores; a process is not ours once who started it has ended."""
    other = psutil.Popen(BUSY) if ours else psutil.Process(int(subprocess.check_output([sys.executable, "-c", ORPHAN])))
    try:
        before, begin, spent = disturbance.cpu_times(), sum(other.cpu_times()[:2]), 0.0
        after = before
        while min(after.own - before.own, spent) < 0.5:
            spent, after = sum(other.cpu_times()[:2]) - begin, disturbance.cpu_times()
        others, own = disturbance.other_seconds(before, after), after.own - before.own
        assert own > spent if ours else others > spent - 0.2
        assert others < (after.wall - before.wall) * len(disturbance.os.sched_getaffinity(0)) - own + 0.2
    finally:
        other.kill()
        if ours:
            other.wait()
