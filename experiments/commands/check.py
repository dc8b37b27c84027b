"""Check of this machine's rows against the expected ranges of its hardware: `results/<hardware>/expected/`.

    make check                        # outputs/<hardware>/rows
    make check ARGS=hardware=h200

A range reaches twice as far as the farthest recorded repeat (`experiments.report.expected`). Measurements are held as
ratios on the recorded device alone. Status 1 when one that counts is outside; what was measured at another speed, by
the calibrations between points, is printed and not counted.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from experiments.claims import Verdict
from experiments.claims.judge import figures_of
from experiments.claims.rows import SIMULATED
from experiments.commands.batch import batch_main
from experiments.harness.schema import ConfigError
from experiments.harness.settings import folders
from experiments.plots.frames import distinct
from experiments.report import expected
from experiments.report.expected import Held
from experiments.report.machines import HERE, machine_of, read_folder, rows_files

CLAIM = [*expected.QUANTITY, "here", "low", "high", "value", "verdict_here"]
LINE = [*expected.LINE, "common", "repeats", "here", "low", "high"]
"""Columns of what is outside, as printed."""
NOT_COUNTED = "measurements and measured claims that are outside are not counted"


def refuse(cfg: DictConfig, fresh: Path, recorded: Path) -> None:
    """Raise `ConfigError` where there are no rows here, no ranges for the hardware, or rows of scale=smoke."""
    if cfg.scale.name == "smoke":
        raise ConfigError("scale=smoke has no expected ranges, its shapes are others: measure without scale=smoke")
    if not (recorded / expected.FOLDER).is_dir():
        known = sorted(path.parent.name for path in recorded.parent.glob(f"*/{expected.FOLDER}"))
        text = f"hardware={recorded.name} has no expected ranges; recorded are those of {', '.join(known) or 'none'}"
        raise ConfigError(f"{text}: compare single rows with one of these by make compare")
    if not rows_files(fresh):
        raise ConfigError(f"no rows in {fresh}: measure them with make reproduce")


def said(what: str, held: Held, columns: list[str], key: str) -> Iterator[str]:
    """Say how many lines were held, and list those outside; then the lines of one side alone, by ``key``."""
    yield f"{what}: {len(held.compared)} held, {len(held.outside)} outside"
    if len(held.outside):
        yield held.outside[columns].to_string(index=False, float_format="{:.4g}".format)
    for side, why in ((held.absent, "not measured here"), (held.unknown, "not recorded")):
        if len(side):
            counts = side[key].value_counts(sort=False)
            yield f"  not compared, {why}: {', '.join(f'{name} ({n})' for name, n in counts.items())}"


def counted(claims: Held, rows: Held | None, verdicts: Sequence[Verdict], figures: Collection[str]) -> int:
    """Count what is outside, without measurements of ``figures`` and the measured claims that rest on them."""
    excused = [one.id for one in verdicts if one.kind != SIMULATED and set(figures_of(one.figure)) & set(figures)]
    measured = 0 if rows is None else (~rows.outside["figure"].isin(list(figures))).sum()
    return int((~claims.outside["claim"].isin(excused)).sum() + measured)


def check(cfg: DictConfig) -> int:
    """Hold the fresh rows of ``cfg.hardware`` against its ranges and print the outcome; 1 when one outside counts."""
    places = folders(cfg)
    refuse(cfg, places.fresh_rows, places.recorded_rows)
    of_claims, of_rows = expected.read_expected(places.recorded_rows)
    here = machine_of(places.fresh_rows, places.fresh_figures, places.paper, HERE)
    recorded = read_folder(places.recorded_rows)
    claims, rows = expected.hold_claims(of_claims, here.verdicts), None
    lines, excused = [*said("Claims", claims, CLAIM, "claim")], set[str]()
    turned = claims.compared[claims.compared["verdict"] != claims.compared["verdict_here"]].drop_duplicates("claim")
    lines += [f"  {one.claim} is {one.verdict_here!r} here, {one.verdict!r} recorded" for one in turned.itertuples()]
    theirs, ours = (", ".join(distinct(side, "device")) for side in (recorded, here.rows))
    if theirs != ours:
        lines.append(f"Measurements: not compared, recorded on {theirs}, these on {ours}; there {NOT_COUNTED}")
        excused = set(here.rows["figure"])
    else:
        rows = expected.hold_rows(of_rows, recorded, here.rows)
        lines += said("Measurements, over the recorded ones", rows, LINE, "figure")
        if slow := expected.other_speeds(recorded, here.rows):
            named = "; ".join(f"figure {figure} ({how})" for figure, how in slow.items())
            lines.append(f"Measured at another speed than recorded: {named}. Of these {NOT_COUNTED}")
            excused = set(slow)
    found, counts = len(claims.outside), counted(claims, rows, here.verdicts, excused)
    found += len(rows.outside) if rows else 0
    ended = f"{found} outside, of which {counts} count: expected ranges of {places.recorded_rows.name}"
    print("\n".join([*lines, ended]))
    return 1 if counts else 0


if __name__ == "__main__":
    batch_main("check", __doc__ or "", check)
