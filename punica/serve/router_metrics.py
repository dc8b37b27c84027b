"""Gauges under the names by which routers see vLLM: those of llm-d and of the Gateway API Inference Extension."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector


class RouterMetrics(Collector):
    """Gauges of the last ``view`` of an engine (`Watch.view`), of base model ``model``. ``with_names``: also those that
    name adapters. Names and labels are those of vLLM 0.26's `loggers.py` and of the sources of llm-d's router; for
    loaded adapters those of vLLM's pull request 54830. No router has been run against them.
    """

    def __init__(self, registry: CollectorRegistry, model: str, with_names: bool) -> None:
        self.view: Mapping[str, Any] = {}
        self._labels, self._with_names = {"engine": "0", "model_name": model}, with_names
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        view, found = self.view, dict[str, float]()
        if view:
            found |= {"num_requests_running": view["num_running"], "num_requests_waiting": view["num_waiting"]}
        if count := view.get("num_blocks"):
            sizes = {"engine": "0", "block_size": view["block_size"], "num_gpu_blocks": count}
            yield _gauge("cache_config_info", (1, sizes))
            found["kv_cache_usage_perc"] = 1 - view["num_free"] / count
        if slots := view.get("slots"):
            found |= {"num_gpu_loaded_lora_adapters": sum(map(bool, slots)), "max_gpu_lora_adapters": len(slots)}
            if self._with_names:
                yield from self._named(view["names"])
        yield from (_gauge(name, (value, self._labels)) for name, value in found.items())

    def _named(self, names: Mapping[int, str]) -> Iterator[GaugeMetricFamily]:
        loaded, requests = {}, {"max_lora": str(len(self.view["slots"]))}
        for number, (rank, is_active, is_pinned) in self.view["loaded"].items():
            if name := names.get(number):  # two versions of one name are one
                level, pinned = "gpu" if is_active else "cpu", str(is_pinned).lower()
                loaded[name] = 1, self._labels | {"adapter_name": name, "level": level, "pinned": pinned, "rank": rank}
        yield _gauge("lora_adapter_loaded", *loaded.values())
        for state in ("running", "waiting"):
            found = {names[i] for i in self.view[state] if "," not in names.get(i, ",")}  # it would be read as two
            requests[f"{state}_lora_adapters"] = ",".join(sorted(found))
        yield _gauge("lora_requests_info", (time.time(), requests))


def _gauge(name: str, *series: tuple[float, Mapping[str, Any]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"vllm:{name}", "As vLLM's", labels=[*series[0][1]] if series else [])
    for value, labels in series:
        family.add_metric([*map(str, labels.values())], value)
    return family
