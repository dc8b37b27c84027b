"""Costs of claims: `explained` needs this machine and the A100, both within a quarter, and the bound between them."""

from dataclasses import replace

import pandas as pd
import pytest
from claim_rows import BOUNDS, PAPER, verdict_of

from experiments.claims import CLAIMS
from experiments.claims.costs import COSTS, FORMULAS
from experiments.claims.costs import explain as explaining
from experiments.claims.costs.ends import ends_of, misses, off, told
from experiments.claims.costs.explain import explain, on_an_a100, paper_machine
from experiments.claims.costs.machine import README, Machine
from experiments.claims.costs.prices import in_unit, predicted
from experiments.claims.evidence import Evidence
from experiments.claims.judge import DIFFERS, EXPLAINED, NOT_TESTABLE
from experiments.claims.rows import Rows
from experiments.facts.paper import a100, claim_clocks

CLOCK = "host_clock"


def slower(rows, query, factor):
    """``rows`` with the values of ``query`` times ``factor``."""
    hit = rows.query(query).index
    assert len(hit), query
    return rows.assign(value=rows["value"].where(~rows.index.isin(hit), rows["value"] * factor))


def changed(rows, changes):
    """``rows`` of a machine with other speeds."""
    for query, factor in changes:
        rows = slower(rows, query, factor)
    return rows


def as_priced(rows, id, machine):
    """``rows`` of a ``machine`` that takes what the cost of claim ``id`` says, given its calibration in ``rows``."""
    taken = {}

    def price(row):
        if function := FORMULAS.get((row.figure, row.system, row.metric)):
            taken[row.Index] = in_unit(row, sum(function(machine, row).values()))

    chosen = Rows(rows)
    CLAIMS[id](chosen)
    chosen.priced(chosen.asked, COSTS[id], price)
    return rows.assign(value=rows["value"].where(~rows.index.isin(taken), rows.index.map(taken)))


PROJECTION = f"figure == '{README}' and system == 'backbone X@W'"
LAUNCH = "system == 'SGMV' and workload == 'Distinct' and batch_size == 1 and figure in ('8', '9')"
BANDWIDTH = "figure == '7' and metric == 'memory_bandwidth_line'"
SLOW_MEMORY, ENDLESS_MEMORY = (BANDWIDTH, 0.05), (BANDWIDTH, 1e18)
ROWS_COST, ROWS_COST_ALL = (f"{PROJECTION} and batch_size > 1", 4.0), (f"{PROJECTION} and batch_size > 1", 1e4)
MANY_ROWS_COST = (f"{PROJECTION} and batch_size >= 32", 100.0)
ONE_ROW_COSTS = (f"{PROJECTION} and batch_size == 1", 10.0)
NO_LAUNCH, SLOW_LAUNCH = (LAUNCH, 0.1), (LAUNCH, 30.0)
SLOW_PROMPTS = ("figure == '1' and panel == 'prefill'", 4.0)
SLOW_LINK = ("figure == 'text 5.2' and metric == 'bandwidth'", 0.02)
# claim, changes of the A100 on whose cost its relation holds, changes of the A100 without the released code's ways on
# whose cost it does not
TURNED = {
    **{id: ([], [ROWS_COST]) for id in ("C01", "C29", "C34", "C39")},
    **{
        id: ([], [SLOW_MEMORY])
        for id in ("C02", "C04", "C06", "C07", "C08", "C09", "C10", "C11", "C14", "C19", "C20", "C21", "C22", "C38")
    },
    **{id: ([], [ROWS_COST_ALL]) for id in ("C12", "C17", "C25", "C33")},
    "C03": ([], [ROWS_COST_ALL, SLOW_MEMORY]),
    **{id: ([], [ENDLESS_MEMORY]) for id in ("C16", "C23")},
    **{id: ([], [ONE_ROW_COSTS]) for id in ("C24", "C28")},
    **{id: ([], []) for id in ("C13", "C26", "C27", "C30")},
    **{id: ([SLOW_MEMORY], []) for id in ("C31", "C40", "C41", "C45")},
    "C32": ([], [MANY_ROWS_COST]),
    "C37": ([ROWS_COST], []),
    "C42": ([], [NO_LAUNCH]),
    "C43": ([], [SLOW_LINK]),
    "C51": ([], [SLOW_PROMPTS]),
    "C52": ([], [SLOW_LAUNCH]),
}
MANY_POINTS = {"C12", "C30"}
"""Claims whose points take longest to search."""


