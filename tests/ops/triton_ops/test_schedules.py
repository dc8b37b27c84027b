"""Candidates, estimate and choice of schedules, and the tables of measured ones."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from punica.metadata import StepShape
from punica.ops.triton_ops import Options, clear_config_cache, schedules, tuned
from punica.ops.triton_ops.configs import choose
from punica.ops.triton_ops.schedules import (
    Gpu,
    Problem,
    Schedule,
    choose_expand,
    choose_shrink,
    expand_schedules,
    expand_us,
    shrink_schedules,
    shrink_us,
    tiles_of,
)

H200, SMALL = Gpu(), Gpu(24, 99 << 10, 0.2e6)
H100 = Gpu(132, 227 << 10, schedules.REACHED * 3.35e6)
CPU = torch.device("cpu")
ROWS, ADAPTERS, RANKS = (1, 3, 64, 512, 8192), (1, 5, 64), (1, 16, 100, 256, 512)
LAYERS = ((100, (33,)), (4096, (4096, 1024, 1024)), (14336, (4096, 4096)))


def problem(rows: int = 64, adapters: int = 1, rank: int = 16, **changes: object) -> Problem:
    return Problem(StepShape.even(adapters, rows), rows, 4096, (4096,), rank)._replace(**changes)


def problems(**changes: object) -> list[Problem]:
    return [
        problem(rows, adapters, rank, k=k, widths=widths, **changes)
        for rows, adapters, rank, (k, widths) in itertools.product(ROWS, ADAPTERS, RANKS, LAYERS)
    ]


def is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def check_legal(schedule: Schedule) -> None:
    block_m, block_n, block_k, *_ = schedule
    assert all(map(is_power, (block_n, block_k, schedule.num_warps, schedule.tiles_n)))
    assert block_m in (0, 8, 16, 32, 64)
    assert min(schedule.num_stages, schedule.split_k) >= 1
    assert schedule.num_warps <= 8
    assert block_n * block_k <= 1 << 16
    assert 2 * (block_n * block_k + block_m * (block_n + block_k)) <= H200.shared_memory


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("element", [1, 2, 4])
def test_candidates_are_legal_and_the_choice_is_the_least_estimate(element, by_rows, invariant):
    for one in problems(element=element, by_rows=by_rows, invariant=invariant):
        for shrinks, gpu in itertools.product((True, False), (H200, H100, SMALL)):
            found = list(shrink_schedules(one, gpu) if shrinks else expand_schedules(one, gpu))
            assert 1 <= len(found) == len(set(found)) <= 40
            for schedule in found:
                check_legal(schedule)
            us = [shrink_us(one, s, gpu) if shrinks else expand_us(one, s, 2, gpu) for s in found]
            best = choose_shrink(one, gpu) if shrinks else choose_expand(one, 2, gpu)
            assert 0 < min(us) <= max(us) < 1e6
            assert best == found[us.index(min(us))]


@pytest.mark.parametrize("gpu", [H200, H100, SMALL], ids=["H200", "H100", "small"])
def test_distinct_rows_are_multiplied_one_by_one_and_a_long_segment_in_tiles(gpu):
    for rows, rank in itertools.product((1, 4, 64), (8, 64)):
        distinct = problem(rows, rows, rank)
        assert choose_shrink(distinct, gpu).block_m == choose_expand(distinct, 1, gpu).block_m == 0
    for rows, rank in itertools.product((512, 8192), (8, 64, 256)):
        long = problem(rows, 1, rank)
        assert min(choose_shrink(long, gpu).block_m, choose_expand(long, 1, gpu).block_m) > 0


def test_few_rows_of_a_wide_k_are_split_and_many_are_not():
    assert choose_shrink(problem(16, k=14336), H200).split_k >= 4
    assert choose_shrink(problem(16384, k=14336), H200).split_k == 1


@pytest.mark.parametrize("element", [1, 2])
def test_invariant_bits_follow_from_the_layer_alone(element):
    """Neither split nor instruction depends on rows or adapters, nor, above 32 lanes, the block of K."""
    for rank, (k, widths) in itertools.product(RANKS, LAYERS):
        steps = [
            problem(rows, adapters, rank, k=k, widths=widths, element=element, invariant=True)
            for rows, adapters in itertools.product(ROWS, ADAPTERS)
        ]
        shrinks, expands = {choose_shrink(one, H200) for one in steps}, {choose_expand(one, 4, H200) for one in steps}
        wide = rank > schedules.WARP_LANES
        assert len({(s.swap_ab, s.block_n, s.split_k, s.num_warps, wide and s[:3]) for s in shrinks}) == 1
        assert len({(s.swap_ab, s.block_k, s.num_warps) for s in expands}) == 1
        assert all(s.swap_ab and s.block_m for s in shrinks | expands)


def test_tiles_of_many_ranks_need_full_rows_and_the_shared_memory_of_one_pass():
    """Their weights and sums fit the registers; a prompt beside 31 decodes of other adapters keeps low tiles."""
    for rank, columns in ((128, 128), (256, 64)):
        long = problem(4096, 2, rank)
        assert {schedule[:2] for schedule in expand_schedules(long, H200) if schedule.block_m} == {(64, columns)}
        mixed = long._replace(rows=543, widths=(4096, 4096, 4096), shape=StepShape(32, 512))
        assert {16, 32} < {schedule.block_m for schedule in expand_schedules(mixed, H200)}
    assert 256 in {schedule.block_n for schedule in expand_schedules(problem(4096, 2, 256), SMALL)}


def test_equal_segments_make_full_tiles():
    assert tiles_of(StepShape(16, 128), 2048, 64) == tiles_of(StepShape(1, 2048), 2048, 64) == 32
    assert tiles_of(StepShape(16, 256), 2048, 64) == 36
    assert tiles_of(StepShape(64, 2), 100, 16) == 64
    assert tiles_of(StepShape(4, 32), 64, 16) == 4


def test_a_gpu_is_described_by_its_properties(monkeypatch):
    kinds = {"multi_processor_count": 132, "memory_clock_rate": 2619000, "memory_bus_width": 5120}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(schedules, "shared_memory", lambda device: 99 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**kinds))
    found = Gpu.of.__func__.__wrapped__(Gpu, torch.device("cuda:0"))
    assert found == (132, 99 << 10, pytest.approx(0.87 * 3.352e6, rel=1e-3))
    del kinds["memory_clock_rate"]
    assert Gpu.of.__func__.__wrapped__(Gpu, torch.device("cuda:0")).memory == H200.memory
    assert Gpu.of(CPU) == H200


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of tables, empty."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    clear_config_cache()
    yield tmp_path
    clear_config_cache()


def test_keys_round_rows_up_and_tell_operators_apart():
    one = problem(50, 7, widths=(64, 32))
    assert tuned.key_of(one) == "4096 -> 64+32 r16, 64 rows of 8, longest 8, 2 bytes"
    assert tuned.key_of(one._replace(rows=64)) == tuned.key_of(one)
    others = {"rows": 65, "k": 8, "widths": (96,), "rank": 8, "element": 1, "shape": StepShape(4, 16)}
    assert len({tuned.key_of(one), *[tuned.key_of(one._replace(**{k: v})) for k, v in others.items()]}) == 7


def test_measured_schedules_come_before_the_estimate(folder):
    one, shrink = problem(), Schedule(64, 16, 128, split_k=3)
    entries = {tuned.key_of(one): {"shrink": list(shrink)}}
    (folder / tuned.table_name("NVIDIA H200-X")).write_text(json.dumps({"operators": entries}))
    (folder / tuned.table_name("cpu")).write_text(json.dumps({"operators": entries}))
    assert sorted(path.name for path in folder.iterdir()) == ["cpu.json", "nvidia_h200_x.json"]
    assert tuned.measured_schedule("shrink", one, "NVIDIA H200-X") == shrink
    assert tuned.measured_schedule("expand", one, "NVIDIA H200-X") is None
    for other in (one._replace(rank=8), one._replace(by_rows=True)):
        assert tuned.measured_schedule("shrink", other, "NVIDIA H200-X") is None
    assert tuned.read_table("NVIDIA H200") == {}
    if not torch.cuda.is_available():
        assert choose("shrink", one, Options(), CPU) == shrink
        assert choose("expand", one, Options(), CPU) == choose_expand(one, 1, H200)
        assert choose("shrink", one, Options(batch_invariant=True), CPU).swap_ab


@pytest.mark.parametrize("entry", [{"shrnk": list(Schedule(64, 16, 128))}, {"shrink": [64, 16, 128]}])
def test_entries_of_another_form_are_refused(entry, folder):
    (folder / "cpu.json").write_text(json.dumps({"operators": {"one": entry}}))
    with pytest.raises(ValueError, match=r"cpu.json, operator 'one': .* is no schedule of shrink or expand, whose 8"):
        tuned.read_table("cpu")


def test_shipped_tables_can_be_read():
    for path in tuned.FOLDER.glob("*.json"):
        for key, entry in tuned.read_table(path.stem).items():
            assert set(entry) <= {"shrink", "expand"}, key
