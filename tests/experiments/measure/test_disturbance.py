"""The witnesses of a disturbed measurement: other work, a slow calibration, a throttled GPU; and quiet ones."""

import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from experiments.measure import disturbance
from experiments.measure.disturbance import (
    Calibration,
    CpuTimes,
    Disturbance,
    Watch,
    cpu_times,
    other_seconds,
    slow_repeats,
)

AFTER = CpuTimes(10.0, 70.0, 40.0)


class FakeCalibrator:
    """Calibrations from a list, of a machine that takes 100 us and 1 ms when it is quiet."""

    def __init__(self, *microseconds):
        self.left, self.quiet = list(microseconds), Calibration(100.0, 1000.0)

    def run(self):
        return Calibration(*self.left.pop(0))


@pytest.fixture
def quiet(monkeypatch):
    """A machine of two cores on which nothing else happens; a test may set other CPU times and calibrations."""

    def found(after=AFTER, calibrations=((100.0, 1000.0), (120.0, 1100.0)), device="cpu"):
        times = iter([after and CpuTimes(0.0, 50.0, 20.0), after])
        monkeypatch.setattr(disturbance, "cpu_times", lambda: next(times))
        monkeypatch.setattr(disturbance, "calibrator", lambda _: FakeCalibrator(*calibrations))
        return Watch(device).stop()

    monkeypatch.setattr(disturbance.os, "sched_getaffinity", lambda _: {0, 1})
    return found


def test_busy_time_is_that_of_our_cores_without_idle(monkeypatch):
    core = namedtuple("core", "user nice system idle iowait irq softirq steal guest")
    cores = [core(100, 10, 30, 999, 50, 2, 3, 5, 40), core(200, 0, 0, 999, 0, 0, 0, 0, 0), core(5000, *[0] * 8)]
    monkeypatch.setattr(disturbance.psutil, "cpu_times", lambda percpu: cores)
    monkeypatch.setattr(disturbance.os, "sched_getaffinity", lambda _: {0, 1})
    assert cpu_times().busy == 100 + 10 + 30 + 2 + 3 + 5 + 200


def test_a_machine_that_does_not_tell_is_not_known(quiet):
    assert quiet(after=None) == Disturbance(False, None, 110.0, 1050.0)


@pytest.mark.parametrize(
    ("after", "share", "disturbed"),
    [
        (AFTER, 0.0, False),
        (CpuTimes(10.0, 69.0, 40.0), 0.0, False),
        (CpuTimes(10.0, 70.8, 40.0), 0.04, False),
        (CpuTimes(10.0, 71.2, 40.0), 0.06, True),
        (CpuTimes(0.1, 50.23, 20.2), 0.15, False),
    ],
    ids=["none", "rounded", "below the limit", "above it", "a tick in a short interval"],
)
def test_other_work_disturbs_from_its_limit_on(quiet, after, share, disturbed):
    found = quiet(after)
    assert (found.other_cpu, found.disturbed) == (pytest.approx(share), disturbed)
    assert (found.calib_gemm_us, found.calib_copy_us, found.calib_launch_us) == (110.0, 1050.0, None)


@pytest.mark.parametrize("after", [(230.0, 1000.0), (100.0, 2100.0)], ids=["product", "copy"])
def test_a_slow_calibration_disturbs(quiet, after):
    assert quiet(calibrations=((100.0, 1000.0), after)).disturbed


def test_a_measurement_keeps_the_mean_of_its_launches_which_mark_nothing(quiet):
    found = quiet(calibrations=((100.0, 1000.0, 4.0), (100.0, 1000.0, 12.0)))
    assert (found.calib_launch_us, found.disturbed) == (8.0, False)


@pytest.mark.parametrize(
    ("clock", "reasons", "found"),
    [("1980 MHz", "0x04", (1980.0, False)), ("1980 MHz", "0x40", (1980.0, True)), ("[N/A]", "", (None, False))],
)
def test_a_gpu_says_its_clock_and_whether_it_throttles(quiet, monkeypatch, clock, reasons, found):
    answer = [{"clocks.sm": clock, "clocks_throttle_reasons.active": reasons}]
    monkeypatch.setattr(disturbance, "gpu_query", lambda *_: answer)
    told = quiet(device="cuda")
    assert (told.sm_clock_mhz, told.disturbed) == found


def test_the_calibrator_takes_time_and_is_one_for_a_process():
    found = disturbance.calibrator("cpu").run()
    assert min(found.gemm_us, found.copy_us) > 0
    assert disturbance.calibrator("cpu") is disturbance.calibrator("cpu")


