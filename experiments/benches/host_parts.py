"""Breakdown of a step's time on a CPU: nested calls of model and engine, timed.

A nested call counts for its own part alone, except that calls inside the head are the head's. The two LoRA products are
one call on a CPU, hence one part.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from experiments.benches.device_parts import ATTENTION, BASE, HEAD, REST, SMALL
from experiments.benches.engine_steps import lora_manager
from punica.engine import Engine, runner
from punica.models import llama
from punica.ops.heads import PackedHeads
from punica.parallel.linear import UnquantizedLinearMethod

LORA, SCHEDULE, METADATA = "lora", "schedule", "metadata"


class Stopwatch:
    """Seconds by part since the last `start`; what no part claims is `REST`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._part, self._since = REST, time.perf_counter()

    def start(self) -> None:
        """Begin again at zero."""
        self.seconds.clear()
        self._part, self._since = REST, time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Return the seconds by part until now."""
        self._switch(REST)
        return dict(self.seconds)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its time counts for `part`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = self._part
            if outer == HEAD:
                return function(*args, **kwargs)
            self._switch(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(outer)

        return timed

    def _switch(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now


@contextmanager
def watched_calls(engine: Engine) -> Iterator[Stopwatch]:
    """Time the steps of `engine`, on a CPU and with LoRA, by part."""
    watch, attention = Stopwatch(), engine.runner.attention
    calls: list[tuple[str, object, str]] = [
        (BASE, UnquantizedLinearMethod, "apply"),
        (ATTENTION, attention, "attend"),
        (LORA, lora_manager(engine).punica_wrapper, "add_linear"),
        (SMALL, llama, "add_rms_norm"),
        (SMALL, llama, "swiglu"),
        (SMALL, PackedHeads, "rotated"),
        (SMALL, attention.cache, "write"),
        (HEAD, engine.runner.model, "compute_logits"),
        (HEAD, runner, "choose_tokens"),
    ]
    with ExitStack() as stack:
        for part, owner, name in calls:
            stack.enter_context(patch.object(owner, name, watch.around(part, getattr(owner, name))))
        yield watch
