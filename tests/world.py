"""The world of all rooms' tests: tiny checkpoints, tokenizers and adapters on disk, and an oracle of their tokens.

`Backbone` is a checkpoint with adapters; `write_backbone` writes one of any sizes, with a tokenizer if asked.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

from punica.adapters import LoRARequest, write_random_adapter
from punica.engine import (
    Engine,
    EngineConfig,
    GenerationResult,
    Request,
    RequestState,
    RequestStatus,
    StepOutput,
    runner,
)
from punica.models import LlamaForCausalLM

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {  # id -> rank, targets
    1: (1, LAYERS),
    2: (8, LAYERS),
    3: (16, LAYERS),
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

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Backbone, (self.folder, self.config, self.adapters)  # to other processes without what was computed

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

    def ask(self, engine: Engine, name: str, prompt: Sequence[int], adapter_id: int = 0, new: Any = 4) -> RequestState:
        """Queue a request of the adapter ``adapter_id`` (0: none)."""
        return engine.add_request(Request(name, prompt, new, self.adapters.get(adapter_id)))

    def serve(self, engine: Engine, wishes: list["Wish"]) -> list[list[int]]:
        """Generate all wishes together on an engine."""
        adapters = [self.adapters.get(wish.adapter_id) for wish in wishes]
        return tokens_of(engine.generate([wish.prompt for wish in wishes], adapters, [wish.new for wish in wishes]))

    def generate_merged(self, prompt: Sequence[int], adapter_id: int, new: int) -> list[int]:
        """One request, no cache: each token from a full pass of Hugging Face's model with W + scaling * B A."""
        known = self._generated.setdefault((tuple(prompt), adapter_id), [])
        model = self._merged_model(adapter_id)
        with torch.inference_mode():
            while len(known) < new:
                known.append(int(model(torch.tensor([[*prompt, *known]])).logits[0, -1].argmax()))
        return known[:new]

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


SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 112, "vocab_size": 256, "max_position_embeddings": 128, "initializer_range": 0.15,
}  # fmt: skip


def write_backbone(
    folder: Path, adapters: dict[int, tuple[int, Sequence[str]]] = ADAPTERS, tokenizer: Any = None, seed: int = 7,
    **sizes: Any,
) -> Backbone:  # fmt: skip
    """Write a Llama of random weights, its tokenizer, and random adapters ``{id: (rank, targets)}``, named by id."""
    config = LlamaConfig(**{**SIZES, **sizes})
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    requests = {}
    for number, (rank, targets) in adapters.items():
        path = write_random_adapter(folder / f"adapter{number}", config, rank, number, target_modules=targets)
        requests[number] = LoRARequest(f"adapter-{number}", number, str(path))
    return Backbone(folder, config, requests)


class Wish(NamedTuple):
    """A request of a test: prompt, adapter id (0: none), length."""

    prompt: tuple[int, ...]
    adapter_id: int
    new: int


def finish(engine: Engine, patience: int = 20_000) -> dict[str, GenerationResult]:
    """Step until all requests have ended; return the results of steps, and check that the engine keeps nothing."""
    results = {}
    for _ in range(patience):
        if not engine.has_unfinished():
            break
        output = engine.step()
        results |= {result.request_id: result for result in (*output.finished, *output.failed)}
    assert not engine.has_unfinished()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not [*engine.scheduler.running, *engine.scheduler.leaving]
    if engine._residency is not None:
        assert engine._residency._users == {}
        assert engine._residency._readers.readings == {}
        assert not [one for one in engine.manager.active_versions() if one.users or one.superseded]
    return results


def is_of(backbone: Backbone, state: RequestState, version: int | None = None) -> bool:
    """Check that the tokens of a request are those of an adapter, all along; ``None``: of its own."""
    number = state.adapter_id if version is None else version
    expected = backbone.generate_merged(state.prompt_token_ids, number, state.params.max_new_tokens)
    return state.output_token_ids == expected


def are_served(backbone: Backbone, *states: RequestState) -> bool:
    """Check that all requests have the tokens of their own adapters."""
    return [state.request_id for state in states if not is_of(backbone, state)] == []


def steps(engine: Engine, count: int) -> list[StepOutput]:
    return [engine.step() for _ in range(count)]


def step_until_it_runs(engine: Engine, state: RequestState) -> None:
    while state.status is RequestStatus.WAITING:
        engine.step()
    assert state.status is RequestStatus.RUNNING


