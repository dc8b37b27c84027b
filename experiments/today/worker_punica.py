"""Our engine behind the interface of `measure`."""

from typing import Any

import torch

import punica
from experiments.benches.engine_steps import lora_manager
from experiments.today.measure import serve
from punica.adapters import LoRARequest
from punica.engine import Engine, SamplingParams


class Punica:
    """An engine with a slot per request of a batch and one to load into, and host memory for all adapters."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._adapters = [LoRARequest(f"adapter-{i}", i, path) for i, path in enumerate(job["adapters"], start=1)]
        self._engine = Engine.from_pretrained(
            job["model"], dtype=job["dtype"], device=job["device"], max_model_len=job["max_len"],
            max_batch_size=job["batch_size"], max_lora_rank=job["rank"], max_cpu_loras=len(self._adapters) + 1,
            **job["options"],
        )  # fmt: skip
        self.about = f"punica {punica.__version__}, torch {torch.__version__}"

    def generate(self, prompts: list[list[int]], adapters: list[int], new_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in new_tokens]
        chosen = [self._adapters[i - 1] if i else None for i in adapters]
        results = self._engine.generate(prompts, chosen, params)
        if errors := [result.error for result in results if result.error]:
            raise RuntimeError(errors[0])
        return [result.token_ids for result in results]

    def register(self, adapter_id: int) -> None:
        lora_manager(self._engine).add_adapter(self._adapters[adapter_id - 1])

    def forget(self, adapter_id: int) -> None:
        lora_manager(self._engine).remove_adapter(adapter_id)


if __name__ == "__main__":
    serve(Punica)
