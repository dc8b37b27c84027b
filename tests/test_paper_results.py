"""The paper's numbers as data: columns, readability, and facts that any copy must keep."""

import csv
from pathlib import Path

import pytest
import yaml

from experiments.facts.paper import FIGURE_FILES, SOURCES, as_rows, read_claims, read_figure
from experiments.measure.records import COLUMNS, RowsError
from experiments.workload import PAPER_WORKLOADS, popularity, released_lengths

PAPER = Path(__file__).parents[1] / "paper_results"
KEY = ["figure", "panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "metric"]
HEADER = [*KEY, "value", "unit", "source", "precision", "note"]
ROWS = {"1": 344, "7": 1791, "8": 1124, "9": 1054, "10": 533, "11": 148, "12": 37, "13": 1556}
ROWS |= {"README backbone-vs-sgmv": 137}


def lines(name):
    with (PAPER / name).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("figure", FIGURE_FILES)
def test_figure_file_is_complete_with_one_value_per_quantity(figure):
    content, frame = lines(FIGURE_FILES[figure]), read_figure(PAPER, figure)
    assert len(content) == ROWS[figure]
    assert [name for name in content[0] if name not in ("t_s", "gpu")] == HEADER
    assert {line["figure"] for line in content} == {figure}
    assert {line["source"] for line in content} <= set(SOURCES)
    assert all(float(line["value"]) >= 0 for line in content if line["metric"] != "linear_fit_intercept")
    assert not frame.duplicated(KEY + [name for name in ("t_s", "gpu") if name in frame]).any()
    assert {line["metric"] for line in content} == set(frame["metric"])


def test_every_claim_and_disagreement_is_complete():
    claims, found = read_claims(PAPER), lines("disagreement_answers.csv")
    assert [claim.id for claim in claims] == [f"C{number:02d}" for number in range(1, 53)]
    assert all((PAPER / claim.data_file).is_file() for claim in claims)
    assert [one["disagreement"] for one in found] == [f"D{number:02d}" for number in range(1, 23)]
    assert all(one["answer"] and set(one["claims"].split()) <= {claim.id for claim in claims} for one in found)


def test_setup_agrees_with_the_code():
    setup = yaml.safe_load((PAPER / "setup.yaml").read_text())
    assert popularity("Skewed").group_sizes(64) == setup["workloads"]["Skewed"]["example_64"]
    assert popularity("Skewed").group_sizes(1000) == setup["workloads"]["Skewed"]["example_1000"]
    assert set(PAPER_WORKLOADS) < set(setup["workloads"])
    for name, totals in setup["request_generator"]["totals"].items():
        lengths = released_lengths(int(name.split()[0]))
        assert {"prompt": lengths.prompt.sum(), "new": lengths.new_tokens, "total": lengths.total_tokens} == totals


def test_readme_stands_alone():
    text = (PAPER / "README.md").read_text(encoding="utf-8")
    assert all(f"D{number:02d}" in text for number in range(1, 23))
    assert all(f"`{path.name}`" in text for path in PAPER.iterdir() if path.name != "README.md")
    assert "../" not in text


def test_anchors_hold_checked_measurements_and_five_public_kernels_of_other_shapes():
    content = lines("anchors.csv")
    assert len(content) == 1271
    assert {line["group"] for line in content} == set("ABCDEFG")
    for line in content:
        assert line["group"] == "F" or (line["ok"] in ("True", "see A/C") and float(line["graph_us"]) > 0)
    content = lines("anchors_shapes.csv")
    shapes = {tuple(line[name] for name in ("case", "pattern", "T", "K", "N", "r")) for line in content}
    assert (len(content), len(shapes)) == (310, 62)
    assert {line["impl"] for line in content} == {"sgl_v2_best", "sgl_v2", "vllm_tuned", "vllm", "torch_loop"}
    assert all(len(line["N"].split("+")) == int(line["S"]) and float(line["graph_us"]) > 0 for line in content)


def test_digitised_wins_over_label_and_text():
    frame = read_figure(PAPER, "11").query("metric == 'throughput' and model == '7B' and workload == 'Distinct'")
    assert frame.set_index("system")["value"]["Punica"] == pytest.approx(1053.61)
    assert set(frame["source"]) == {"digitised"}
    short = read_figure(PAPER, "1").query("panel == 'decode' and seq_len == 128 and batch_size == 32")
    assert short.query("metric == 'step_latency'")["value"].item() == pytest.approx(13.69, abs=0.011)


def test_rows_have_our_columns_and_names():
    rows = as_rows(read_figure(PAPER, "11"))
    assert (tuple(rows.columns), set(rows["kind"])) == (COLUMNS, {"paper"})
    assert {"punica", "hf_peft", "static_batching", "continuous_batching"} <= set(rows["system"])


def test_missing_file_and_figure_say_what_to_do(tmp_path):
    with pytest.raises(RowsError, match=r"fig01.*git checkout"):
        read_figure(tmp_path, "1")
    with pytest.raises(ValueError, match="figure '2'; known: 1, 7, 8"):
        read_figure(PAPER, "2")
