"""Rules of section 5.1, one by one."""

import pytest

from punica.cluster import ClusterPolicy, ScaleSignal


def cluster(gpus: str = "ab", pages: int = 1000, rule: str = "punica", **settings) -> ClusterPolicy:
    policy = ClusterPolicy(rule, **{"max_batch_size": 3, "page_size": 4, **settings})
    for name in gpus:
        policy.add_gpu(name, pages)
    return policy


def submit(policy: ClusterPolicy, names: str, prompt: int = 4, final: int = 40, **adapter) -> None:
    for name in names:
        policy.submit(name, prompt, final, **adapter)


def step(policy: ClusterPolicy, gpu: str):
    begun = policy.begin_step(gpu)
    policy.end_step(gpu)
    return begun


def placed(policy: ClusterPolicy) -> str:
    return " ".join(f"{request}>{gpu}" for request, gpu in policy.place())


def queued(policy: ClusterPolicy) -> tuple[str, ...]:
    """Requests without a GPU, the next to be placed first."""
    waiting = [request for _, request in sorted(policy._queue, key=lambda entry: entry[0])]
    return tuple(request.request_id for request in (*policy._quarantine.queue, *waiting))


def test_requests_fill_the_largest_working_set_and_ties_go_to_the_highest_uuid():
    policy = cluster("abc")
    submit(policy, "12345")
    assert placed(policy) == "1>c 2>c 3>c 4>b 5>b"


def test_one_prefill_per_step_joins_the_decodes():
    policy = cluster("a")
    submit(policy, "123")
    policy.place()
    steps = [step(policy, "a") for _ in range(4)]
    assert [(s.prefills, s.num_decodes) for s in steps] == [(("1",), 0), (("2",), 1), (("3",), 2), ((), 3)]
    assert [policy.requests[name].total_tokens for name in "123"] == [8, 7, 6]


def full_gpu(rule: str) -> ClusterPolicy:
    """10 pages of 4; two requests of 16 tokens, which hold 8 pages, and have just computed their first token."""
    policy = cluster("a", pages=10, rule=rule)
    submit(policy, "12", prompt=12)
    policy.place()
    while policy.requests["2"].total_tokens < 16:
        step(policy, "a")
    return policy


def test_the_newest_request_leaves_a_gpu_that_is_out_of_pages_and_returns_with_all_its_tokens():
    policy = full_gpu("punica")
    evicted: tuple[str, ...] = ()
    while not evicted:
        before = policy.requests["2"].total_tokens
        evicted = step(policy, "a").evicted
    assert evicted == ("2",)
    assert queued(policy) == ("2",)
    assert policy.requests["2"].total_tokens == before == 20  # 5 pages each are full
    assert policy.requests["1"].total_tokens == 22  # one ahead, and it went on in that step
    assert policy.gpus["a"].used_pages == 6
    policy.add_gpu("b", 10)
    assert placed(policy) == "2>b"
    assert step(policy, "b").prefills == ("2",)
    assert policy.gpus["b"].used_pages == 5
    assert policy.requests["2"].total_tokens == 21


def test_the_released_code_evicts_the_oldest_and_keeps_a_page_for_each():
    policy = full_gpu("released")
    evicted: tuple[str, ...] = ()
    while not evicted:
        gpu = policy.gpus["a"]
        before = gpu.free_pages, gpu.pages_to_grow()
        evicted = step(policy, "a").evicted
    assert evicted == ("1",)
    assert before == (0, 0)  # the paper's rule would have run this step


def test_the_released_code_runs_all_prefills_in_one_step():
    policy = cluster("a", rule="released")
    submit(policy, "123")
    policy.place()
    assert step(policy, "a").prefills == ("1", "2", "3")


