"""Registry: registering, finding, and the error of an unknown name."""

import pytest

from punica.registry import Registry


@pytest.fixture
def policies() -> Registry[type]:
    registry: Registry[type] = Registry("scheduling policy")

    @registry.register("fcfs")
    class Fcfs: ...

    @registry.register("single_adapter")
    class SingleAdapter: ...

    return registry


def test_entries_are_found_by_name_in_order_of_registration(policies: Registry[type]) -> None:
    assert policies.names() == ("fcfs", "single_adapter")
    assert policies.get("fcfs").__name__ == "Fcfs"


def test_unknown_name_lists_kind_name_known_names_and_remedy(policies: Registry[type]) -> None:
    with pytest.raises(ValueError) as raised:
        policies.get("fifo")
    for part in ("scheduling policy", "'fifo'", "fcfs, single_adapter", 'register("fifo")'):
        assert part in str(raised.value)


@pytest.mark.parametrize("name", [None, 3, ["fcfs"]], ids=["None", "int", "unhashable"])
def test_get_of_something_that_is_no_name_raises_the_same(policies: Registry[type], name: object) -> None:
    with pytest.raises(ValueError, match="unknown scheduling policy"):
        policies.get(name)  # type: ignore[arg-type]


def test_a_name_is_taken_once(policies: Registry[type]) -> None:
    first = policies.get("fcfs")
    with pytest.raises(ValueError, match="'fcfs' is already taken"):
        policies.register("fcfs")(int)
    assert policies.get("fcfs") is first


@pytest.mark.parametrize(("name", "error"), [(3, TypeError), ("", ValueError)])
def test_bad_names_are_refused(policies: Registry[type], name: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        policies.register(name)  # type: ignore[arg-type]
    assert len(policies.names()) == 2
