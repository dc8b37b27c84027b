"""The harness of an experiment: settings, points, passes, rows. `docs/extending.md` adds an experiment."""

from experiments.harness.command import main
from experiments.harness.experiment import PROTOCOL, CheckFailed, Experiment, Overlay
from experiments.harness.points import Point, Reading, model_settings, sampled
from experiments.harness.schema import Config, ConfigError, Count, Counts, FigureConf