@pytest.fixture(scope="module")
def rows(paper_rows):
    """The paper's rows at a few batch sizes and lengths, with the latency of Figure 7 alone."""
    few = paper_rows["batch_size"].isin((1, 2, 4, 16, 32, 64)) | paper_rows["batch_size"].isna()
    lengths = paper_rows["figure"].map({"1": 128, "10": 512})
    few &= paper_rows["seq_len"].isin((2048, float("nan"))) | (paper_rows["seq_len"] == lengths)
    other = (paper_rows["figure"] == "13") | paper_rows["metric"].str.startswith("achieved_")
    return paper_rows[few & ~other].reset_index(drop=True)


@pytest.fixture(scope="module")
def a_machine(rows):
    """The rows' machine: an A100 with kernels and served steps as ours are."""
    usual = Rows(rows)
    return Machine(usual, usual, launches=True)


def test_every_cost_has_a_change_of_the_machine_that_turns_its_verdict():
    assert set(TURNED) == set(COSTS)


def explained_rows(rows, id, monkeypatch):
    """Rows of a machine, and for this test an A100, that take what the cost of claim ``id`` says."""
    of_paper, here = TURNED[id]
    paper = changed(rows, of_paper)
    machine = Machine(Rows(paper), Rows(paper), launches=True, stated=a100(PAPER))
    papers = Rows(as_priced(paper, id, machine))
    monkeypatch.setattr(explaining, "paper_machine", lambda folder: (papers, machine))
    monkeypatch.setattr(explaining, "on_an_a100", on_an_a100.__wrapped__)
    calibrated = changed(rows, here).assign(hardware="h200", timer=CLOCK)
    return as_priced(calibrated, id, Evidence(calibrated, PAPER).machine(CLOCK))


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=[pytest.mark.slow] if id in MANY_POINTS else []) for id in sorted(COSTS)]
)
def test_a_machine_explains_what_its_calibration_tells_and_nothing_else(rows, id, monkeypatch):
    """Both sides take what the cost says: the claim is explained. Another time of a deciding point: it differs."""
    measured = explained_rows(rows, id, monkeypatch)
    cost = predicted(id, Rows(measured), Evidence(measured, PAPER).machine(CLOCK))
    ends = dict.fromkeys(end.row.Index for points in ends_of(cost).values() for end in points[:2])
    monkeypatch.setattr(explaining, "ends_of", lambda cost: {})  # of a sentence, which other tests read
    explained = verdict_of(measured, id)
    assert (explained.verdict, explained.why[-11:]) == (EXPLAINED, ": explained")
    assert "in the paper" in explained.why
    broken = (verdict_of(slower(measured, f"index == {end}", factor), id) for end in ends for factor in (2.5, 0.4))
    differing = next(one for one in broken if one.verdict == DIFFERS)
    assert ": not explained, as " in differing.why


def test_ends_that_are_off_alike_explain_no_ratio(rows, monkeypatch):
    measured = explained_rows(rows, "C01", monkeypatch)
    assert verdict_of(measured, "C01").verdict == EXPLAINED
    both = verdict_of(slower(measured, "figure == '1' and panel == 'decode' and seq_len == 128", 1.5), "C01")
    assert both.verdict == DIFFERS
    assert ": not explained, as here ratio is predicted 0 % (batch 32 -33 %, batch 1 -33 %)" in both.why


def test_a_cost_that_meets_a_bound_explains_no_miss_of_it(rows, a_machine):
    """A ratio of 1.14 is within a quarter of 1.4, but it does not say why 1.3 is missed."""
    bounds, cost = {"relation": [], "shape": BOUNDS["C11"]["shape"]}, predicted("C11", Rows(rows), a_machine)
    near = explain({"ratio": 1.3}, replace(cost, quantities={"ratio": 1.14}), bounds, PAPER)
    assert not near.holds
    assert ": not explained, as the cost here meets ratio <= 1.2 (batch 64 " in near.text
    explained = explain({"ratio": 1.3}, replace(cost, quantities={"ratio": 1.25}), bounds, PAPER)
    assert explained.holds
    numbers = "ratio 1.3 here, 1.25 predicted; 1.04 predicted for an A100, 1.08 in the paper. Here (SGMV, Identical) "
    assert explained.text.startswith(numbers)
    far = explain({"ratio": 1.7}, replace(cost, quantities={"ratio": 1.25}), bounds, PAPER)
    assert ": not explained, as here ratio is predicted -26 % (batch 64 " in far.text


