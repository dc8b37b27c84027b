"""View of an engine in numbers, for the page and for routers: what it holds, and its last steps.

Steps are recorded while the page asks for them, and 3 s longer. Otherwise a step costs one attribute test.
"""

import time
import zlib
from collections import deque
from typing import Any

from punica.engine import Engine, StepOutput, adapters_of


class Watch:
    """Observer of an engine, in the thread that steps it. Adapters are ids; ``names`` alone has their names."""

    seconds = 3.0  # of recording after a question; a step that began in them is recorded, however long it takes

    def __init__(self, engine: Engine) -> None:
        self._engine, self._until, self._began, self._num_steps, self._num_tokens = engine, 0.0, 0.0, 0, 0
        self._steps: deque[tuple[dict[str, Any], list[Any]]] = deque(maxlen=32)  # and their adapters

    def view(self, with_steps: bool) -> dict[str, Any]:
        """Return requests, KV blocks and slots; ``with_steps``: the last steps, else all adapters in memory and use."""
        scheduler, blocks, manager = self._engine.scheduler, self._engine.blocks, self._engine.manager
        running, waiting = [*scheduler.leaving, *scheduler.running], scheduler.waiting
        view: dict[str, Any] = {"num_running": len(running), "num_waiting": len(waiting)}
        view |= {"num_blocks": blocks.num_blocks, "num_free": blocks.num_free, "block_size": blocks.block_size}
        if manager is not None:
            parts = [[one for request in part for one in adapters_of(request.adapter)] for part in (running, waiting)]
            active = manager.active_versions()
            in_slots, known = {one.slot: one.lora.id for one in active}, [*parts[0], *(one.request for one in active)]
            view["slots"] = [in_slots.get(slot, 0) for slot in range(manager.lora_slots)]
            if with_steps:
                known += [one for _, adapters in self._steps for one in adapters]
            else:
                loaded, pinned = manager.list_adapters(), manager.pinned_adapters
                view["loaded"] = {i: (lora.rank, manager.is_active(i), i in pinned) for i, lora in loaded.items()}
                view["running"], view["waiting"] = ([one.lora_int_id for one in part] for part in parts)
                known += [*parts[1], *map(manager.request_of, loaded)]
            view["names"] = {one.lora_int_id: one.lora_name for one in known if one is not None}
        if with_steps:
            now, self._engine.on_step = time.monotonic(), self._record
            self._until, self._began = now + self.seconds, now
            view |= {"num_steps": self._num_steps, "num_tokens": self._num_tokens, "now": now}
            view["steps"] = [step for step, _ in self._steps]
        return view

    def _record(self, layout: Any, output: StepOutput) -> None:
        """Keep a step that has ended, by its `StepLayout`: rows ``[request, adapters, rows, cached tokens, is prompt,
        joins, reason of its end]``, and segments ``[adapters, rows, slot]`` as SGMV has them.
        """
        began, self._began = self._began, time.monotonic()
        if began > self._until:
            self._engine.on_step = None
            self._steps.clear()
            return
        self._num_steps += 1
        self._num_tokens += len(output.tokens) + sum(map(len, output.earlier.values()))
        rows, known, in_slots = [], list[Any](), {-1: list[int]()}
        for request, span, slot in zip(layout.requests, layout.spans, layout.sampled_slots, strict=True):
            name, adapters = f"{zlib.crc32(request.request_id.encode()):08x}", adapters_of(request.adapter)
            known += adapters
            ids = [one.lora_int_id for one in adapters]
            in_slots.setdefault(slot, ids)
            first = span.kv_length - span.length
            is_prompt = first < len(request.prompt_token_ids)
            sizes, joins = (span.length, span.kv_length), is_prompt and first == request.hit
            rows.append((name, ids, *sizes, is_prompt, joins, request.finish_reason))
        segments = [(in_slots[slot], length, slot) for slot, length in layout.segments]
        self._steps.append(({"number": self._num_steps, "rows": rows, "segments": segments}, known))