def reading_beside(engine: Engine) -> Engine:
    """Have threads read folders, and slots filled beside the steps of other requests, as on a GPU."""
    assert engine._residency is not None
    engine._residency._reads_beside = True
    return engine


def damage(folder: str | Path, factor: float = float("nan")) -> None:
    """Spoil the numbers of an adapter, which shows when they are read, not when a request arrives: its header stays."""
    file = Path(folder) / "adapter_model.safetensors"
    save_file({name: tensor * factor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def logits_of(engine: Engine, requests: Sequence[Request]) -> dict[str, list[torch.Tensor]]:
    """Serve all requests; return the logits of each token by request."""
    found: dict[str, list[torch.Tensor]] = {}
    choose = runner.choose_tokens

    def noted(rows: torch.Tensor, states: Sequence[RequestState], best: Any) -> torch.Tensor:
        for state, row in zip(states, rows.clone(), strict=False):  # others pad the step
            found.setdefault(state.request_id, []).append(row)
        return choose(rows, states, best)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "choose_tokens", noted)
        for request in requests:
            engine.add_request(request)
        finish(engine)
    return found


def tokens_of(results: list[GenerationResult]) -> list[list[int]]:
    """Return the generated tokens; every request must have ended without error."""
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids for result in results]


def torch_without_gpu() -> SimpleNamespace:
    """Return a stand-in for torch in `punica.engine.cuda_graph`, for tests that replace the capture."""
    device = SimpleNamespace(
        graph_pool_handle=lambda: None, mem_get_info=lambda _: (0, 0), synchronize=lambda _: None,
        empty_cache=lambda: None, Stream=lambda _: None, CUDAGraph=torch.cuda.CUDAGraph,
    )  # fmt: skip
    return SimpleNamespace(cuda=device, device=torch.device, OutOfMemoryError=torch.OutOfMemoryError)


def adapter_of_the_ends(backbone: Any, folder: Path) -> tuple[LoRARequest, transformers.LlamaForCausalLM]:
    """A PEFT adapter of embedding and head with rank 4, and the model that it is merged into."""
    hidden, vocab = backbone.config.hidden_size, backbone.config.vocab_size
    pairs = {"embed_tokens": (vocab, hidden), "lm_head": (hidden, vocab)}  # inputs, outputs
    path = write_random_adapter(folder, backbone.config, 4, 9, target_modules=("q_proj",))
    settings = json.loads((path / "adapter_config.json").read_text()) | {"target_modules": list(pairs)}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    merged = transformers.LlamaForCausalLM.from_pretrained(backbone.folder).eval()
    tensors, start = {}, "base_model.model."
    for name, (inputs, outputs) in pairs.items():
        a, b = torch.randn(4, inputs) / 4, torch.randn(outputs, 4) / 4
        if name == "embed_tokens":
            tensors |= {f"{start}model.{name}.lora_embedding_A": a, f"{start}model.{name}.lora_embedding_B": b}
            merged.model.embed_tokens.weight.data.add_((b @ a).T, alpha=2.0)
        else:
            tensors |= {f"{start}{name}.lora_A.weight": a, f"{start}{name}.lora_B.weight": b}
            merged.lm_head.weight.data.add_(b @ a, alpha=2.0)
    save_file(tensors, path / "adapter_model.safetensors")
    return LoRARequest("ends", 9, str(path)), merged


BEGIN, END = 256, 257
VOCAB = 258
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes (in the order of the byte-level alphabet), 256 begins every text, 257 ends it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BEGIN)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = chat_template
    return made


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Ids are bytes, decoded as Llama's tokenizer does: a run of bytes is text if all of it is."""
    vocabulary = {f"<0x{number:02X}>": number for number in range(256)} | {"<unk>": BEGIN}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


WORDS = {word: number for number, word in enumerate(("<unk>", "▁", "▁return", "s", "▁x", "▁▁▁"))}


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Ids are ``WORDS`` and bytes, decoded as Llama's: the first space of a text is dropped."""
    vocabulary = WORDS | {f"<0x{number:02X}>": len(WORDS) + number for number in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save_tokenizer(folder: Path, chat_template: str | None = CHAT) -> Path:
    """Into a checkpoint folder."""
    byte_tokenizer(chat_template).save_pretrained(folder)
    return folder