def test_a_reason_names_both_ends_with_the_terms_of_their_predictions(rows, a_machine):
    """C01: the batch that is measured slow is the one that is off, and terms add up to the prediction."""
    cost = predicted("C01", Rows(rows), a_machine)
    usual = {int(end.row.batch_size): end for end in ends_of(cost)["ratio"]}
    assert set(usual) == {1, 32}
    assert usual[32].terms.keys() >= {"products", "cached tokens", "kernels' floors"}
    assert in_unit(usual[32].row, sum(usual[32].terms.values())) == pytest.approx(usual[32].value)
    slow = slower(rows, "figure == '1' and panel == 'decode' and seq_len == 128 and batch_size == 32", 3.0)
    judged = verdict_of(slow.assign(hardware="h200", timer=CLOCK), "C01")
    assert judged.verdict == DIFFERS
    assert "Here (backbone, len 128) batch 32 41.1 ms, " in judged.why
    assert " predicted = products " in judged.why
    off_by = judged.why.rpartition("not explained, as here ratio is predicted ")[2]
    assert off_by.startswith("0.29-fold (batch 32 0.4-fold, batch 1 +41 %)")


def test_an_end_of_a_minimum_is_the_point_that_is_smallest(rows, a_machine):
    """C12: one of many batch sizes, where Gather-BMM was made quick."""
    quick = slower(rows, "figure == '8' and system == 'Gather-BMM' and workload == 'Skewed' and batch_size == 16", 0.1)
    ends = ends_of(predicted("C12", Rows(quick), a_machine))["smallest"]
    assert {(end.row.system, end.row.workload, end.row.batch_size) for end in ends} == {
        ("Gather-BMM", "Skewed", 16), ("SGMV", "Skewed", 16),
    }  # fmt: skip
    assert told(ends, "").startswith("(Skewed, batch 16) ")
    assert misses(ends).startswith("Gather-BMM ")


@pytest.mark.parametrize(
    ("predicted_", "measured", "said"),
    [(1.1, 1.0, "+10 %"), (0.75, 1.0, "-25 %"), (1.0, 1.001, "0 %"), (5.0, 1.0, "5-fold"), (0.1, -0.1, "0.1 for -0.1")],
)
def test_a_miss_is_told_in_percent_or_as_a_factor(predicted_, measured, said):
    assert off(predicted_, measured) == said


def test_few_blocks_leave_bandwidth_of_an_a100_unused_and_not_ours(rows, a_machine):
    """A head of a row has one of 108 processors in the released kernels."""
    _, paper = paper_machine(PAPER)
    assert paper.shared_out(1e9, 32) == pytest.approx(108 / 32 * paper.numbers(1e9))
    assert paper.shared_out(1e9, 1024) == pytest.approx(paper.numbers(1e9))
    assert a_machine.shared_out(1e9, 1) == pytest.approx(a_machine.numbers(1e9))


