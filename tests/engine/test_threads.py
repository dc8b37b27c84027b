"""Several threads in one engine: right tokens, shared steps, and errors that stay with their call."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from punica.engine import SamplingParams
from punica.engine.generation import Turns
from tests.world import byte_tokenizer, finish, tokens_of

THREADS, ROUNDS = 8, 3


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in threads that begin at once; return what they return."""
    barrier, futures = threading.Barrier(len(calls)), [Future() for _ in calls]

    def run(call: Callable[[], Any], future: Future) -> None:
        barrier.wait()
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    for pair in zip(calls, futures, strict=True):
        threading.Thread(target=run, args=pair, daemon=True).start()
    return [future.result(timeout=120) for future in futures]


def test_every_thread_gets_its_own_results_whatever_the_others_do(backbone) -> None:
    """Beside requests that one adds and steps itself, streams that are given up, and adapters that come and go."""
    engine, params = backbone.engine(max_loras=3, tokenizer=byte_tokenizer()), SamplingParams(9, stop=("zz",))
    prompts = [(number, 4) for number in range(4)]
    texts = [result.text for result in engine.generate(prompts, backbone.adapters[3], params)]

    def serve(thread: int) -> None:
        for turn in range(ROUNDS):
            asked, number, new = [(thread % 3 + 1, 4), (turn % 2, 3, 5)], (thread + turn) % 7, 3 + (thread + turn) % 4
            adapter = backbone.adapters.get(number)
            if thread % 2:
                found = [[], []]
                for chunk in engine.stream(asked, adapter, new):
                    found[chunk.index] += chunk.token_ids
            else:
                found = tokens_of(engine.generate(asked, adapter, new))
            assert found == [backbone.generate_merged(prompt, number, new) for prompt in asked]
            one = (thread + turn) % 4
            assert engine.generate([prompts[one]], backbone.adapters[3], params)[0].text == texts[one]

    def own() -> None:
        """A step of its own brings also what ends in it for a call."""
        for prompt in prompts:
            name, found = f"own-{prompt[0]}", {}
            backbone.ask(engine, name, prompt, 1, 6)
            while name not in found:
                found |= {result.request_id: result.token_ids for result in engine.step().finished}
            assert found[name] == backbone.generate_merged(prompt, 1, 6)

    def leave() -> None:
        for _ in range(6):
            stream = engine.stream([[1], [2]], None, 30)
            next(stream)
            stream.close()

    def change() -> None:
        for turn in range(12):
            with engine.alone():
                number = 2 + turn % 4
                engine.manager.add_adapter(backbone.adapters[number])
                engine.manager.remove_adapter(number)

    for prompt in ((1, 4), (2, 4), (3, 4), (0, 3, 5), (1, 3, 5)):  # the oracle is of one thread
        [backbone.generate_merged(prompt, number, 6) for number in range(7)]
    [backbone.generate_merged(prompt, 1, 6) for prompt in prompts]
    together(own, leave, change, *(partial(serve, thread) for thread in range(THREADS)))
    finish(engine)


def test_calls_of_threads_share_their_steps(backbone) -> None:
    """A call that comes while another makes steps joins its batch, and leaves it before that one ends."""
    engine, entered = backbone.engine(), threading.Event()
    step, sizes, order = engine.step, [], []

    def slow_step() -> Any:
        output = step()
        sizes.append(output.statistics.batch_size)
        entered.set()
        return output

    engine.step = slow_step

    def long() -> None:
        engine.generate([[1, 2]], None, 60)
        order.append("long")

    def short() -> None:
        entered.wait()
        engine.generate([[3]], None, 2)
        order.append("short")

    together(long, short)
    assert max(sizes) == 2
    assert order == ["short", "long"]
    assert len(sizes) < 62


def test_a_paused_stream_keeps_no_other_call_waiting(backbone) -> None:
    engine = backbone.engine()
    stream = engine.stream([[1, 2]], None, 20)
    next(stream)
    (found,) = together(lambda: tokens_of(engine.generate([[3]], None, 40)))
    assert found == [backbone.generate_merged((3,), 0, 40)]
    chunks = list(stream)
    assert chunks[-1].result.token_ids == backbone.generate_merged((1, 2), 0, 20)


def test_an_error_in_one_thread_leaves_the_others_right(backbone) -> None:
    """One step in ten raises, in whichever thread makes it: that call ends, the others go through."""
    engine, count, raised = backbone.engine(), iter(range(1, 10_000)), []
    step = engine.step

    def failing_step() -> Any:
        if next(count) % 10 == 0:
            raise RuntimeError("injected")
        return step()

    engine.step = failing_step
    wanted = [backbone.generate_merged((thread, 9), 3, 8) for thread in range(6)]

    def serve(thread: int) -> None:
        for _ in range(4):
            try:
                found = tokens_of(engine.generate([(thread, 9)], backbone.adapters[3], 8))
            except RuntimeError as error:
                raised.append(str(error))
            else:
                assert found == [wanted[thread]]

    together(*(partial(serve, thread) for thread in range(6)))
    assert set(raised) == {"injected"}
    assert not engine.has_unfinished()


def test_a_call_waits_while_another_thread_is_alone(backbone) -> None:
    engine = backbone.engine()
    with ThreadPoolExecutor(1) as pool:
        with engine.alone():
            waiting = pool.submit(engine.generate, [[1]], None, 2)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            assert not engine.has_unfinished()
        assert tokens_of(waiting.result(timeout=60)) == [backbone.generate_merged((1,), 0, 2)]


def test_a_rank_of_several_serves_the_thread_that_built_it() -> None:
    turns = Turns(one_thread=True)
    with turns, turns:
        pass

    def enter() -> None:
        with turns:
            pass

    with pytest.raises(RuntimeError, match="from the thread that built it"):
        together(enter)
    with turns:
        pass


def test_a_call_of_a_thread_that_is_alone_makes_its_own_steps(backbone) -> None:
    """The leading thread cannot step meanwhile."""
    engine, entered, found = backbone.engine(max_batch_size=4), threading.Event(), {}
    step = engine.step

    def noted_step() -> Any:
        entered.set()
        return step()

    engine.step = noted_step
    prompt = (5, 6)

    def lead() -> None:
        found["leader"] = tokens_of(engine.generate([prompt], None, 20))

    def alone() -> None:
        entered.wait(60)
        with engine.alone():
            found["alone"] = tokens_of(engine.generate([prompt], None, 3))

    together(lead, alone)
    whole = backbone.generate_merged(prompt, 0, 20)
    assert found == {"leader": [whole], "alone": [whole[:3]]}
