"""Entering and leaving tensor parallelism: places, errors before any change, and processes that fail."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from punica.parallel import (
    SingleProcessGroup,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    init_tensor_parallel,
    set_tensor_parallel_group,
    spawn_tensor_parallel,
    tensor_model_parallel_all_reduce,
)
from punica.parallel.group import process_wide_group

ROOT = Path(__file__).resolve().parents[2]
LONG = 900.0
"""Seconds that a rank sleeps which somebody must end, and that its test therefore may take on a busy machine."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def alone(tmp_path: Path) -> dict:
    return {"backend": "gloo", "init_method": (tmp_path / "store").as_uri(), "rank": 0, "world_size": 1}


def assert_untouched() -> None:
    assert not dist.is_initialized()
    assert isinstance(process_wide_group(), SingleProcessGroup)


class Holder:
    """Of what must end before the world does."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def release(self) -> None:
        self.found.append(dist.is_initialized())


def test_with_block_initialises_releases_and_destroys(alone) -> None:
    held, gone = Holder(), Holder()
    noted = gone.found
    with init_tensor_parallel(**alone) as group:
        assert process_wide_group() is group
        assert (group.rank, group.world_size, group.can_be_captured) == (0, 1, False)  # gloo
        world = weakref.ref(dist.group.WORLD)
        group.before_close(held.release)
        group.before_close(gone.release)
        del gone
    assert (held.found, noted) == ([True], [])
    assert_untouched()
    assert world() is None  # gloo aborts a process that ends while its world lives
    with pytest.raises(RuntimeError):
        _ = group.rank


LATE_IMPORT = """
import sys, weakref
import torch.distributed as dist
from punica.parallel import init_tensor_parallel
with init_tensor_parallel(backend="gloo", init_method=sys.argv[1], rank=0, world_size=1):
    import torch.distributed.nn  # as transformers does: the world of import time is a default argument in there
    world = weakref.ref(dist.group.WORLD)
print(world())
"""


@pytest.mark.slow
def test_a_late_import_does_not_keep_the_world(alone) -> None:
    command = [sys.executable, "-c", LATE_IMPORT, alone["init_method"]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "None", done.stderr


def test_an_error_under_a_default_device_leaves_nothing_behind(alone) -> None:
    with pytest.raises(ZeroDivisionError), torch.device("meta"), init_tensor_parallel(**alone) as group:
        _ = 1 / (group.all_reduce(torch.ones(2, device="cpu")).tolist()[0] - 1)
    assert_untouched()


def test_what_was_found_initialised_stays(alone) -> None:
    outer = SingleProcessGroup()
    set_tensor_parallel_group(outer)
    dist.init_process_group("gloo", alone["init_method"], rank=0, world_size=1)
    try:
        with init_tensor_parallel() as group:
            assert process_wide_group() is group
        assert dist.is_initialized()
        assert process_wide_group() is outer
        with pytest.raises(RuntimeError):  # a kept group cannot keep the world alive
            group.all_reduce(torch.ones(1))
        with pytest.raises(ValueError, match="already initialised"), init_tensor_parallel(backend="gloo", rank=0):
            pass
    finally:
        dist.destroy_process_group()
        set_tensor_parallel_group(None)


FOUR = {"init_method": "file:///nobody/waits/here", "world_size": 4, "rank": 0, "backend": "gloo"}


@pytest.mark.parametrize(
    ("arguments", "environment", "error", "message"),
    [
        pytest.param({}, {}, RuntimeError, "WORLD_SIZE is not set", id="no-env"),
        pytest.param({"init_method": "tcp://a:1"}, {"WORLD_SIZE": "2"}, RuntimeError, " RANK is not", id="tcp-no-rank"),
        pytest.param({**FOUR, "rank": 4}, {}, ValueError, "rank is 4.* 4", id="rank-high"),
        pytest.param({**FOUR, "world_size": 0}, {}, ValueError, "world_size is 0", id="no-world"),
        pytest.param({**FOUR, "rank": None}, {"RANK": "one"}, RuntimeError, "RANK .* one", id="rank-text"),
        pytest.param({**FOUR, "backend": "nccl"}, {"LOCAL_RANK": "1000"}, RuntimeError, "1000", id="gpus"),
    ],
)
def test_errors_come_before_any_change(arguments, environment, error, message, monkeypatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message), init_tensor_parallel(**arguments):
        pass
    assert_untouched()


@pytest.mark.parametrize(
    ("function", "tp_size", "error"), [(print, 0, ValueError), (lambda rank: rank, 2, TypeError)], ids=["0", "lambda"]
)
def test_spawn_refuses_before_starting(function, tp_size, error) -> None:
    with pytest.raises(error, match=r"tp_size is 0|picklable"):
        spawn_tensor_parallel(function, tp_size)


def describe(rank: int, tensor: torch.Tensor) -> dict:
    tensor += rank  # its own copy: the other rank must not see this
    return {
        "argument": tensor.tolist(),
        "place": (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()),
        "sum": tensor_model_parallel_all_reduce(torch.tensor([rank + 1.0])),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


@pytest.mark.slow
def test_spawn_returns_results_in_rank_order(temporary_home: Path) -> None:
    tensor = torch.zeros(3)
    ranks = spawn_tensor_parallel(describe, 2, tensor, backend="gloo")
    assert [rank["argument"] for rank in ranks] == [[0.0] * 3, [1.0] * 3]
    assert tensor.tolist() == [0.0] * 3
    assert [(rank["place"], rank["sum"].item()) for rank in ranks] == [((0, 2), 3.0), ((1, 2), 3.0)]
    assert {rank["threads"] for rank in ranks} == {max(1, torch.get_num_threads() // 2)}
    assert len({os.getpid(), *(rank["pid"] for rank in ranks)}) == 3
    assert_untouched()
    assert list(temporary_home.iterdir()) == []


@pytest.fixture
def temporary_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go, to see that they are removed; the rendezvous is a file in one."""
    home = tmp_path / "a b#é%20"
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    return home


