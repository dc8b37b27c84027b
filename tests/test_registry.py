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
    first = policies.get("fcfs")
    assert first.__name__ == "Fcfs"
    with pytest.raises(ValueError, match="'fcfs' is already taken"):
        policies.register("fcfs")(int)
    assert policies.get("fcfs") is first


@pytest.mark.parametrize("name", ["fifo", None, ["fcfs"]], ids=["unknown", "None", "unhashable"])
def test_unknown_names_are_told_with_those_that_exist(policies: Registry[type], name: object) -> None:
    with pytest.raises(ValueError, match=r"unknown scheduling policy .*fcfs, single_adapter"):
        policies.get(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "error"), [(3, TypeError), ("", ValueError)])
def test_bad_names_are_refused(policies: Registry[type], name: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        policies.register(name)  # type: ignore[arg-type]
    assert len(policies.names()) == 2
