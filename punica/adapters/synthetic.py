"""Untrained adapters: random ones in the PEFT format for benchmarks, examples and tests, and zero ones for warm-up.

Speed does not depend on the values of weights, so the paper measures with random ones. Here A ~ N(0, 1/in) and B ~
N(0, 1/(16 r)). With the default `alpha = 2 r` the change `scaling * B A` has a standard deviation of `0.5 / sqrt(in)`
per element, about half of a typical base weight: it changes the output, but does not dominate the base model.

A zero adapter (:class:`DummyAdapters`) has the cost of a real adapter of its rank, and no effect on outputs.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from punica.adapters.lora_model import LoRAModel
from punica.adapters.peft_config import CONFIG_FILE, PEFTHelper
from punica.adapters.read import PEFT_PREFIX, WEIGHTS_FILE
from punica.adapters.weights import ModuleWeights
from punica.adapters.wrap import last_component
from punica.checks import check_count
from punica.config import LoRAConfig
from punica.layers import BaseLayerWithLoRA

LLAMA_LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def llama_module_shapes(model_config: Any, target_modules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return `{module name: (in, out)}` of the targeted linear layers of a Hugging Face Llama config.

    ValueError: no target, or one that is not a linear layer of Llama.
    """
    unknown = sorted(set(target_modules) - set(LLAMA_LORA_MODULES))
    if unknown or not target_modules:
        raise ValueError(f"target_modules must be some of {list(LLAMA_LORA_MODULES)}, got {list(target_modules)}")
    hidden, heads = model_config.hidden_size, model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or hidden // heads
    q_size, kv_size = heads * head_dim, (model_config.num_key_value_heads or heads) * head_dim
    shapes = {
        "self_attn.q_proj": (hidden, q_size),
        "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size),
        "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, model_config.intermediate_size),
        "mlp.up_proj": (hidden, model_config.intermediate_size),
        "mlp.down_proj": (model_config.intermediate_size, hidden),
    }
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(model_config.num_hidden_layers)
        for name, shape in shapes.items()
        if last_component(name) in target_modules
    }


def random_adapter_tensors(
    model_config: Any,
    rank: int,
    seed: int,
    *,
    target_modules: Sequence[str] = LLAMA_LORA_MODULES,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Draw PEFT-named tensors `{...lora_A.weight: [rank, in], ...lora_B.weight: [out, rank]}` on `device`.

    The same seed gives the same bits on the same kind of device. A CPU takes a second for an adapter of a 7B model.
    ValueError: `rank` < 1 or bad `target_modules`.
    """
    check_count("rank", rank)
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for module, (width, height) in llama_module_shapes(model_config, target_modules).items():
        a = torch.randn(rank, width, generator=generator, device=device) / math.sqrt(width)
        b = torch.randn(height, rank, generator=generator, device=device) / (4 * math.sqrt(rank))
        tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = b.to(dtype)
    return tensors


def write_random_adapter(
    folder: str | Path,
    model_config: Any,
    rank: int,
    seed: int,
    *,
    target_modules: Sequence[str] = LLAMA_LORA_MODULES,
    alpha: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Path:
    """Write a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`), and return its path.

    The peft library loads it too.

    Args:
        folder: created with its parents; existing adapter files in it are overwritten.
        model_config: Hugging Face Llama config (or anything with its sizes).
        rank, seed, target_modules, dtype, device: see :func:`random_adapter_tensors`.
        alpha: `lora_alpha`; default `2 * rank`, i.e. scaling 2.
    """
    tensors = random_adapter_tensors(
        model_config, rank, seed, target_modules=target_modules, dtype=dtype, device=device
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(target_modules),
    }
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, str(path / WEIGHTS_FILE), metadata={"format": "pt"})
    return path


def random_adapter(
    lora_model_id: int,
    model_config: Any,
    rank: int,
    seed: int,
    *,
    target_modules: Sequence[str] = LLAMA_LORA_MODULES,
    dtype: torch.dtype = torch.float32,
) -> LoRAModel:
    """Build in memory the adapter that :func:`write_random_adapter` would write with the same arguments.

    `random_adapter(...).clone(other_id)` is another tenant with the same tensors.
    """
    tensors = random_adapter_tensors(model_config, rank, seed, target_modules=target_modules, dtype=dtype)
    helper = PEFTHelper(rank, 2 * rank, list(target_modules))
    return LoRAModel.from_lora_tensors(lora_model_id, tensors, helper)


@dataclass
class DummyAdapters:
    """Factory of zero adapters for one wrapped model.

    Args:
        modules: `{name: LoRA layer}`.
        embedding_modules: last name components of those of them that are embeddings or heads.
        lora_config: limits the rank; its dtype, resolved, is that of the tensors.
    """

    modules: Mapping[str, BaseLayerWithLoRA]
    embedding_modules: set[str]
    lora_config: LoRAConfig
    _by_rank: dict[int, LoRAModel] | None = None  # while caching

    def create(self, adapter_id: int, rank: int, embedding_modules: Collection[str] | None = None) -> LoRAModel:
        """Build a zero adapter; see :meth:`punica.adapters.LoRAModelManager.create_dummy_lora`."""
        limit = self.lora_config.max_lora_rank
        if check_count("rank", rank) > limit:
            raise ValueError(f"rank must be in [1, max_lora_rank={limit}], got {rank}")
        ranks = max(layer.tp_size for layer in self.modules.values()) if self.lora_config.fully_sharded_loras else 1
        rank = -(-rank // ranks) * ranks
        wanted = self.embedding_modules if embedding_modules is None else set(embedding_modules)
        if unknown := sorted(wanted - self.embedding_modules):
            raise ValueError(
                f"embedding_modules {unknown} are none of the model's, which are {sorted(self.embedding_modules)}"
            )
        left_out = self.embedding_modules - wanted
        names = [name for name in self.modules if last_component(name) not in left_out]
        return LoRAModel(adapter_id, rank, {name: self._zeros(name, rank) for name in names})

    def get(self, adapter_id: int, rank: int) -> LoRAModel:
        """Build a zero adapter over all modules; inside :meth:`caching` those of one rank share their tensors."""
        if self._by_rank is None:
            return self.create(adapter_id, rank)
        if rank not in self._by_rank:
            self._by_rank[rank] = self.create(adapter_id, rank)
        return self._by_rank[rank].clone(adapter_id)

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Build one zero adapter per rank inside this context. Nested uses share the outermost cache."""
        outer = self._by_rank
        self._by_rank = {} if outer is None else outer
        try:
            yield
        finally:
            self._by_rank = outer

    def _zeros(self, name: str, rank: int) -> ModuleWeights:
        dtype = cast(torch.dtype, self.lora_config.lora_dtype)
        return ModuleWeights(name, rank, self.modules[name].zero_slices(rank, dtype))
