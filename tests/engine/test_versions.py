"""One version of an adapter per request, from its first token to its last, and ids that no request uses are free."""

import contextlib
import dataclasses
import random
import shutil
from pathlib import Path

import pytest

from punica.adapters import LoRARequest, random_adapter
from punica.engine import Engine, EngineConfig, Request, RequestState, RequestStatus
from punica.engine.runner import ModelRunner
from tests.engine.test_adapters_from_memory import in_memory
from tests.world import are_served, finish, is_of, step_until_it_runs, steps, tokens_of

ID = 9


class Tenant:
    """One folder that is overwritten again and again; which of the test's adapters is in it counts as its version."""

    def __init__(self, backbone, folder: Path) -> None:
        self.backbone, self.folder, self.version = backbone, folder, 0
        folder.mkdir()

    def write(self, version: int) -> None:
        self.version = version
        for file in Path(self.backbone.adapters[version].lora_path).iterdir():
            shutil.copy(file, self.folder / file.name)

    def asks(self, load_inplace: bool = False) -> LoRARequest:
        return LoRARequest("tenant", ID, str(self.folder), load_inplace=load_inplace)


@pytest.fixture
def tenant(backbone, tmp_path) -> Tenant:
    tenant = Tenant(backbone, tmp_path / "tenant")
    tenant.write(1)
    return tenant


