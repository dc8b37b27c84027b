"""Runner crashes with requests in them: the culprit fails in the end, no other request does."""

import pytest

from punica.cluster import ClusterPolicy
from punica.cluster.quarantine import MAX_SHARED_CRASHES, MAX_SOLO_CRASHES, PROBATION_TOKENS, CrashRecord
from punica.engine import Request, SamplingParams
from tests.cluster.runner_world import Disturbed, LocalRunners, requests, run, undisturbed
from tests.cluster.test_policy import queued

MOST_DEATHS = MAX_SHARED_CRASHES + 1 + MAX_SOLO_CRASHES


@pytest.mark.parametrize(("count", "at"), [(1, 0), (3, 12)], ids=["at once", "after it was acquitted"])
def test_bystanders_of_a_request_that_kills_runners_all_complete(adapters, count, at) -> None:
    asked = requests(adapters, 14, seed=count, seeded=True)
    expected = undisturbed(asked)
    disturbed = Disturbed(count, count, poison_at=at)
    poison = Request("poison", [1, 2, 3], SamplingParams(24, ignore_eos=True))
    disturbed.run([*asked[:3], poison, *asked[3:]])
    (failed,) = disturbed.failed
    assert (failed.request_id, failed.finish_reason, failed.num_generated) == ("poison", "failed", at)
    assert failed.error == (
        f"RuntimeError: {MAX_SOLO_CRASHES} runners died with this request alone in them, of: death {disturbed.crashes}"
    )
    assert MAX_SOLO_CRASHES < disturbed.crashes <= MOST_DEATHS
    assert disturbed.most_quarantined == 1
    assert disturbed.tokens == expected | {"poison": failed.output_token_ids}
    assert not any(gpu.used_pages for gpu in disturbed.dispatcher.policy.gpus.values())


def test_the_second_quarantine_is_final() -> None:
    record = CrashRecord()
    for _ in range(MAX_SHARED_CRASHES):
        assert not record.quarantined
        record.add_crash(shared=True)
    assert [record.add_token() for _ in range(PROBATION_TOKENS)] == [False] * (PROBATION_TOKENS - 1) + [True]
    assert not record.quarantined
    record.add_crash(shared=True)
    assert not any(record.add_token() for _ in range(2 * PROBATION_TOKENS))
    assert record.quarantined


def two_gpus(names: str) -> ClusterPolicy:
    """Build two GPUs for two requests each, and a queue of ``names``."""
    policy = ClusterPolicy(max_batch_size=2)
    for uuid in ("a", "b"):
        policy.add_gpu(uuid, 100)
    for name in names:
        policy.submit(name, 10, 40)
    return policy


def test_others_go_on_while_somebody_is_served_alone() -> None:
    """Neither kept waiting by it, nor beside it; its GPU is open to all again when nobody is to be served alone."""
    policy = two_gpus("uvwxy")
    assert policy.place() == [("u", "b"), ("v", "b"), ("w", "a"), ("x", "a")]
    policy.quarantine("u")
    policy.quarantine("v")
    assert policy.place() == [("u", "b")]
    policy.finish("w")
    assert policy.place() == [("y", "a")], "v waits, before it in the queue, and has its own"
    assert queued(policy) == ("v",)
    policy.quarantine("u", begins=False)
    assert policy.place() == [("v", "b")]
    assert queued(policy) == ("u",)
    policy.finish("v")
    assert policy.place() == [("u", "b")]
    assert not policy.gpus["b"].reserved


def test_the_gpu_set_apart_is_the_emptiest_and_whoever_is_there_may_finish() -> None:
    policy = two_gpus("uvw")
    policy.place()
    policy.submit("x", 10, 40)
    policy.quarantine("x")
    policy.submit("y", 10, 40)
    assert policy.place() == [], "w is on a, and nobody comes to it"
    policy.finish("u")
    assert policy.place() == [("y", "b")]
    policy.finish("w")
    assert policy.place() == [("x", "a")]


@pytest.mark.parametrize("taken_out", [False, True])
def test_who_has_left_a_runner_is_not_blamed_for_its_death(adapters, taken_out) -> None:
    world = LocalRunners.of(2)
    state = world.dispatcher.add(Request("r", [1, 2, 3], 12))

    def step() -> str:
        uuid = world.dispatcher.startable.pop()
        world.step(uuid)
        return uuid

    uuid = step()
    assert world.dispatcher.died(uuid, "it was alone there") == ()
    world.replace(uuid)
    left = [step() for _ in range(PROBATION_TOKENS)][-1]
    assert world.dispatcher.policy.gpus["runner-1"].members, "acquitted, and at home where the rule wants it"
    assert left == "runner-0"
    if taken_out:
        while step() != left:
            pass
    assert world.dispatcher.died(left, "it has left") == ()
    assert not any(request.quarantined for request in world.dispatcher.policy.requests.values())
    assert run(world) == {}
    assert state.output_token_ids == undisturbed([Request("r", [1, 2, 3], 12)])["r"]
    assert world.dispatcher.policy.gpus["runner-1"].step == 12 - 1 - PROBATION_TOKENS
