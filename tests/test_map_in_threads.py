"""Work on tensors in threads: results in order, the first error, and the caller's mode."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from punica import threads


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    monkeypatch.setattr(threads, "thread_count", lambda: 4)
    threads._pool.cache_clear()
    yield
    threads._pool.cache_clear()


def test_results_are_in_order_and_computed_by_several_threads_in_the_mode_of_the_caller():
    meeting = threading.Barrier(4, timeout=30)  # passed by four threads at once or not at all
    found = threads.map_in_threads(lambda i: (i, meeting.wait() if i < 4 else None)[0], range(64))
    assert found == list(range(64))
    with torch.inference_mode():
        target = torch.zeros(64)  # which only this mode may fill
        threads.map_in_threads(lambda i: target[i].fill_(i), range(64))
    assert target.tolist() == list(range(64))


def test_threads_of_this_module_compute_on_one_core_and_others_as_before():
    before, meeting = torch.get_num_threads(), threading.Barrier(4, timeout=30)  # all have begun
    assert threads.map_in_threads(lambda i: (torch.get_num_threads(), meeting.wait())[0], range(4)) == [1] * 4
    assert torch.get_num_threads() == before
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == before
    assert threads.map_in_threads(lambda i: torch.get_num_threads(), range(1)) == [1], "one item too"


def test_the_first_error_in_order_is_raised_after_all_have_ended():
    done = []

    def work(i: int) -> None:
        if i in (20, 40):
            raise ValueError(f"item {i}")
        done.append(i)

    with pytest.raises(ValueError, match="item 20"):
        threads.map_in_threads(work, range(64))
    assert set(done) == set(range(64)) - {20, 40}


def test_a_forked_process_computes_too():
    threads.map_in_threads(lambda i: i, range(64))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)  # it would wait for threads that it has not
            code = int(threads.map_in_threads(lambda i: i, range(64)) != list(range(64)))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