RULES = ("fcfs", "fcfs_many", "resident_first", "single_adapter", "static", "static_mixed")
FEW_BLOCKS = {"block_size": 4, "num_blocks": 9}


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        ("fcfs", {}), ("fcfs", {"max_loras": 1}), ("fcfs", FEW_BLOCKS), ("resident_first", {"max_loras": 1}),
        ("single_adapter", FEW_BLOCKS), ("static_mixed", {}), ("static_mixed", {"max_loras": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_running_requests_keep_their_version_and_later_ones_have_the_new_one(backbone, tenant, rule, sizes) -> None:
    engine, states = backbone.engine(rule, **sizes), []
    for version in (1, 2, 3):
        tenant.write(version)
        for i in range(2):
            adapter = tenant.asks(load_inplace=i == 0)
            states.append((engine.add_request(Request(f"{version}{i}", [version, 7, i], 20, adapter)), version))
        step_until_it_runs(engine, states[-1][0])  # the next version is written while this one runs
    finish(engine)
    assert all(is_of(backbone, state, version) for state, version in states)
    if (rule, sizes) == ("fcfs", FEW_BLOCKS):
        assert sum(state.preemptions for state, _ in states) > 0


def test_versions_run_side_by_side_and_the_old_one_gives_its_slot_back(backbone, tenant) -> None:
    engine = backbone.engine(max_loras=2)
    old = engine.add_request(Request("old", [1, 7], 8, tenant.asks()))
    engine.step()
    tenant.write(2)
    new = engine.add_request(Request("new", [1, 7], 20, tenant.asks(load_inplace=True)))
    engine.step()
    assert len(engine.manager.active_versions()) == 2
    while old.status is not RequestStatus.FINISHED:
        engine.step()
    assert [version.key for version in engine.manager.active_versions()] == [ID]
    finish(engine)
    assert is_of(backbone, old, 1)
    assert is_of(backbone, new, 2)


def test_an_old_version_that_is_made_active_again_does_not_replace_an_evicted_new_one(backbone, tenant) -> None:
    engine = backbone.engine(max_loras=2)

    def run(name: str, adapter: LoRARequest) -> RequestState:
        state = engine.add_request(Request(name, [7, 8, 9], 2, adapter))
        while not state.has_ended:
            engine.step()
        return state

    old = engine.add_request(Request("old", [1, 2, 3], 50, tenant.asks()))
    steps(engine, 2)
    tenant.write(2)
    newer = [run("new", tenant.asks(load_inplace=True))]
    for i in (3, 4, 5):  # they evict version 2 while version 1 runs
        run(f"other {i}", backbone.adapters[i])
    newer.append(run("later", tenant.asks()))
    assert not old.has_ended
    finish(engine)
    newer.append(run("last", tenant.asks()))
    assert [is_of(backbone, state, 2) for state in newer] == [True] * 3
    assert is_of(backbone, old, 1)


def test_one_load_serves_all_that_had_arrived_and_the_next_arrival_loads_again(backbone, tenant, monkeypatch) -> None:
    engine = backbone.engine()
    loads, real = [], engine.manager._loader.load
    monkeypatch.setattr(engine.manager._loader, "load", lambda request: loads.append(tenant.version) or real(request))
    adapter = tenant.asks(load_inplace=True)  # the same object throughout, as a training loop may keep it
    for version in (1, 2):
        tenant.write(version)
        expected = [backbone.generate_merged((i, 5), version, 4) for i in range(5)]
        assert tokens_of(engine.generate([[i, 5] for i in range(5)], adapter, 4)) == expected
    assert loads == [1, 2]


@pytest.mark.parametrize(("by", "slots"), [("request", None), ("model", 1)])
def test_replacing_by_hand_under_a_running_request_changes_no_token_of_it(backbone, tenant, by, slots) -> None:
    """With one slot the versions take turns: they must not count as one adapter when a step is planned."""
    engine = backbone.engine(max_loras=slots)
    old = engine.add_request(Request("old", [1, 7], 12, tenant.asks()))
    steps(engine, 3)
    if by == "request":
        tenant.write(2)
        engine.manager.add_adapter(tenant.asks(load_inplace=True))
    else:
        engine.manager.remove_adapter(ID)
        engine.manager.add_adapter(random_adapter(ID, backbone.config, 8, seed=2))  # the weights of adapter 2
    new = engine.add_request(Request("new", [1, 7], 12, tenant.asks()))
    finish(engine)
    assert is_of(backbone, old, 1)
    assert is_of(backbone, new, 2)


@pytest.mark.parametrize("what", ["load", "copy"])
def test_a_new_version_that_fails_leaves_the_one_before(backbone, tenant, monkeypatch, what) -> None:
    engine = backbone.engine()
    running = engine.add_request(Request("running", [1, 7], 12, tenant.asks()))
    steps(engine, 3)
    tenant.write(2)
    wanted = engine.add_request(Request("wanted", [1, 7], 5, tenant.asks(load_inplace=True)))
    if what == "load":
        (tenant.folder / "adapter_model.safetensors").write_bytes(b"damaged")
    else:
        monkeypatch.setattr(engine.manager._writer, "write", lambda slot, lora: int("it fails"))
    later = engine.add_request(Request("later", [4, 7], 5, tenant.asks()))
    assert [result.request_id for result in engine.step().failed] == [wanted.request_id]
    monkeypatch.undo()
    finish(engine)
    assert (is_of(backbone, running, 1), is_of(backbone, later, 1)) == (True, True)


@pytest.mark.parametrize("slots", [3, 1])
def test_a_pin_passes_to_the_new_version(backbone, tenant, slots) -> None:
    """In the only slot it does when the running request has ended."""
    engine = backbone.engine(max_loras=slots)
    engine.manager.add_adapter(tenant.asks())
    engine.manager.pin_adapter(ID)
    old = engine.add_request(Request("old", [1, 7], 12, tenant.asks()))
    engine.step()
    tenant.write(2)
    new = engine.add_request(Request("new", [1, 7], 5, tenant.asks(load_inplace=True)))
    engine.step()
    assert engine.manager.pinned_adapters == {ID}
    finish(engine)
    assert (is_of(backbone, old, 1), is_of(backbone, new, 2)) == (True, True)
    assert engine.manager.lora_index_to_id.count(ID) == 1


def test_a_pinned_adapter_that_is_loaded_again_under_its_request_costs_no_step(backbone) -> None:
    engine = backbone.engine(max_batch_size=2, max_loras=2)
    states = [engine.add_request(Request(f"r{i}", [3, i], 20, backbone.adapters[i])) for i in (4, 5)]
    engine.step()
    engine.manager.pin_adapter(5)
    engine.manager.add_adapter(dataclasses.replace(backbone.adapters[5], load_inplace=True))
    assert engine.manager.pinned_adapters == {5}
    finish(engine)
    assert are_served(backbone, *states)


def disturb(engine: Engine, draw: random.Random, tenants: list[Tenant]) -> None:
    """Do what an owner may do to adapters and requests between two steps."""
    manager, place = engine.manager, draw.randrange(len(tenants))
    what = draw.choice(["write", "remove", "reload", "pin", "unpin", "preempt", "abort", "fill", "nothing", "nothing"])
    with contextlib.suppress(RuntimeError, ValueError):  # all slots are pinned, or nothing is registered
        if what == "write":
            tenants[place].write(draw.choice([1, 2, 3]))
        elif what == "remove":
            manager.remove_adapter(place + 1)
        elif what == "reload":
            tenant = LoRARequest(f"tenant {place}", place + 1, str(tenants[place].folder), load_inplace=True)
            manager.add_adapter(tenant)
        elif what == "pin" and not manager.pinned_adapters:
            manager.pin_adapter(place + 1)
        elif what == "unpin":
            [manager.unpin_adapter(adapter_id) for adapter_id in manager.pinned_adapters]
        elif what == "preempt" and engine.scheduler.running and not engine.scheduler.rule.inseparable:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        elif what == "abort" and engine._requests:
            engine.abort_request(draw.choice(sorted(engine._requests)))
        elif what == "fill":
            manager.add_adapter(tenants[0].backbone.adapters[draw.choice([4, 5])])


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 15))])
def test_whatever_happens_to_adapters_a_request_is_computed_with_one_version(
    backbone, tmp_path, monkeypatch, seed
) -> None:
    """Folders change, and adapters are removed, reloaded, pinned, evicted, and replaced by tensors, while requests use
    them.
    """
    draw = random.Random(seed)
    monkeypatch.setattr(ModelRunner, "works_ahead", draw.random() < 0.5)
    slots = draw.choice([1, 2, 3])
    sizes = EngineConfig(max_batch_size=8, max_model_len=64, block_size=4, num_blocks=draw.choice([16, 60]))
    loras = sizes.lora_config(16, max_loras=slots, max_cpu_loras=slots + draw.choice([0, 0, 1, 3]))
    engine = Engine(backbone.model(), loras, sizes, draw.choice(RULES))
    engine._residency._reads_beside = draw.random() < 0.5
    tenants = [Tenant(backbone, tmp_path / f"t{i}") for i in range(3)]
    for tenant in tenants:
        tenant.write(1)
    given = [[in_memory(backbone, v, lora_name=f"tenant {i}", lora_int_id=i + 1) for v in (1, 2, 3)] for i in range(3)]
    states: list[tuple[RequestState, tuple[int, ...]]] = []
    for number in range(30):
        place, new, versions = draw.randrange(3), draw.choice([1, 5, 14]), (1, 2, 3)
        folder, in_place = str(tenants[place].folder), draw.random() < 0.4
        adapter = LoRARequest(f"tenant {place}", place + 1, folder, load_inplace=in_place)
        if draw.random() < 0.3:
            versions = (draw.choice(versions),)
            adapter = given[place][versions[0] - 1]
        with contextlib.suppress(RuntimeError, ValueError):  # every slot is pinned, or the folder has changed
            request = Request(str(number), [place, draw.randrange(200)], new, adapter)
            states.append((engine.add_request(request), versions))
        for _ in range(draw.choice([0, 1, 1, 3])):
            engine.step()
            disturb(engine, draw, tenants)
    [engine.manager.unpin_adapter(adapter_id) for adapter_id in engine.manager.pinned_adapters]
    finish(engine)
    served = [(state, versions) for state, versions in states if state.status is RequestStatus.FINISHED]
    assert len(served) > 5
    assert all(any(is_of(backbone, state, version) for version in versions) for state, versions in served)