def test_the_released_code_breaks_ties_by_adapter_then_by_fewer_free_pages():
    policy = cluster("abc", rule="released", max_batch_size=2)
    for name, gpu, prompt, adapter in (("1", "a", 4, 7), ("2", "b", 12, 8), ("3", "c", 4, 9)):
        policy.submit(name, prompt, 40, adapter)
        request = policy.requests[name]
        policy.gpus[gpu].place(request)
    policy._queue.clear()  # they were placed by hand
    policy.submit("4", 4, 40, adapter_id=7)
    assert placed(policy) == "4>a"
    policy.submit("5", 4, 40, adapter_id=6)
    assert placed(policy) == "5>b"  # nobody has its adapter; b has fewer free pages than c


def test_the_sum_of_ranks_counts_every_adapter_once():
    policy = cluster("a", max_batch_size=5)
    submit(policy, "12", adapter_id=1, rank=16)
    submit(policy, "3", adapter_id=2, rank=8)
    submit(policy, "4")
    policy.place()
    gpu = policy.gpus["a"]
    assert (gpu.rank_sum, len(gpu.requests_of)) == (24, 2)
    policy.cancel("1")
    assert (gpu.rank_sum, len(gpu.requests_of)) == (24, 2)
    policy.cancel("2")
    assert (gpu.rank_sum, len(gpu.requests_of)) == (8, 1)


def test_scale_signals():
    policy = cluster("abc", max_batch_size=4)
    assert policy.scale_signal().release == ("a", "b")  # one idle GPU stays for the next request
    submit(policy, "1")
    policy.place()
    assert policy.scale_signal().release == ("a", "b")  # c has one of 4: lightly loaded
    submit(policy, "23")
    policy.place()
    signal = policy.scale_signal()
    assert (signal.add_gpu, signal.release) == (False, ("a",))
    policy.remove_gpu("a")
    policy.remove_gpu("b")
    assert policy.scale_signal().add_gpu
    assert policy.scale_signal().release == ()


def test_gpus_that_are_full_by_pages_are_not_lightly_loaded_however_few_requests_they_hold():
    policy = ClusterPolicy(max_batch_size=32, page_size=16)
    for name in "ab":
        policy.add_gpu(name, num_pages=40)
    for i in range(500):
        policy.submit(str(i), 100, 120)  # 7 pages
    policy.place()
    assert policy.scale_signal() == ScaleSignal(True, ())
    for name in queued(policy):
        policy.cancel(name)
    assert policy.scale_signal() == ScaleSignal(True, ())  # nobody waits, the next one would
    policy.add_gpu("c", num_pages=40)
    assert policy.scale_signal() == ScaleSignal(False, ())  # idle, and the only one with room


@pytest.mark.parametrize(
    ("call", "error", "value"),
    [
        (lambda p: p.add_gpu("a", 5), ValueError, "'a'"),
        (lambda p: p.submit("1", 4, 40), ValueError, "'1'"),
        (lambda p: p.submit("2", 4, 5000), ValueError, "5000.* 4000"),
        (lambda p: p.submit("2", 4, 3), ValueError, "3, must be >= 4"),
        (lambda p: p.finish("1"), RuntimeError, "'1'"),
        (lambda p: p.cancel("9"), ValueError, "'9'"),
        (lambda p: p.begin_step("z"), ValueError, "'z'.* a, b"),
        (lambda p: p.end_step("a"), RuntimeError, "'a'"),
        (lambda p: p.begin_step("b"), RuntimeError, "step 1 .*'b'"),
        (lambda p: ClusterPolicy("best"), ValueError, "'best'"),
        (lambda p: ClusterPolicy(max_batch_size=0), ValueError, "0"),
    ],
)
def test_bad_input_changes_nothing(call, error, value):
    policy = cluster("ab")
    submit(policy, "0")
    policy.place()
    policy.begin_step("b")
    submit(policy, "1")
    with pytest.raises(error, match=value):
        call(policy)
    assert (queued(policy), sorted(policy.gpus)) == (("1",), ["a", "b"])
