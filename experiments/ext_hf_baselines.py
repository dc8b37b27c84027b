"""Extension: a decode step of Hugging Face with PEFT, the baseline of Figure 11, in every way that it offers.

The paper measured Transformers on an A100 of 2023 and gives its throughput, not what limits it. Claim: with one adapter
a baseline that is given the best decodes about as fast as its weights are read; PEFT's mixed batches do not, since
each layer loops over the adapters and the host launches every kernel. Expected shape on a GPU: `unmerged`, which
Figure 11 once had, waits for the host at any batch; graphs end that; `merged` saves the adapter's kernels; `mixed` has
more launches the more adapters there are. On a CPU nothing is launched, and merging alone is left.

Measured: a decode step behind `figure.context` tokens, of one request and of a full batch. `unmerged`, `merged`:
launched by the host, over a cache that grows in place. `unmerged, graphs` and `merged, graphs`: replays of CUDA graphs
over a static cache (GPU only). `mixed`: launched by the host, a different adapter for every row (`adapter_names`).
Every way is compared with the reference's logits first, and has the faster of both products (ours and torch's).

    step_latency        from one token on the host to the next
    launches_per_step   kernels, graphs and copies that the host gives the device, counted by the profiler ...
    kernels_per_step    ... and kernels and copies that the device ran
    device_time         time of a step in which the device ran any, by the profiler
    launch_time         the host's time for an empty kernel: a floor of a launch, which Python and PEFT add to
    device_share, launch_share: device_time, and launches at launch_time each, over the step. Where neither is near 1
                        the host's Python is what the step takes

Cost at scale=laptop: about 20 seconds on two cores, 2 GB; at scale=gpu three to five minutes per model, 27 and 45 GB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, cast

from experiments.harness import PROTOCOL, CheckFailed, Config, Experiment, FigureConf, Point, Reading, main, sampled
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, Counts

if TYPE_CHECKING:
    from torch import nn

    from experiments.benches.step_parts import Launches
    from experiments.measure.timing import Protocol
    from experiments.systems.hugging_face import Decoding
    from experiments.systems.world import World


class Way(NamedTuple):
    """One way to decode a batch: adapter merged into the weights, steps captured as graphs, an adapter for each row."""

    merged: bool = False
    graphs: bool = False
    mixed: bool = False


WAYS = {
    "unmerged": Way(),
    "merged": Way(merged=True),
    "unmerged, graphs": Way(graphs=True),
    "merged, graphs": Way(merged=True, graphs=True),
    "mixed": Way(mixed=True),
}
"""System -> its way. Figure 11's `hf_peft` is `merged, graphs` (on a CPU `merged`), its `hf_peft_mixed` is `mixed`."""


class Timed(NamedTuple):
    """Seconds of every timed step; launches of one (None on a CPU); the product, ours or torch's."""

    steps: list[float]
    launches: Launches | None
    ours: bool


class HfBench:
    """Ways to decode on a shared `world`, each checked against the reference before it is timed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._checked: set[str] = set()

    def measure(self, name: str, batch: int, context: int, protocol: Protocol) -> Timed:
        """Time steps of `batch` rows behind `context` tokens each, on a GPU with the faster product."""
        from torch import nn

        from experiments.benches.step_parts import launches_of
        from experiments.measure.timing import time_side_by_side
        from experiments.systems.hugging_face import SameProduct

        if name not in self._checked:
            self._check(name)
            self._checked.add(name)
        on_gpu, timed = self.world.device != "cpu", list[Timed]()
        steps = protocol.warmup + max(protocol.repeats, protocol.min_repeats) + 1
        for kind in (SameProduct, nn.Linear) if on_gpu else (SameProduct,):
            with self._decoding(name, batch * [context * [1]], steps + 1, done=1, kind=kind) as decoding:
                seconds = time_side_by_side({"": [decoding.step]}, protocol)[""]
                launches = launches_of(decoding.step) if on_gpu else None
            timed.append(Timed(seconds, launches, kind is SameProduct))
        return min(timed, key=lambda one: median(one.steps))

    @contextmanager
    def _decoding(
        self, name: str, prompts: Sequence[Sequence[int]], new_tokens: int, done: int, kind: type[nn.Linear]
    ) -> Iterator[Decoding]:
        backend, way = self.world.peft, WAYS[name]
        rows = backend.places(range(1, len(prompts) + 1)) if way.mixed else None
        applied = nullcontext() if way.mixed else (backend.merged if way.merged else backend.adapter)(1)
        with applied, backend.product(kind):
            yield backend.decoding(prompts, new_tokens, rows, done, way.graphs)

    def _check(self, name: str) -> None:
        """`CheckFailed` unless a way gives the reference's logits for two prompts, one of them padded."""
        import torch

        from experiments.benches.model_steps import TOLERANCE, difference
        from experiments.systems.hugging_face import SameProduct
        from experiments.systems.stream import Job

        limit = TOLERANCE[self.world.dtype]
        prompts, forced = [tuple(range(1, 20)), (5, 6, 7)], [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]
        jobs = [Job(prompt, 6, 1 + WAYS[name].mixed * place) for place, prompt in enumerate(prompts)]
        expected = [self.world.reference(job, tokens, lora=True) for job, tokens in zip(jobs, forced, strict=True)]
        plain = self.world.reference(jobs[0], forced[0], lora=False)
        with self._decoding(name, prompts, 6, done=0, kind=SameProduct) as decoding:
            logits = decoding.forced(torch.tensor(forced, device=self.world.device))
        error = max(difference(ours, theirs) for ours, theirs in zip(logits, expected, strict=True))
        without = difference(plain, expected[0])
        if not error <= limit < without:
            raise CheckFailed(
                f"{name} gives logits that differ from the reference by {error:.2e} (relative), where an adapter that "
                f"is left out differs by {without:.2e}, and {limit:.0e} is allowed"
            )


