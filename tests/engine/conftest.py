"""A tiny Llama on disk, adapters of different ranks beside it, and an oracle that shares no code with the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import LlamaConfig

from punica.adapters import LoRARequest, write_random_adapter
from punica.engine import Engine, EngineConfig
from punica.models import LlamaForCausalLM
from tests.engine.helpers import tokens_of

ADAPTERS = {  # id -> rank, targets
    1: (1, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    2: (8, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    3: (16, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    4: (5, ("q_proj", "v_proj")),
    5: (16, ("gate_proj", "down_proj")),
    6: (3, ("k_proj", "o_proj", "up_proj")),
}


@dataclass
class Backbone:
    """The tiny model: its folder, adapters, and greedy generation with the adapter merged into dense weights."""

    folder: Path
    config: LlamaConfig
    adapters: dict[int, LoRARequest]
    _merged: dict[int, transformers.LlamaForCausalLM] = field(default_factory=dict)
    _generated: dict[tuple, list[int]] = field(default_factory=dict)

    def model(self, device: str = "cpu", dtype: torch.dtype | None = None) -> LlamaForCausalLM:
        model = LlamaForCausalLM(self.folder, dtype, device)
        model.load_weights(self.folder)
        return model

    def engine(
        self, admission: str = "fcfs", max_loras: int | None = None, tokenizer=None, defaults=None, **sizes
    ) -> Engine:
        config = EngineConfig(**{"max_batch_size": 8, "max_model_len": 64, **sizes})
        slots = {} if max_loras is None else {"max_loras": max_loras}
        return Engine(self.model(), config.lora_config(16, **slots), config, admission, tokenizer, defaults)

    def generate_merged(self, prompt: tuple[int, ...], adapter_id: int, new: int) -> list[int]:
        """One request, no cache: each token from a full pass of Hugging Face's model with W + scaling * B A."""
        key = (tuple(prompt), adapter_id, new)
        if key not in self._generated:
            model, tokens = self._merged_model(adapter_id), list(prompt)
            with torch.inference_mode():
                for _ in range(new):
                    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            self._generated[key] = tokens[len(prompt) :]
        return self._generated[key]

    def _merged_model(self, adapter_id: int) -> transformers.LlamaForCausalLM:
        if adapter_id not in self._merged:
            model = transformers.LlamaForCausalLM.from_pretrained(self.folder).eval()
            if adapter_id:
                tensors = load_file(Path(self.adapters[adapter_id].lora_path) / "adapter_model.safetensors")
                for name in [name for name in tensors if name.endswith("lora_A.weight")]:
                    delta = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
                    module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    model.get_submodule(module).weight.data.add_(delta, alpha=2.0)  # alpha / r of write_random_adapter
            self._merged[adapter_id] = model
        return self._merged[adapter_id]


@pytest.fixture(scope="session")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    folder = tmp_path_factory.mktemp("backbone")
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=112,
        vocab_size=256,
        max_position_embeddings=128,
        initializer_range=0.15,
    )
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    adapters = {}
    for adapter_id, (rank, targets) in ADAPTERS.items():
        path = write_random_adapter(folder / f"adapter{adapter_id}", config, rank, adapter_id, target_modules=targets)
        adapters[adapter_id] = LoRARequest(f"adapter-{adapter_id}", adapter_id, str(path))
    return Backbone(folder, config, adapters)


@dataclass(frozen=True)
class Wish:
    """A request of a test: prompt, adapter id (0: none), length."""

    prompt: tuple[int, ...]
    adapter_id: int
    new: int


@pytest.fixture(scope="session")
def mixed_wishes() -> list[Wish]:
    """16 requests: six adapters of ranks 1 to 16 and no adapter, prompts of 1 to 33 tokens, 1 to 17 new ones."""
    generator = torch.Generator().manual_seed(11)
    lengths, news = [1, 2, 15, 16, 17, 31, 32, 33], [1, 2, 7, 12, 17, 16]
    return [
        Wish(tuple(torch.randint(256, (lengths[i % 8],), generator=generator).tolist()), i * 5 % 7, news[i % 6])
        for i in range(16)
    ]


@pytest.fixture
def serve(backbone: Backbone) -> Callable[[Engine, list[Wish]], list[list[int]]]:
    """Generate all wishes together on an engine."""

    def run(engine: Engine, wishes: list[Wish]) -> list[list[int]]:
        adapters = [backbone.adapters.get(wish.adapter_id) for wish in wishes]
        return tokens_of(engine.generate([wish.prompt for wish in wishes], adapters, [wish.new for wish in wishes]))

    return run
