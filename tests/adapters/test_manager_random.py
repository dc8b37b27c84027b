"""Random operations on a manager and on a page of lists that says what they must do."""

import random

import pytest
import torch
from adapter_world import active_in_order, adapter, adapter_tensors, check_invariants, decode, unchanged

from punica.adapters import LoRAModel

IDS = range(1, 7)
BROKEN = 7  # its folder cannot be loaded
O_PROJ = "model.layers.0.self_attn.o_proj"


class TwoSets:
    """What the manager must do: lists in order of use, last = most recent. A refused operation raises its error."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.table: list[int | None] = [None] * slots
        self.capacity = capacity
        self.registered: list[int] = []
        self.active: list[int] = []
        self.pins: set[int] = set()
        self.models: set[int] = set()  # ids that were registered last as a `LoRAModel`: no folder may replace it

    def touch(self, i: int) -> None:
        for cache in (self.registered, self.active):
            if i in cache:
                cache.append(cache.pop(cache.index(i)))

    def room(self, *wanted: int) -> None:
        if len(self.pins.union(wanted)) > len(self.table):
            raise RuntimeError

    def oldest(self, cache: list[int]) -> int:
        for i in cache:
            if i not in self.pins:
                return i
        raise RuntimeError

    def register(self, i: int) -> None:
        if len(self.registered) == self.capacity:
            self.drop(self.oldest(self.registered))
        self.registered.append(i)

    def add(self, i: int) -> bool:
        if i in self.registered:
            self.touch(i)
            return False
        self.register(i)
        self.models.add(i)
        return True

    def activate(self, i: int) -> bool:
        if i not in self.registered:
            raise ValueError
        if i not in self.active:
            self.room(i)
            if None not in self.table:
                self.deactivate(self.oldest(self.active))
            self.table[self.table.index(None)] = i
            self.active.append(i)
            self.touch(i)
            return True
        self.touch(i)
        return False

    def deactivate(self, i: int) -> bool:
        if i not in self.active:
            return False
        self.active.remove(i)
        self.pins.discard(i)
        self.table[self.table.index(i)] = None
        return True

    def remove(self, i: int) -> bool:
        self.models.discard(i)
        return self.drop(i)

    def drop(self, i: int) -> bool:
        self.deactivate(i)
        if i not in self.registered:
            return False
        self.registered.remove(i)
        return True

    def evict(self) -> bool:
        return bool(self.registered) and self.drop(self.oldest(self.registered))

    def pin(self, i: int) -> bool:
        self.activate(i)
        self.pins.add(i)
        return True

    def unpin(self, i: int) -> bool:
        was_pinned = i in self.pins
        self.pins.discard(i)
        return was_pinned

    def step(self, wanted: list[int], reload: bool = False) -> None:
        if len(wanted) > len(self.table):
            raise RuntimeError
        if BROKEN in wanted or (not reload and self.models.intersection(wanted).difference(self.registered)):
            raise ValueError
        self.room(*wanted)
        pinned = self.pins.intersection(wanted) if reload else set()
        for i in wanted:
            self.touch(i)
        for i in wanted:
            if reload:
                self.remove(i)
            if i not in self.registered:
                self.register(i)
                self.models.discard(i)
        for i in wanted:
            self.activate(i)
        self.pins |= pinned


class Pair:
    """The manager and the lists; every operation is done to both and must have the same outcome."""

    def __init__(self, manager, tenants, expected: TwoSets) -> None:
        self.manager, self.tenants, self.expected = manager, tenants, expected
        self.weights = {i: adapter(i, modules=("o_proj",)) for i in IDS}
        for i in IDS:
            tenants.write(i, adapter_tensors(i, modules=("o_proj",)))
        tenants.write(BROKEN, use_dora=True)

    def both(self, actual, expected) -> str:
        """Outcome of a pair of calls; a refused one must leave everything as it was."""
        try:
            wanted: object = expected()
        except (RuntimeError, ValueError) as error:
            with unchanged(self.manager), pytest.raises(type(error)):
                actual()
            return type(error).__name__
        assert actual() == wanted
        return "done"

    def do(self, operation: str, ids: list[int]) -> str:
        manager, expected, i = self.manager, self.expected, ids[0]
        requests = {"load": i, "load a bad one": BROKEN, "reload": i}
        if operation == "add":
            return self.both(lambda: manager.add_adapter(self.weights[i]), lambda: expected.add(i))
        if operation == "add a bad one":
            return self.both(lambda: manager.add_adapter(LoRAModel(8, 4, {})), self.refuse)
        if operation in requests:
            reload, i = operation == "reload", requests[operation]
            request = self.tenants.request(i, load_inplace=reload)
            return self.both(lambda: manager.add_adapter(request), lambda: expected.step([i], reload=reload) or True)
        if operation in ("step", "step with a bad one"):
            wanted = [*ids, BROKEN] if operation != "step" else ids
            requests = [self.tenants.request(j) for j in wanted]
            call = lambda: manager.set_active_adapters(requests, decode(*wanted))  # noqa: E731
            return self.both(call, lambda: expected.step(wanted))
        if operation == "prefetch":
            return self.both(lambda: manager.prefetch_adapter(i).is_ready(), lambda: (expected.activate(i), True)[1])
        if operation == "evict":
            return self.both(manager.remove_oldest_adapter, expected.evict)
        return self.both(lambda: getattr(manager, f"{operation}_adapter")(i), lambda: getattr(expected, operation)(i))

    @staticmethod
    def refuse() -> None:
        raise ValueError

    def check(self) -> None:
        manager, expected = self.manager, self.expected
        check_invariants(manager)
        assert list(manager.list_adapters()) == expected.registered
        assert active_in_order(manager) == expected.active
        assert manager.lora_index_to_id == expected.table
        assert manager.pinned_adapters == expected.pins
        layer = manager.modules[O_PROJ]
        for slot, i in enumerate(expected.table):
            if i is not None:
                assert torch.equal(layer.lora_a_stacked[0][slot, 0, :4], self.weights[i].get_lora(O_PROJ).lora_a)


OPERATIONS = [
    *("add", "activate", "prefetch", "pin", "unpin", "evict", "deactivate", "remove", "load", "reload", "step"),
    *("add", "activate", "unpin", "load", "step"),  # more often
    *("add a bad one", "load a bad one", "step with a bad one"),
]


@pytest.mark.parametrize(("slots", "capacity"), [(1, 1), (1, 3), (2, 2), (2, 3), (3, 5)])
def test_random_operations_against_a_simple_model(make_manager, tenants, slots, capacity):
    choose = random.Random(1000 * slots + 100 * capacity)
    pair = Pair(make_manager(max_loras=slots, max_cpu_loras=capacity), tenants, TwoSets(slots, capacity))
    outcomes: set[tuple[str, str]] = set()
    operations = [*OPERATIONS, *["pin"] * 8] if slots == capacity else OPERATIONS
    for _ in range(200):
        ids = choose.sample(IDS, choose.randint(1, slots))
        operation = choose.choice(operations)
        outcomes.add((operation, pair.do(operation, ids)))
        pair.check()
    refused = {operation for operation, outcome in outcomes if outcome != "done"}
    assert {"activate", "add a bad one", "load a bad one", "step with a bad one"} <= refused
    assert {operation for operation, outcome in outcomes if outcome == "done"} >= set(OPERATIONS) - refused
    if (slots, capacity) == (2, 2):  # it is worth something only where it hurts: refused for pins
        assert {operation for operation, outcome in outcomes if outcome == "RuntimeError"} >= {"add", "load", "step"}