# --- ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "evict", "remove", "still registered", "in place"])
def test_an_id_is_free_when_no_request_uses_it(backbone, tenant, how) -> None:
    engine = backbone.engine(max_loras=1)
    other = LoRARequest("other", ID, backbone.adapters[2].lora_path)
    engine.add_request(Request("a", [1], 3, tenant.asks()))
    with pytest.raises(ValueError, match="adapter id 9 stands for"):
        engine.add_request(Request("b", [1], 3, other))
    if how == "abort":
        engine.abort_request("a")
    finish(engine)
    if how == "evict":
        engine.generate([[1]], [backbone.adapters[3]], 1)
    elif how == "in place":
        engine.generate([[1]], LoRARequest("third", ID, backbone.adapters[3].lora_path, load_inplace=True), 1)
    elif how == "remove":
        engine.manager.remove_adapter(ID)
    assert tokens_of(engine.generate([[1, 2]], [other], 4)) == [backbone.generate_merged((1, 2), 2, 4)]


@pytest.mark.parametrize("before", [0, 2], ids=["the other one waits", "the other one runs"])
def test_an_aborted_replacement_is_made_for_the_next_that_waits_for_it(backbone, tenant, before) -> None:
    engine = backbone.engine(max_batch_size=1)
    first = engine.add_request(Request("first", [1, 7], 6, tenant.asks()))
    steps(engine, before)
    path = backbone.adapters[2].lora_path
    engine.add_request(Request("replaces", [1], 3, LoRARequest("other", ID, path, load_inplace=True)))
    third = engine.add_request(Request("third", [2, 7], 4, LoRARequest("other", ID, path)))
    engine.abort_request("replaces")
    finish(engine)
    assert (is_of(backbone, first, 1), is_of(backbone, third, 2)) == (True, True)