class HfBaselinesConf(FigureConf):
    """Rows of a step, and tokens behind each."""

    gpu_systems: list[str]
    batch_sizes: Counts
    context: Count


class HfBaselines(Experiment):
    """Latency and launches of a step per batch (the panels) and way."""

    name, figure, order, conf = "ext_hf_baselines", "ext hf baselines", 225, HfBaselinesConf
    reads = ("model", "adapters.ranks", "adapters.alpha", "adapters.seed", *PROTOCOL)
    clock = "host_clock"

    def known_systems(self, cfg: Config) -> Sequence[str]:
        figure = cast(HfBaselinesConf, cfg.figure)
        return [name for name in figure.systems if cfg.hardware.device != "cpu" or name not in figure.gpu_systems]

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(HfBaselinesConf, cfg.figure)
        adapters = {"alpha": cfg.adapters.alpha, "seed": cfg.adapters.seed}
        settings = {"model": model_settings(cfg.model), "adapters": adapters}
        return [
            Point(f"batch {batch}", system, "Distinct" if WAYS[system].mixed else "Identical", cfg.model.name, batch,
                  figure.context, rank, settings)
            for rank in cfg.adapters.ranks
            for batch in figure.batch_sizes
            for system in cfg.system.names
            if system in self.known_systems(cfg)
        ]  # fmt: skip

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.benches.operators import protocol
        from experiments.benches.step_parts import seconds_per_launch

        batch, context = cast(int, point.batch_size), cast(int, point.seq_len)
        timed = self._bench(cfg, cast(int, point.rank)).measure(point.system, batch, context, protocol(cfg))
        readings = sampled("step_latency", [1e3 * seconds for seconds in timed.steps], "ms")
        if timed.launches is None:
            return readings
        launch, step = seconds_per_launch(), median(timed.steps)
        return [
            *readings,
            Reading("launches_per_step", timed.launches.launches, "launches", "count"),
            Reading("kernels_per_step", timed.launches.kernels, "kernels", "count"),
            Reading("device_time", 1e3 * timed.launches.busy, "ms"),
            Reading("launch_time", 1e6 * launch, "us"),
            Reading("device_share", timed.launches.busy / step, "share"),
            Reading("launch_share", timed.launches.launches * launch / step, "share"),
            Reading("own_product", float(timed.ours), "share"),
        ]

    def _bench(self, cfg: Config, rank: int) -> HfBench:
        """Model, cache and adapters, built once per rank."""
        from experiments.systems.weights import Limits
        from experiments.systems.world import World

        figure, adapters, device = cast(HfBaselinesConf, cfg.figure), cfg.adapters, cfg.hardware.device
        steps = cfg.scale.warmup + max(cfg.scale.repeats, cfg.scale.min_repeats)
        limits = Limits(max(figure.batch_sizes), figure.context + steps + 2)
        key = (cfg.model.name, rank, limits, device)
        return self.kept(key, lambda: HfBench(World(cfg.model, device, limits, rank, adapters.alpha, adapters.seed)))


EXPERIMENT = HfBaselines()

if __name__ == "__main__":
    main(EXPERIMENT)
