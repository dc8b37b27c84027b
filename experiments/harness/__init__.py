"""The harness of an experiment: configuration, resume, progress, rows, figure.

**To add an experiment** write a script, a YAML file and a test.

1. `experiments/figNN_name.py`: a docstring (the claim, the expected shape, the cost), a `FigureConf` dataclass with
   the figure's own fields, an `Experiment` subclass and two closing statements::

        @dataclass
        class Fig10Conf(FigureConf):                 # title, systems, workloads are there already
            batch_sizes: list[int] = MISSING
            seq_lens: list[int] = MISSING

        class Fig10(Experiment):
            name, figure, order, conf = "fig10_layer", "10", 60, Fig10Conf
            reads = ("model", "workload", "adapters", *PROTOCOL)   # any other key on the command line is refused

            def points(self, cfg):                   # cheap, no torch: decides what is stale
                figure = cast(Fig10Conf, cfg.figure)
                return [Point(system="punica", workload=w, model=cfg.model.name, batch_size=b, seq_len=s, rank=r,
                              settings={"model": model_settings(cfg.model), "slots": cfg.adapters.slots})
                        for w in cfg.workload.names for s in figure.seq_lens
                        for r in cfg.adapters.ranks for b in figure.batch_sizes]

            def measure(self, cfg, point):           # imports torch here; check first, CheckFailed when wrong
                ...
                return sampled("layer_latency", microseconds, "us")      # median, p10, p90, count
                # or [Reading("throughput", 1053.6, "token/s"), ...]

            overlay = Overlay("Figure 10: one layer", metric="layer_latency", panel="panel", line="workload")
            # or drawn_by = "layers.draw_layers": that function of experiments.plots gets two pandas frames, (rows,
            # paper), and returns a matplotlib figure

        EXPERIMENT = Fig10()
        if __name__ == "__main__":
            main(EXPERIMENT)

2. `conf/figure/figNN_name.yaml`, which begins with `defaults: [{/schema/figure@_here_: figNN_name}, _self_]`, takes
   what depends on the scale from there (`batch_sizes: ${scale.model_batch_sizes}`), and states the figure's minutes in
   `make reproduce` (`minutes: {laptop: 0.5}`) if a CPU can run it.

3. A test in `tests/experiments/`: its points, and that `measure` refuses a wrong result.

Nothing else: `experiments.harness.catalogue` finds the script by its name (`fig*`, `readme*`, `sec*`, `ext_*`), and
`make reproduce` runs it in its `order`.

`cfg` is a typed `Config` in which `auto` is decided: `cfg.system.names`, `cfg.workload.names`, `cfg.hardware.device`
("cpu" or "cuda"), `cfg.timer.name`. The harness sets torch's threads and seed before the first measurement. Everything
that decides a point's number must be a column of its `Point` or in its `settings`: that is what makes rows stale.
A grid is measured in `scale.passes` passes, forth and back; rows say which (`repeat`), and what else the machine did
meanwhile (`harness.passes`). Samples (`cfg.scale.seconds_per_point`), then repeats, then points give way to keep a
figure's minutes (`harness.budget`). A point that is computed from rows of others (`is_derived`) is taken last.
To time several systems interleaved, set `differing` (the columns in which they differ) and override `measure_together`.
"""

from experiments.harness.command import main
from experiments.harness.experiment import PROTOCOL, CheckFailed, Experiment, Overlay
from experiments.harness.points import Point, Reading, model_settings, sampled
from experiments.harness.schema import Config, ConfigError, Count, Counts, FigureConf
