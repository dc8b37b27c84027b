"""The paper's numbers from ``folder``, the path of ``paper_results`` (its README has columns and provenance):
`read_figure` keeps one row of each quantity, `as_rows` gives it the columns of our rows.
"""

import csv
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from experiments.facts.systems import by_paper_name
from experiments.measure.records import COLUMNS, TIMERS, RowsError

FIGURE_FILES = {
    "1": "fig01_prefill_decode_latency.csv",
    "7": "fig07_sgmv_roofline.csv",
    "8": "fig08_lora_operator_impls.csv",
    "9": "fig09_lora_operator_ranks.csv",
    "10": "fig10_transformer_layer.csv",
    "11": "fig11_text_generation_7b_13b.csv",
    "12": "fig12_text_generation_70b.csv",
    "13": "fig13_cluster.csv",
    "README backbone-vs-sgmv": "readme_backbone_vs_sgmv.csv",
}
"""Figure (as in the column ``figure``) -> file."""

SOURCES = ("digitised", "figure label", "derived", "text")
"""Sources of a number, best first."""

_MEASURED = ("system", "workload", "model", "batch_size", "seq_len", "rank", "metric", "t_s", "gpu", "panel", "figure")


@dataclass(frozen=True)
class Statement:
    """A quantitative claim of the paper, in words: one row of ``claims.csv``."""

    id: str
    statement: str
    figure: str
    quantity: str
    expected_value: str
    unit: str
    relation: str
    tolerance: str
    data_file: str


def paper_file(folder: str | Path, name: str) -> Path:
    """Path of a file of ``paper_results/``; RowsError names it and the remedy."""
    path = Path(folder) / name
    if not path.is_file():
        raise RowsError(f"{path} is missing: pass the folder paper_results, or restore it with git checkout")
    return path


def read_figure(folder: str | Path, figure: str) -> pd.DataFrame:
    """The paper's rows of one figure, one per quantity, from its best source; none whose batch or rank is a phrase, or
    about several workloads. ValueError lists the known figures.
    """
    if figure not in FIGURE_FILES:
        raise ValueError(f"the paper has no rows of figure {figure!r}; known: {', '.join(FIGURE_FILES)}")
    frame = pd.read_csv(paper_file(folder, FIGURE_FILES[figure]), dtype=str, keep_default_na=False)
    numeric = [name for name in ("batch_size", "seq_len", "rank", "value", "t_s", "gpu") if name in frame]
    numbers = frame[numeric].apply(pd.to_numeric, errors="coerce")
    phrase = (numbers.isna() & (frame[numeric] != "")).any(axis=1)
    several = frame["workload"].str.contains(r"of the four|,|^all$")
    frame[numeric] = numbers
    frame = frame[~phrase & ~several]
    best_first = frame.sort_values("source", key=lambda column: column.map(SOURCES.index), kind="stable")
    key = [name for name in _MEASURED if name in frame]
    return best_first.drop_duplicates(key).sort_index().reset_index(drop=True)


def as_rows(paper: pd.DataFrame, scale: str = "paper") -> pd.DataFrame:
    """Rows of `read_figure` in the columns of our rows: kind ``paper``, hardware ``a100``, systems by our names."""
    ours = by_paper_name()
    return pd.DataFrame(
        {
            **{name: "" for name in COLUMNS},
            **dict.fromkeys(("t_s", "gpu"), float("nan")),
            **{name: paper[name] for name in COLUMNS if name in paper},
            "system": paper["system"].map(lambda name: ours.get(name, name)),
            "hardware": "a100",
            "kind": "paper",
            "statistic": "value",
            "scale": scale,
        },
        columns=list(COLUMNS),
    )


def paper_rows(folder: str | Path) -> pd.DataFrame:
    """All numbers of the paper that claims compare, in the columns of our rows."""
    frames = [as_rows(read_figure(folder, figure)) for figure in FIGURE_FILES]
    return pd.concat([*frames, _text_rows(folder)], ignore_index=True)


def text_numbers(folder: str | Path, section: str, by: str = "metric") -> dict[str, float]:
    """The numbers in the text of the paper's `section`, of 7B where they are of a model, by the column `by`."""
    frame = pd.read_csv(paper_file(folder, "text_other_numbers.csv")).dropna(subset=[by])
    frame = frame[frame["figure"].eq(f"text section {section}") & frame["model"].fillna("7B").eq("7B")]
    return dict(zip(frame[by], frame["value"].astype(float), strict=True))


def _text_rows(folder: str | Path) -> pd.DataFrame:
    """Sections 5.2 (three times, and 7B's bytes over the link, D03) and 6 (as of one row and of a full step)."""
    said, norms = text_numbers(folder, "5.2"), text_numbers(folder, "6", by="system")
    size, copied = said["lora_bytes_model_fp16"], said["load_time_at_25GBps"]
    loads = [
        ("layer", "punica", "load_time", said["load_one_layer"], "us"),
        ("model", "punica", "load_time", said["load_one_model"], "ms"),
        ("model", "punica", "bytes", size, "byte"),
        ("model", "link", "load_time", copied, "ms"),
        ("model", "link", "bandwidth", size / copied / 1e6, "GB/s"),
        ("overlap", "punica", "load_time", said["load_one_model"], "ms"),
        ("overlap", "punica", "step_latency_alone", said["decode_step"], "ms"),
    ]
    columns = ["panel", "system", "metric", "value", "unit"]
    section_52 = pd.DataFrame(loads, columns=columns).assign(figure="text 5.2", model="7B", rank=16)
    beside = section_52["panel"].eq("overlap")
    section_52["workload"] = beside.map({True: "Distinct", False: ""})
    section_52["batch_size"] = beside.map({True: 32.0})
    both = [("RMSNorm", system, "norm_latency", us, "us", rows) for system, us in norms.items() for rows in (1, 32)]
    section_6 = pd.DataFrame(both, columns=[*columns, "batch_size"]).assign(figure="text 6", workload="", model="")
    found = pd.concat([section_52, section_6], ignore_index=True)
    fixed = {"hardware": "a100", "kind": "paper", "statistic": "value", "scale": "paper", "timer": ""}
    return found.assign(**fixed).reindex(columns=COLUMNS)


def read_claims(folder: str | Path) -> list[Statement]:
    """The paper's claims, C01 first, as written in ``claims.csv``."""
    with paper_file(folder, "claims.csv").open(newline="", encoding="utf-8") as stream:
        return [Statement(**{one.name: line[one.name] for one in fields(Statement)}) for line in csv.DictReader(stream)]


def claim_clocks(folder: str | Path) -> dict[str, str]:
    """Map claims on operators to the clock that decides them, from ``claim_clocks.csv``; ValueError for another one."""
    path = paper_file(folder, "claim_clocks.csv")
    with path.open(newline="", encoding="utf-8") as stream:
        found = {line["claim"]: line["clock"] for line in csv.DictReader(stream)}
    if unknown := sorted(set(found.values()) - set(TIMERS)):
        raise ValueError(f"{path}: clock {unknown[0]!r} must be one of {', '.join(TIMERS)}")
    return found
