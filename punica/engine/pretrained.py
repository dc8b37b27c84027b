"""Parts of an engine for a checkpoint folder, in sizes that fit the adapters and the machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from punica.adapters import LoRARequest, PEFTHelper
from punica.adapters.request import loading
from punica.checks import check_count, check_number, clip
from punica.config import LoRAConfig
from punica.engine.config import EngineConfig
from punica.engine.sizes import DEFAULT_MODEL_LEN, fit_blocks, slot_bytes
from punica.engine.text import TextCodec, load_codec
from punica.models import LlamaForCausalLM, load_model
from punica.models.families import loading_advice, read_json
from punica.parallel import all_ranks_agree
from punica.scheduling import SamplingParams

GENERATION_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class GenerationDefaults:
    """End tokens of a model (Llama 3 has several), and its default sampling."""

    eos_token_ids: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Pretrained:
    """Parts of an engine."""

    model: LlamaForCausalLM
    lora_config: LoRAConfig | None
    engine_config: EngineConfig
    codec: TextCodec | None
    defaults: GenerationDefaults


def load_pretrained(
    folder: str | Path, adapters: Sequence[LoRARequest], dtype: torch.dtype | str | None,
    device: torch.device | str | None, max_model_len: int | None, memory_fraction: float, sizes: dict[str, Any],
    lora: dict[str, Any],
) -> Pretrained:  # fmt: skip
    """Load the parts of ``Engine.from_pretrained``; checks that need no weights come before reading them.

    ``sizes``: further fields of an ``EngineConfig``; ``lora``: of a ``LoRAConfig``.
    """
    fraction = check_number("memory_fraction", memory_fraction)
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"memory_fraction is {fraction}, must be in (0, 1]")
    with all_ranks_agree():  # ranks need not see the same disk
        _check_folder(folder)
        asked = sizes if max_model_len is None else {**sizes, "max_model_len": max_model_len}
        lora_config = fit_lora_config(adapters, EngineConfig(**asked).full_slots, lora)
        if lora_config is not None and asked.get("batch_invariant"):
            lora_config = replace(lora_config, batch_invariant=True)
        codec = load_codec(folder)
        model = load_model(folder, _as_dtype(dtype), device or ("cuda" if torch.cuda.is_available() else "cpu"))
        defaults = read_generation_defaults(folder, model.config)
    length = min(model.max_context, DEFAULT_MODEL_LEN) if max_model_len is None else max_model_len
    config = EngineConfig(**{**sizes, "max_model_len": length})
    if config.num_blocks is None:
        slots = 0 if lora_config is None else lora_config.max_loras * _slot_bytes(model, lora_config)
        blocks = fit_blocks(model, config, slots, fraction)
        if max_model_len is None:
            length = min(length, blocks * config.block_size)
        config = EngineConfig(**{**sizes, "max_model_len": length, "num_blocks": blocks})
    return Pretrained(model, lora_config, config, codec, defaults)


def fit_lora_config(adapters: Sequence[LoRARequest], full_slots: int, fields: dict[str, Any]) -> LoRAConfig | None:
    """Return a config for ``adapters``: the widest rank, one slot each up to ``full_slots``, host memory for all.

    ``fields`` that are not ``None`` take precedence; without these and adapters the result is ``None``. Raises the
    errors of reading ``adapter_config.json``.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if not adapters and not given:
        return None
    if "max_lora_rank" not in given:
        ranks = [_widest(request) for request in adapters]
        given |= {"max_lora_rank": max(ranks)} if ranks else {}
    slots = given.setdefault("max_loras", min(len(adapters), full_slots) if adapters else full_slots)
    given.setdefault("max_cpu_loras", max(len(adapters), check_count("max_loras", slots)))
    return LoRAConfig(**given)


def read_generation_defaults(folder: str | Path, model_config: Any) -> GenerationDefaults:
    """Read ``generation_config.json``; missing end tokens come from the model's config.

    Without ``do_sample`` the default is greedy, as in transformers. ValueError, TypeError: a damaged file, values out
    of range, an end token outside of the vocabulary.
    """
    path = Path(folder).expanduser() / GENERATION_FILE
    values = read_json(path, "a generation config") if path.is_file() else {}
    found = values.get("eos_token_id")
    ends = _end_tokens(getattr(model_config, "eos_token_id", None) if found is None else found, model_config, path)
    params = SamplingParams()
    keys = ("repetition_penalty", *(_SAMPLING if values.get("do_sample") else ()))
    chosen = {key: values[key] for key in keys if values.get(key) is not None}
    if values.get("do_sample"):
        chosen.setdefault("temperature", 1.0)
    if chosen.get("top_k") == 0:
        del chosen["top_k"]  # off, in transformers
    if values.get("max_new_tokens") is not None:
        chosen["max_new_tokens"] = values["max_new_tokens"]
    try:
        return GenerationDefaults(ends, replace(params, **chosen))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{str(path)!r}: {error}") from error


def as_requests(adapters: LoRARequest | Iterable[LoRARequest]) -> list[LoRARequest]:
    """Return the adapters as a list. TypeError for anything but LoRARequests."""
    found = [adapters] if isinstance(adapters, LoRARequest) else adapters
    if isinstance(found, (str, bytes, dict)) or not isinstance(found, Iterable):
        raise TypeError(f"adapters must be a list of LoRARequest, got {type(found).__name__} {clip(found)}")
    requests = list(found)
    for place, request in enumerate(requests):
        if not isinstance(request, LoRARequest):
            raise TypeError(
                f"adapters[{place}] must be a LoRARequest, got {type(request).__name__} {clip(request)}; write "
                "LoRARequest(name, lora_path=folder)"
            )
    return requests


def _check_folder(folder: object) -> None:
    if isinstance(folder, nn.Module):
        raise TypeError(f"folder must be the path of a checkpoint, got a model; {loading_advice(folder)}")
    if not isinstance(folder, (str, Path)):
        raise TypeError(f"folder must be the path of a checkpoint, got {type(folder).__name__} {clip(folder)}")
    if not Path(folder).expanduser().is_dir():
        raise FileNotFoundError(
            f"model folder {clip(str(folder))} does not exist or is not a folder; nothing is downloaded here: for the "
            "name of a repository, pass what huggingface_hub.snapshot_download(name) returns"
        )


def _end_tokens(value: Any, model_config: Any, path: Path) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for token in ids:
        if check_count(f"eos_token_id (of {str(path)!r} or config.json)", token, 0) >= model_config.vocab_size:
            raise ValueError(
                f"eos_token_id is {clip(token)} in {str(path)!r} or config.json, the vocabulary has "
                f"{model_config.vocab_size} ids; correct it, or generation would never end with it"
            )
    return ids


def _widest(request: LoRARequest) -> int:
    with loading(request):
        helper = PEFTHelper.from_local_dir(request.absolute_path)
    return max([helper.r, *(helper.rank_pattern or {}).values()])


def _slot_bytes(model: LlamaForCausalLM, lora_config: LoRAConfig) -> int:
    dtype = lora_config.fp8 or (model.config.dtype if lora_config.lora_dtype == "auto" else lora_config.lora_dtype)
    named = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return slot_bytes(model, lora_config.max_lora_rank, named.itemsize)


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is {clip(dtype)}, must be None (the checkpoint's), float32, float16 or bfloat16")
    return found