def test_a_host_waits_for_one_operator_and_issues_the_others(rows, a_machine):
    """The line through X @ W and the unfused norm; without a common clock every operator counts as a call."""
    one, two, three = (a_machine.operators(count, "8") for count in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert one > two - one
    assert a_machine.wait("8") == pytest.approx(one - (two - one))
    assert a_machine.operators(8, "8") == pytest.approx(110e-6)
    clocks = Rows(rows.assign(timer=rows["figure"].map({"text 6": "host_clock"}).fillna("cuda_graph")))
    mixed = Machine(clocks, clocks, launches=True)
    assert mixed.operators(3, "8") == pytest.approx(3 * mixed.call("8"))


def test_a_cpu_has_one_floor_per_call_and_adds_bytes_and_flop(rows, a_machine):
    usual = Rows(rows)
    cpu = Machine(usual, usual, launches=False)
    assert cpu.operators(5, "8") == cpu.call("8") == pytest.approx(2 * a_machine.call("8"))
    bytes_alone = cpu.element / cpu.bandwidth
    assert cpu.weights(1, 64, README) == pytest.approx(bytes_alone + 2 * 64 / cpu._prompt_flops)
    assert a_machine.weights(1, 64, README) == pytest.approx(max(bytes_alone, 2 * 64 / a_machine._prompt_flops))
    assert cpu.small == pytest.approx(4e-6)


def test_the_papers_served_steps_have_one_adapter(rows):
    """D04: its flatness over workloads is that of its harness, so that an engine with 31 adapters differs by cost."""
    assert on_an_a100("C26", PAPER).cost.quantities["min_over_max"] == pytest.approx(1.0)
    usual = Rows(rows)
    assert predicted("C26", usual, Machine(usual, usual, launches=True)).quantities["min_over_max"] < 0.95


@pytest.mark.parametrize("id", sorted(COSTS))
def test_no_cost_reads_the_times_that_it_predicts(rows, id):
    """Other times of the claim's own rows leave the prediction where it is, also as calibration of the machine."""
    frame, stated = rows.reset_index(drop=True), paper_machine(PAPER)[1].stated
    usual = Rows(frame)
    CLAIMS[id](usual)
    figures, systems = set(usual.asked), COSTS[id]
    own = frame["figure"].isin(figures) & frame["system"].isin(systems) & frame["unit"].isin(("us", "ms", "token/s"))
    assert own.any()
    slow = Rows(frame.assign(value=frame["value"].where(~own, frame["value"] * (1.1 + frame.index % 7))))
    before, after = (predicted(id, one, Machine(one, one, launches=True, stated=stated)) for one in (usual, slow))
    assert dict(after.quantities) == pytest.approx(dict(before.quantities))


@pytest.mark.parametrize(
    ("id", "untestable"), [("C13", True), ("C14", True), ("C43", True), ("C45", True), ("C12", False)]
)
def test_a_claim_whose_cost_needs_launches_or_a_copy_engine_is_not_testable_on_a_cpu(paper_rows, id, untestable):
    """Whatever its value is: the same rows of a GPU are judged."""
    assert (verdict_of(paper_rows.assign(hardware="cpu"), id).verdict == NOT_TESTABLE) == untestable
    assert verdict_of(paper_rows.assign(hardware="h200"), id).verdict != NOT_TESTABLE


def test_every_claim_on_an_operator_names_its_clock():
    clocks = claim_clocks(PAPER)
    timed = {figure for figure, *_ in FORMULAS} - {"1", "11", "12", "text 5.2"}
    operators = {id for id in COSTS if set(_figures(id)) & timed} - {"C25"}  # whose other side is a served step
    assert set(clocks) == operators | {"C15"}  # whose cost is the same in all that it compares, so that it has none


def _figures(id):
    rows, _ = paper_machine(PAPER)
    rows.asked.clear()
    CLAIMS[id](rows)
    return set(rows.asked)


def test_the_clock_of_the_paper_decides_and_the_other_stands_beside(rows):
    """C11, whose number in the paper contains the host."""
    host = rows.assign(hardware="h200", timer="host_clock")
    graph = slower(host.assign(timer="cuda_graph"), "batch_size == 64 and figure == '8'", 2.0)
    judged = verdict_of(host.assign(timer="cuda_graph"), "C11")
    assert (judged.clock, judged.other_clock) == ("cuda_graph", "")
    both = verdict_of(pd.concat([host, graph], ignore_index=True), "C11")
    assert (both.verdict, both.clock) == ("reproduced", "host_clock")
    assert both.other_clock.startswith("by cuda_graph: differs, 2.15 Identical")


def test_a_value_at_its_bound_says_so(paper_rows):
    at_the_edge = slower(paper_rows, "figure == '8' and workload == 'Identical' and batch_size == 64", 1.11)
    judged = verdict_of(at_the_edge, "C11")
    assert judged.remark == (
        "at the edge: ratio is 1.195, 1.2 % from its bound ratio <= 1.18; "
        "ratio is 1.195, 0.4 % from its bound ratio <= 1.2"
    )
