"""Metrics under the names by which routers see vLLM: those of llm-d and of the Gateway API Inference Extension."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector


class RouterMetrics(Collector):
    """Gauges of the last ``view`` of an engine (`punica.serve.watch`), empty before the first.

    ``model``: name of the base model. ``with_names``: also the gauges that name adapters, for all who read metrics.
    Names and labels are vLLM 0.33's; those of loaded adapters are of its pull request 54830, which llm-d reads.
    """

    def __init__(self, registry: CollectorRegistry, model: str, with_names: bool) -> None:
        self.view: Mapping[str, Any] = {}
        self._engine, self._with_names = {"engine": "0", "model_name": model}, with_names
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        view, engine = self.view, self._engine
        if view:
            yield _gauge("num_requests_running", "Requests in the batch", [(engine, view["num_running"])])
            yield _gauge("num_requests_waiting", "Requests in the queue", [(engine, view["num_waiting"])])
        if "num_blocks" in view:
            used, size, count = view["used_blocks"] / view["num_blocks"], view["block_size"], view["num_blocks"]
            yield _gauge("kv_cache_usage_perc", "Used KV blocks; 1 is all of them", [(engine, used)])
            sizes = {"block_size": str(size), "num_gpu_blocks": str(count), "engine": "0"}
            yield _gauge("cache_config_info", "Sizes of the KV cache", [(sizes, 1)])
        if "slots" not in view:
            return
        loaded, slots, names = view["loaded"], view["slots"], view["names"]
        in_slots = sum(adapter > 0 for adapter in slots)
        yield _gauge("num_gpu_loaded_lora_adapters", "Adapters in slots", [(engine, in_slots)])
        yield _gauge("num_cpu_loaded_lora_adapters", "Adapters in host memory", [(engine, len(loaded))])
        yield _gauge("max_gpu_lora_adapters", "Adapter slots", [(engine, len(slots))])
        if not self._with_names:
            return
        series = {}
        for number, (rank, is_active, is_pinned) in loaded.items():
            if number in names:
                level, pinned = "gpu" if is_active else "cpu", str(is_pinned).lower()
                series[names[number]] = {
                    **engine, "adapter_name": names[number], "level": level, "pinned": pinned, "rank": str(rank),
                }  # fmt: skip
        yield _gauge("lora_adapter_loaded", "Adapters in memory", [(labels, 1) for labels in series.values()])
        of_requests = {"max_lora": str(len(slots))}
        for state in ("running", "waiting"):  # a name with a comma would be read as two
            listed = sorted({names[number] for number in view[state] if "," not in names.get(number, ",")})
            of_requests[f"{state}_lora_adapters"] = ",".join(listed)
        yield _gauge("lora_requests_info", "Adapters of requests, and the time", [(of_requests, time.time())])


def _gauge(name: str, meaning: str, series: list[tuple[dict[str, str], float]]) -> GaugeMetricFamily:
    labels = [*series[0][0]] if series else []
    family = GaugeMetricFamily(f"vllm:{name}", meaning, labels=labels)
    for values, value in series:
        family.add_metric([*values.values()], value)
    return family