def enter_and_leave(rank: int, home: str) -> None:
    for i in range(100):
        with init_tensor_parallel(backend="gloo", init_method=f"file://{home}/{i}", rank=rank, world_size=2):
            pass


@pytest.mark.slow
def test_a_rank_that_leaves_at_once_does_not_break_one_that_still_connects(tmp_path: Path) -> None:
    """On a busy machine one of thirty worlds broke, when ranks did not meet before they left."""
    torch.multiprocessing.start_processes(enter_and_leave, (str(tmp_path),), nprocs=2, start_method="spawn")


INTERRUPTED = """
import sys
from test_launch import sleep_long
from punica.parallel import spawn_tensor_parallel
if __name__ == "__main__":
    spawn_tensor_parallel(sleep_long, 2, sys.argv[1], backend="gloo")
"""


def sleep_long(rank: int, pids: str) -> None:
    (Path(pids) / str(rank)).write_text(str(os.getpid()))
    time.sleep(LONG)


@pytest.mark.slow
def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    program, pids = tmp_path / "program.py", tmp_path / "pids"
    program.write_text(INTERRUPTED)
    pids.mkdir()
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    process = subprocess.Popen(
        [sys.executable, str(program), str(pids)], env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    try:
        deadline = time.monotonic() + LONG / 2
        while len([file for file in pids.iterdir() if file.read_text()]) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG / 4) != 0
    finally:
        process.kill()
    ranks = [int(file.read_text()) for file in pids.iterdir()]
    assert len(ranks) == 2
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def fail(rank: int, how: str, pids: str) -> object:
    (Path(pids) / str(rank)).write_text(str(os.getpid()))
    if how == "sys.exit":
        sys.exit(0)
    if how == "unpicklable":
        return lambda: rank
    tensor_model_parallel_all_reduce(torch.ones(1))
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise KeyError("no such adapter")
    tensor_model_parallel_all_reduce(torch.ones(1))  # fails too, because rank 1 has left
    time.sleep(LONG)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"rank 1 of 2 failed\n(.|\n)*in fail\n(.|\n)*no such adapter"),
        pytest.param("killed", r"rank 1 of 2(: .*SIGKILL| was ended by signal 9)", marks=pytest.mark.slow),
        pytest.param("sys.exit", "rank 0 of 2 ended without a result", marks=pytest.mark.slow),
        pytest.param("unpicklable", "rank [01] of 2 failed\n(.|\n)*pickle", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_them_all(how, message, temporary_home: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        spawn_tensor_parallel(fail, 2, how, str(pids), backend="gloo")
    assert time.monotonic() - started < LONG  # nobody slept to the end
    for file in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
    assert list(temporary_home.iterdir()) == []
