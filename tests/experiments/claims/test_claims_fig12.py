"""Claims about 70B count as the paper's where eight GPUs share the model; on fewer their shape is judged."""

import pandas as pd
import pytest
from claim_rows import verdict_of

from experiments.claims import VERDICTS

REPRODUCED, SHAPE, _, DIFFERS, _, _, _, NOT_MEASURED, NOT_TESTABLE, _ = VERDICTS


def on_gpus(paper_rows, gpus: int, model: str = "llama2-70b") -> pd.DataFrame:
    """The paper's Figure 12 as if we had measured it on that many H200s, under both index rules."""
    rows = paper_rows[(paper_rows["figure"] == "12") & (paper_rows["metric"] == "throughput")]
    released = rows[rows["system"] == "punica"].assign(system="punica_last_admitted")
    rows = pd.concat([rows, released], ignore_index=True)
    return rows.assign(panel=f"70B Model, tp {gpus}", model=model, hardware="h200", kind="measured")


@pytest.mark.parametrize("id", ["C38", "C39", "C40", "C30"])
@pytest.mark.parametrize(("gpus", "verdict"), [(8, REPRODUCED), (2, SHAPE)])
def test_the_papers_values_reproduce_on_eight_gpus_alone(paper_rows, id, gpus, verdict) -> None:
    judged = verdict_of(on_gpus(paper_rows, gpus), id)
    assert judged.verdict == verdict
    assert ("on 2 GPUs" in judged.our_value) == (gpus == 2)


@pytest.mark.parametrize("id", ["C38", "C39", "C40"])
def test_on_two_gpus_the_shape_can_still_fail(paper_rows, id) -> None:
    rows = on_gpus(paper_rows, 2)
    slow = rows["system"].eq("punica") & rows["workload"].ne("Uniform")
    assert verdict_of(rows.assign(value=rows["value"].where(~slow, rows["value"] / 2)), id).verdict == DIFFERS


def test_of_several_numbers_of_gpus_the_most_are_judged(paper_rows) -> None:
    half = on_gpus(paper_rows, 2)
    both = pd.concat([on_gpus(paper_rows, 8), half.assign(value=1.0)], ignore_index=True)
    assert verdict_of(both, "C38").verdict == REPRODUCED


def test_speedups_are_judged_without_a_model_that_lacks_a_workload_and_name_it(paper_rows) -> None:
    half = on_gpus(paper_rows, 2)
    half = half[half["workload"] != "Uniform"]
    assert verdict_of(half, "C30").verdict == NOT_MEASURED
    others = paper_rows[paper_rows["figure"] == "11"].assign(hardware="h200", kind="measured")
    judged = verdict_of(pd.concat([others, half], ignore_index=True), "C30")
    assert judged.verdict == REPRODUCED
    assert "left out: punica was not measured on Uniform (llama2-70b)" in judged.our_value


def test_a_smaller_model_on_ranks_is_no_70b_and_no_figure_11(paper_rows) -> None:
    small = on_gpus(paper_rows, 2, model="llama2-7b")
    assert verdict_of(small, "C38").verdict == NOT_MEASURED
    assert verdict_of(small, "C28").verdict == NOT_MEASURED
    tiny = small.assign(model="llama-tiny", hardware="cpu")
    assert verdict_of(tiny, "C38").verdict == NOT_TESTABLE
    both = pd.concat([tiny, paper_rows[paper_rows["figure"] == "11"].assign(hardware="cpu")], ignore_index=True)
    assert "70B" not in verdict_of(both, "C28").our_value
