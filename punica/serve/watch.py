"""View of an engine in numbers, for the page and for routers: what it holds, and its last steps.

Steps are recorded while the page asks for them, and `WATCH_S` longer. Otherwise a step costs one attribute test.
"""

import time
import zlib
from collections import deque
from typing import Any

from punica.engine import Engine, StepOutput

WATCH_S = 3.0
"""Time after a question for steps in which they are recorded."""
MOST_STEPS = 32
"""Steps that are kept."""


class Watch:
    """Observer of an engine, in the thread that steps it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._until = engine, 0.0
        self._num_steps = self._num_tokens = 0
        self._steps: deque[tuple[dict[str, Any], dict[int, Any]]] = deque(maxlen=MOST_STEPS)  # each with its adapters

    def view(self, with_steps: bool) -> dict[str, Any]:
        """Return requests, KV blocks, slots and loaded adapters, by adapter id (0: none); with ``with_steps`` also the
        last steps, which are recorded from now on. ``names`` alone has names of adapters.
        """
        scheduler, blocks, manager = self._engine.scheduler, self._engine.blocks, self._engine.manager
        running, waiting = [*scheduler.leaving, *scheduler.running], scheduler.waiting
        adapters = {request.adapter_id: request.adapter for request in (*running, *waiting)}
        view: dict[str, Any] = {
            "num_running": len(running), "running": sorted({request.adapter_id for request in running} - {0}),
            "num_waiting": len(waiting), "waiting": sorted({request.adapter_id for request in waiting} - {0}),
            "used_blocks": blocks.num_blocks - blocks.num_free, "num_blocks": blocks.num_blocks,
            "block_size": blocks.block_size,
        }  # fmt: skip
        if manager is not None:
            in_slots = {loaded.slot: loaded.lora.id for loaded in manager.active_versions()}
            view["slots"] = [in_slots.get(slot, 0) for slot in range(manager.lora_slots)]
            loaded, pinned = manager.list_adapters(), manager.pinned_adapters
            view["loaded"] = {i: (lora.rank, manager.is_active(i), i in pinned) for i, lora in loaded.items()}
            adapters |= {number: manager.request_of(number) for number in loaded}
        if with_steps:
            self._until, self._engine.on_step = time.monotonic() + WATCH_S, self._record
            view |= {"num_steps": self._num_steps, "num_tokens": self._num_tokens, "seconds": time.monotonic()}
            view["steps"] = [step for step, _ in self._steps]
            for _, of_step in self._steps:
                adapters |= of_step
        view["names"] = {number: one.lora_name for number, one in adapters.items() if one is not None}
        return view

    def _record(self, layout: Any, output: StepOutput) -> None:
        """Keep a step that has ended, by its `StepLayout`: rows ``[request, adapter, rows, cached tokens, is prompt,
        joins, reason of its end]``, and segments ``[adapter, rows, slot]`` as SGMV has them.
        """
        if time.monotonic() > self._until:
            self._engine.on_step = None
            self._steps.clear()
            return
        self._num_steps += 1
        self._num_tokens += len(output.tokens)
        rows = []
        for request, span in zip(layout.requests, layout.spans, strict=True):
            is_prompt = span.start < layout.num_prefill_rows
            joins = is_prompt and span.kv_length - span.length == request.hit
            name = f"{zlib.crc32(request.request_id.encode()):08x}"
            rows.append(
                [name, request.adapter_id, span.length, span.kv_length, is_prompt, joins, request.finish_reason]
            )
        in_slots = dict(zip(layout.sampled_slots, (request.adapter_id for request in layout.requests), strict=True))
        segments = [(in_slots.get(slot, 0), length, slot) for slot, length in layout.segments]
        step = {"number": self._num_steps, "rows": rows, "segments": segments}
        self._steps.append((step, {request.adapter_id: request.adapter for request in layout.requests}))
