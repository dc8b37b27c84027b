"""Draw figures from stored rows; nothing is measured, so this works on any machine.

`source=recorded` draws the committed rows `results/<hardware>/` into `figures/<hardware>/`, `source=fresh` this
machine's rows into `outputs/<hardware>/figures/`; `auto` takes fresh rows where a figure has some. One figure never
mixes the two. `hardware=h200` chooses whose rows, `figures=[fig08]` which figures.

    python -m experiments.commands.figures source=recorded hardware=h200
"""

from pathlib import Path

from omegaconf import DictConfig

from experiments.commands.batch import batch_main, each, sides
from experiments.harness.command import finish
from experiments.harness.experiment import Experiment
from experiments.harness.schema import ConfigError
from experiments.harness.settings import folders


def redraw(cfg: DictConfig) -> int:
    """Draw each chosen figure that has rows; 0 when at least one was drawn and none failed."""
    places = folders(cfg)
    order = sides(places, cfg.source).values()

    def one(experiment: Experiment) -> list[Path]:
        from experiments.plots.draw import draw

        for rows, target in order:
            if (rows / f"{experiment.name}.csv").exists():
                return draw(experiment, rows / f"{experiment.name}.csv", target, places.paper)
        return []

    drawn, failures = each(cfg, one)
    without = [name for name, files in drawn.items() if not files]
    if len(without) == len(drawn) and not failures:
        looked = " and ".join(str(rows) for rows, _ in order)
        raise ConfigError(f"no rows to draw in {looked}: run make reproduce, or choose another hardware=")
    files = [str(path) for paths in drawn.values() for path in paths]
    finish(command="figures", drawn=files, not_drawn=without, failed=failures)
    return 1 if failures else 0


if __name__ == "__main__":
    batch_main("figures", __doc__ or "", redraw, "figures", "source")
