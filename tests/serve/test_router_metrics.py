"""Metrics under vLLM's names: as a router reads them, and without names of tenants unless asked."""

import time
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from punica.engine import Request
from punica.serve.cli import parse
from punica.serve.launch import settings_of
from punica.serve.router_metrics import RouterMetrics
from punica.serve.watch import Watch

ENGINE = {"engine": "0", "model_name": "tiny"}
HOSTILE = '"}\n<script>\\,' + "x" * 2000


def gauges(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Series of vLLM's gauges by name, as a scraper parses them."""
    found = [one for one in text_string_to_metric_families(text) if one.name.startswith("vllm:")]
    assert all(one.type == "gauge" for one in found)
    return {one.name.removeprefix("vllm:"): [(sample[1], sample[2]) for sample in one.samples] for one in found}


@pytest.mark.parametrize("named", [False, True])
def test_a_router_reads_queue_cache_and_residency(world: Any, named: bool) -> None:
    engine, registry = world.engine(2, max_loras=1, max_cpu_loras=3, num_blocks=40), CollectorRegistry()
    arguments = [str(world.checkpoint), "--metrics-adapter-names"][: 1 + named]
    routers = RouterMetrics(registry, "tiny", settings_of(parse(arguments)).names_in_metrics)
    hostile = replace(world.adapters[2], lora_name=HOSTILE)
    for number, adapter in enumerate((world.adapters[0], world.adapters[1], hostile, None)):
        engine.add_request(Request(str(number), [1] * 20, 4, adapter))
    engine.step()
    engine.manager.pin_adapter(1)
    routers.view = Watch(engine).view(False)
    found = gauges(generate_latest(registry).decode())
    loaded, requests = found.pop("lora_adapter_loaded", []), found.pop("lora_requests_info", [])
    assert found == {
        "num_requests_running": [(ENGINE, 1)], "num_requests_waiting": [(ENGINE, 3)],
        "kv_cache_usage_perc": [(ENGINE, 1 - 38 / 40)],
        "cache_config_info": [({"block_size": "16", "num_gpu_blocks": "40", "engine": "0"}, 1)],
        "num_gpu_loaded_lora_adapters": [(ENGINE, 1)], "max_gpu_lora_adapters": [(ENGINE, 1)],
    }  # fmt: skip
    if not named:
        assert loaded == requests == []
        return
    of_first = {**ENGINE, "adapter_name": "tenant-0", "level": "gpu", "pinned": "true", "rank": "1"}
    of_second = {**ENGINE, "adapter_name": "tenant-1", "level": "cpu", "pinned": "false", "rank": "2"}
    assert sorted(loaded, key=str) == [(of_first, 1), (of_second, 1)]
    ((labels, value),) = requests
    assert labels == {"max_lora": "1", "running_lora_adapters": "tenant-0", "waiting_lora_adapters": "tenant-1"}
    assert time.time() - 60 < value <= time.time()


def test_the_server_has_them_and_tells_its_context(client: Any) -> None:
    assert gauges(client.get("/metrics").text)["max_gpu_lora_adapters"] == [(ENGINE, 3)]
    assert {model["max_model_len"] for model in client.get("/v1/models").json()["data"]} == {128}