def test_a_launch_is_the_median_burst_over_its_launches_and_a_cpu_has_none(monkeypatch):
    calibrator, clock, bursts = disturbance.Calibrator("cpu"), [0.0], []
    assert calibrator.run().launch_us is None

    def launch():
        clock[0] += 9e-6 if len(bursts) % 4 == 0 else 3e-6  # one burst of four is slow

    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(calibrator, "_launch", launch)
    monkeypatch.setattr(calibrator, "_wait", lambda: bursts.append(clock.__setitem__(0, clock[0] + 1e-3)))
    assert calibrator._per_launch() == pytest.approx(3.0)
    assert len(bursts) == disturbance._BURSTS


def test_quiet_is_what_is_usual_not_the_rarest(monkeypatch):
    """One calibration in fifty that takes half of the time marks nobody; a machine that is slow from some moment on
    marks what comes then.
    """
    calibrator = disturbance.Calibrator("cpu")
    times = iter([100.0, 100.0] + [50.0, 50.0] + [100.0] * 96 + [160.0] * 4)
    monkeypatch.setattr(calibrator, "_microseconds", lambda call: next(times))
    for _ in range(50):
        calibrator.run()
    assert calibrator.quiet == Calibration(100.0, 100.0)
    monkeypatch.setattr(disturbance, "calibrator", lambda _: calibrator)
    monkeypatch.setattr(disturbance, "cpu_times", lambda: None)
    assert Watch("cpu").stop().disturbed


def test_a_machine_that_stays_slow_stays_marked(monkeypatch):
    calibrator = disturbance.Calibrator("cpu")
    times = iter([100.0] * 12 + [200.0] * 1000)
    monkeypatch.setattr(calibrator, "_microseconds", lambda call: next(times))
    monkeypatch.setattr(disturbance, "calibrator", lambda _: calibrator)
    monkeypatch.setattr(disturbance, "cpu_times", lambda: None)
    marks = [Watch("cpu").stop().disturbed for _ in range(100)]
    assert marks == [False] * 3 + [True] * 97


@pytest.mark.parametrize("mib", [None, 16.0, 260.0])
def test_what_is_copied_is_beyond_the_cache(mib, monkeypatch):
    monkeypatch.setattr(disturbance, "l3_mib", lambda: mib)
    monkeypatch.setattr(disturbance, "_COPY_MIB", 1)
    calibrator, copied = disturbance.Calibrator("cpu"), []
    for _ in range(10_000):
        copied.append(calibrator._copy().data_ptr())
        if copied[-1] == copied[0] and len(copied) > 1:
            break
    assert len(copied) - 1 >= 2 * (mib or 4), "read before it comes again, and as many written"


def repeats(*medians, metric="latency"):
    return [SimpleNamespace(config_hash="a", metric=metric, gpu=None, t_s=None, repeat=repeat, statistic=statistic,
                            value=value)
            for repeat, median in enumerate(medians)
            for statistic, value in (("median", median), ("p90", 9 * median), ("p10", 0.1))]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "slow"),
    [
        (repeats(4397.0, 275.0, 212.0), {0}),
        (repeats(100.0, 151.0), {1}),
        (repeats(100.0, 149.0), set()),
        (repeats(160.0, 100.0, 155.0), {1}),
        (repeats(100.0, 101.0, 60.0), {2}),
        (repeats(1.0, 50.0, metric="added_latency"), set()),
        (repeats(1.0, 50.0, metric="throughput"), set()),
        (repeats(1.0, 50.0, metric="load_time"), {1}),
        (repeats(7.0), set()),
        ([], set()),
    ],
    ids=["recorded", "just", "not quite", "below two", "lucky", "differences", "a rate", "a load", "one", "none"],
)
def test_a_repeat_far_from_its_siblings_is_marked(rows, slow):
    assert slow_repeats(rows) == slow


BUSY = [sys.executable, "-c", "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"]
ORPHAN = f"import subprocess\nprint(subprocess.Popen({BUSY!r}, stdout=subprocess.DEVNULL).pid)"


@pytest.mark.parametrize("ours", [False, True])
def test_another_process_is_seen_and_our_own_work_is_not(ours):
    """In CPU seconds of both, whatever else wants the cores; a process is not ours once who started it has ended."""
    other = psutil.Popen(BUSY) if ours else psutil.Process(int(subprocess.check_output([sys.executable, "-c", ORPHAN])))
    try:
        before, begin, spent = cpu_times(), sum(other.cpu_times()[:2]), 0.0
        after = before
        while min(after.own - before.own, spent) < 0.5:
            spent, after = sum(other.cpu_times()[:2]) - begin, cpu_times()
        others, own = other_seconds(before, after), after.own - before.own
        assert own > spent if ours else others > spent - 0.2
        assert others < (after.wall - before.wall) * len(disturbance.os.sched_getaffinity(0)) - own + 0.2
    finally:
        other.kill()
        if ours:
            other.wait()
