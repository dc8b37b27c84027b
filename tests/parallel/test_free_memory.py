"""What can still be allocated: the machine's memory, and what the container around this process leaves of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from punica.parallel import Need, check_free, free_bytes, memory
from punica.parallel.memory import container_bytes

CPU = torch.device("cpu")
UNLIMITED_V1 = 9223372036854771712
NAMES = {"v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), "v2": ("memory.max", "memory.current", "")}


def machine(root: Path, lines: list[str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    return root


def group(root: Path, version: str, path: str, limit: object, used: int, active: int = 0, inactive: int = 0) -> None:
    limit_name, used_name, prefix = NAMES[version]
    folder = root / "sys/fs/cgroup" / ("memory" if version == "v1" else "") / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    cached = {"active_file": active, "inactive_file": inactive, "active_anon": 7000}
    (folder / "memory.stat").write_text("".join(f"{prefix}{name} {value}\n" for name, value in cached.items()))


@pytest.mark.parametrize(("version", "path"), [("v1", ""), ("v1", "pod/box"), ("v2", ""), ("v2", "pod/box")])
def test_a_container_s_limit_less_what_it_holds_and_cannot_give_back(tmp_path, version, path) -> None:
    lines = {"v1": ["11:cpu,cpuacct:/", f"4:memory:/{path}", "0::/elsewhere"], "v2": [f"0::/{path}"]}
    group(machine(tmp_path, lines[version]), version, path, 10_000, 8_000, active=1_000, inactive=2_500)
    assert list(container_bytes(tmp_path)) == [10_000 - (8_000 - 3_500)]


def test_a_path_of_the_host_leaves_the_top_to_see(tmp_path) -> None:
    group(machine(tmp_path, ["0::/kubepods/pod1/box"]), "v2", "", 6_000, 1_000)
    assert list(container_bytes(tmp_path)) == [5_000]


@pytest.mark.parametrize("version", NAMES)
def test_every_group_above_counts(tmp_path, version) -> None:
    machine(tmp_path, ["4:memory:/pod/box", "0::/pod/box"])
    no_limit = UNLIMITED_V1 if version == "v1" else "max"
    group(tmp_path, version, "pod/box", no_limit, 500)
    group(tmp_path, version, "pod", 2_000, 1_500, inactive=100)
    group(tmp_path, version, "", no_limit, 900)
    assert min(container_bytes(tmp_path)) == 600


def test_no_groups_no_limit_or_nonsense(tmp_path) -> None:
    assert list(container_bytes(tmp_path)) == []  # another operating system
    group(machine(tmp_path, ["0::/../outside", "3:cpuset:/"]), "v2", "", "max", 100)
    assert list(container_bytes(tmp_path)) == []
    group(tmp_path, "v2", "", "no number", 100)
    assert list(container_bytes(tmp_path)) == []


def test_the_least_of_machine_and_container_counts(monkeypatch) -> None:
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000))
    for left, free in (([], 1_000), ([5_000], 1_000), ([5_000, 300], 300), ([-20], 0)):
        monkeypatch.setattr(memory, "container_bytes", lambda left=left: left)
        assert free_bytes(CPU) == free
    monkeypatch.setattr(memory, "container_bytes", lambda: [300])
    monkeypatch.setattr(memory, "get_tensor_model_parallel_world_size", lambda: 2)
    assert free_bytes(CPU) == 150


def test_several_allocations_are_checked_against_their_sum(monkeypatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100)
    needs = [Need("a cache", 60, "shorten it"), Need("3 slots", 41, "take two")]
    check_free(needs[:1], CPU)
    check_free([needs[0], Need("2 slots", 40, "")], CPU)
    check_free(needs, torch.device("meta"))
    both = r"^a cache \(60 bytes\) and 3 slots \(41 bytes\) would take 101 bytes, 100 .*; shorten it, or take two$"
    with pytest.raises(ValueError, match=both):
        check_free(needs, CPU)
    with pytest.raises(ValueError, match=r"^3 slots would take 101 bytes, 100 are free on cpu; take two$"):
        check_free([Need("3 slots", 101, "take two")], CPU)
