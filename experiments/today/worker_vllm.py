"""vLLM behind the interface of `measure`: its offline `LLM`, with LoRA. Runs under an interpreter that has vLLM.

As it ships but for the options of the job and what makes the work the same: no prefix cache, since passes repeat their
prompts, and no tokenizer.
"""

from importlib.metadata import version
from typing import Any

import vllm
from vllm.lora.request import LoRARequest

from experiments.today.measure import serve


class Vllm:
    """An `LLM` with a slot per request of a batch, and host memory for all adapters."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._params = vllm.SamplingParams
        self._adapters = [LoRARequest(f"adapter-{i}", i, path) for i, path in enumerate(job["adapters"], start=1)]
        self._llm = vllm.LLM(
            model=job["model"], dtype=job["dtype"], seed=0, skip_tokenizer_init=True, enable_prefix_caching=False,
            max_model_len=job["max_len"], max_num_seqs=job["batch_size"], enable_lora=True,
            max_loras=job["batch_size"], max_lora_rank=job["rank"], max_cpu_loras=len(self._adapters), **job["options"],
        )  # fmt: skip
        self.about = f"vllm {vllm.__version__}, torch {version('torch')}"

    def generate(self, prompts: list[list[int]], adapters: list[int], new_tokens: list[int]) -> list[list[int]]:
        params = [self._params(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new_tokens]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        chosen = [self._adapters[i - 1] if i else None for i in adapters]
        outputs = self._llm.generate(given, params, lora_request=chosen, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def register(self, adapter_id: int) -> None:
        self._llm.llm_engine.add_lora(self._adapters[adapter_id - 1])

    def forget(self, adapter_id: int) -> None:
        self._llm.llm_engine.remove_lora(adapter_id)


if __name__ == "__main__":
    serve(Vllm)
