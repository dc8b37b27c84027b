"""A thread that stops, of one engine or of runners: what is unfinished ends with one error, and nothing is kept."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from punica.cluster.ray_cluster import RayCluster
from punica.engine import Request, SamplingParams
from punica.serve.backend import Call, SteppingThread
from punica.serve.errors import ApiError
from punica.serve.runners import RunnersThread
from tests.serve.runners_world import build_of, use_local_runners
from tests.serve.world import EngineThread, state_of


@pytest.fixture(params=["engine", "runners"])
def served(request: pytest.FixtureRequest, world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The thread's engine, the thread's class, and a function that compares memory with what it was."""
    with ExitStack() as stack:
        if request.param == "engine":
            engine = world.engine(1)
            before = state_of(engine)
            yield engine, EngineThread, lambda: state_of(engine) == before
            return
        use_local_runners(monkeypatch)
        cluster = stack.enter_context(RayCluster(build_of(world, 1), 2))
        yield cluster, RunnersThread, lambda: sum(cluster.working_sets.values()) == 0


def test_stopping_ends_what_is_unfinished_and_leaves_the_engine(
    served: tuple[Any, type[SteppingThread], Callable[[], bool]], world: Any
) -> None:
    engine, kind, is_as_before = served

    async def scenario() -> None:
        thread = kind(engine)
        thread.start()
        call = Call([Request("long", [1], SamplingParams(120, ignore_eos=True), world.adapters[0])], streams=True)
        await thread.submit(call)
        await anext(call.batches())
        await thread.stop()
        with pytest.raises(ApiError, match="stopping"):
            async for _ in call.batches():
                pass
        with pytest.raises(ApiError, match="stopping") as caught:
            await thread.submit(call)
        assert caught.value.status == 503
        assert thread.health == "failed"

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert not engine.has_unfinished()
    assert is_as_before()
    assert engine.generate([[1, 2]], None, 3)[0].finish_reason == "length"
