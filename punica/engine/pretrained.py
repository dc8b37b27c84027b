"""Parts of an engine for a checkpoint folder, in sizes that fit the adapters and the machine."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from punica.adapters import LoRARequest
from punica.adapters.config import CONFIG_FILE as ADAPTER_FILE
from punica.adapters.request import config_of, loading
from punica.adapters.wrap import slots_need
from punica.checks import as_int, check_count, check_number, clip
from punica.config import LoRAConfig
from punica.engine.config import DEFAULT_MODEL_LEN, EngineConfig, fit_blocks
from punica.engine.text import load_tokenizer
from punica.models import LlamaForCausalLM, load_model
from punica.models.families import CONFIG_FILE, loading_advice, read_json
from punica.parallel import all_ranks_agree
from punica.scheduling import SamplingParams

GENERATION_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_TOP_K = 50  # of transformers, where a folder that samples has none
_UNSERVED: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "min_length": 0, "max_time": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "begin_suppress_tokens": [], "sequence_bias": {}, "penalty_alpha": 0,
    "exponential_decay_length_penalty": None, "guidance_scale": 1, "token_healing": False,
    "watermarking_config": None, "dola_layers": None, "constraints": None, "force_words_ids": None,
}  # fmt: skip
"""Fields that change tokens and are not served, with the values that do not; None: any other value does."""
_UNSERVED_DRAWS: dict[str, Any] = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}


@dataclass(frozen=True)
class GenerationDefaults:
    """End tokens of a model (Llama 3 has several), and its default sampling."""

    eos_token_ids: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)


def load_pretrained(
    folder: str | Path, adapters: Sequence[LoRARequest], weights: dict[str, Any], max_model_len: int | None,
    memory_fraction: float, sizes: dict[str, Any], lora: dict[str, Any],
) -> tuple[LlamaForCausalLM, LoRAConfig | None, EngineConfig, Any, GenerationDefaults]:  # fmt: skip
    """Load the parts of ``Engine.from_pretrained``; checks that need no weights come before reading them.

    ``sizes``: fields of an ``EngineConfig``; ``lora``: of a ``LoRAConfig``. The fourth part is the tokenizer.
    """
    fraction = check_number("memory_fraction", memory_fraction)
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"memory_fraction is {fraction}, must be in (0, 1]")
    with all_ranks_agree():  # ranks need not see the same disk
        _check_folder(folder)
        asked = sizes if max_model_len is None else {**sizes, "max_model_len": max_model_len}
        lora_config = fit_lora_config(adapters, EngineConfig(**asked), lora)
        tokenizer = load_tokenizer(folder)
        device = weights["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(folder, _as_dtype(weights["dtype"]), device, fp8_weights=weights["fp8_weights"])
        defaults = read_generation_defaults(folder, model.config, has_tokenizer=tokenizer is not None)
    length = min(model.max_context, DEFAULT_MODEL_LEN) if max_model_len is None else max_model_len
    config = EngineConfig(**{**sizes, "max_model_len": length})
    if config.num_blocks is None:
        slots = 0 if lora_config is None else slots_need(model, lora_config).nbytes
        blocks = fit_blocks(model, config, slots, fraction)
        if max_model_len is None:
            length = min(length, blocks * config.block_size)
        config = EngineConfig(**{**sizes, "max_model_len": length, "num_blocks": blocks})
    return model, lora_config, config, tokenizer, defaults


def fit_lora_config(adapters: Sequence[LoRARequest], sizes: EngineConfig, fields: dict[str, Any]) -> LoRAConfig | None:
    """Return a config for ``adapters``: the widest rank, one slot each up to ``full_slots``, host memory for all.

    ``fields`` that are not ``None`` take precedence; without these and adapters the result is ``None``.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if not adapters and not given:
        return None
    if "max_lora_rank" not in given and adapters:
        ranks = []
        for request in adapters:
            with loading(request):
                helper = config_of(request)
            ranks += [helper.r, *(helper.rank_pattern or {}).values()]
        given["max_lora_rank"] = max(ranks)
    slots = given.setdefault("max_loras", min(len(adapters) or sizes.full_slots, sizes.full_slots))
    given.setdefault("max_cpu_loras", max(len(adapters), check_count("max_loras", slots)))
    return sizes.lora_config(**given)


def read_generation_defaults(
    folder: str | Path, model_config: Any, *, has_tokenizer: bool = True
) -> GenerationDefaults:
    """Read ``generation_config.json``; missing end tokens come from the model's config.

    As in transformers: without ``do_sample`` the default is greedy, with it and without ``top_k`` the 50 most probable
    tokens are drawn from, and end tokens and suppressed tokens outside of the vocabulary never come. Of those, and of
    fields that would change tokens and are not served, it warns. ValueError, TypeError: a damaged file, values out of
    range, a bad word outside of the vocabulary.
    """
    path = Path(folder).expanduser() / GENERATION_FILE
    given = read_json(path, "a generation config") if path.is_file() else {}
    values = {name: value for name, value in given.items() if value is not None}
    vocab_size = model_config.vocab_size
    ends = values.get("eos_token_id", getattr(model_config, "eos_token_id", None))
    ends = _in_vocabulary("eos_token_id", ends, vocab_size, path)
    if isinstance(values.get("suppress_tokens"), list):
        values["suppress_tokens"] = _in_vocabulary("suppress_tokens", values["suppress_tokens"], vocab_size, path)
    try:
        defaults = GenerationDefaults(ends, SamplingParams(**_sampling_fields(values, has_tokenizer)))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{str(path)!r}: {error}") from error
    banned = [token for word in defaults.params.bad_words for token in word if not isinstance(token, str)]
    if max(banned, default=0) >= vocab_size:
        raise ValueError(
            f"{str(path)!r}: bad_words_ids have {max(banned)}, the vocabulary has {vocab_size} ids; correct them"
        )
    _warn_of_unserved(values, path, has_tokenizer)
    return defaults


def _sampling_fields(values: dict[str, Any], has_tokenizer: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {name: values[name] for name in ("repetition_penalty", "max_new_tokens") if name in values}
    if values.get("do_sample"):
        fields |= {"temperature": 1.0, "top_k": _TOP_K} | {name: values[name] for name in _SAMPLING if name in values}
        if fields["top_k"] == 0:
            fields["top_k"] = None
    if "min_new_tokens" in values:
        fewest = check_count("min_new_tokens", values["min_new_tokens"], 0)
        longest = fields.setdefault("max_new_tokens", max(fewest, SamplingParams().max_new_tokens))
        fields["min_tokens"] = min(fewest, check_count("max_new_tokens", longest))
    suppressed = [[token] for token in values.get("suppress_tokens", ())]
    fields["bad_words"] = [*suppressed, *values.get("bad_words_ids", ())]
    if has_tokenizer and "stop_strings" in values:
        fields["stop"] = values["stop_strings"]
    return fields


def _warn_of_unserved(values: dict[str, Any], path: Path, has_tokenizer: bool) -> None:
    neutral = _UNSERVED | (_UNSERVED_DRAWS if values.get("do_sample") else {})
    neutral |= {} if "max_new_tokens" in values else {"max_length": 0}
    neutral |= {} if has_tokenizer else {"stop_strings": []}
    named = [name for name, usual in neutral.items() if values.get(name, usual) != usual]
    if named:
        asked = ", ".join(f"{name}={clip(values[name])}" for name in sorted(named))
        warnings.warn(f"{str(path)!r} asks for {asked}, which this engine does not serve", stacklevel=2)


def as_requests(adapters: LoRARequest | Iterable[LoRARequest]) -> list[LoRARequest]:
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
    home = Path(folder).expanduser()
    if not home.is_dir():
        raise FileNotFoundError(
            f"model folder {clip(str(folder))} does not exist or is not a folder; nothing is downloaded here: for the "
            "name of a repository, pass what huggingface_hub.snapshot_download(name) returns"
        )
    if (home / ADAPTER_FILE).is_file() and not (home / CONFIG_FILE).is_file():
        raise ValueError(
            f"{clip(str(folder))} is the folder of an adapter; pass its base model's, and this one as "
            "LoRARequest(name, lora_path=folder)"
        )


def _in_vocabulary(name: str, value: Any, vocab_size: int, path: Path) -> tuple[int, ...]:
    """Return the tokens of a field, one or several, that can come; warn of the others. TypeError: no integers."""
    where = f"{name} (of {str(path)!r} or config.json)"
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    known = tuple(token for token in ids if 0 <= as_int(where, token) < vocab_size)
    if len(known) < len(ids):
        warnings.warn(
            f"{where} is {clip(value)}, the vocabulary has {vocab_size} ids: what is outside never comes, as in "
            "transformers; correct it",
            stacklevel=3,
        )
    return known


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is {clip(dtype)}, must be None (the checkpoint's), float32, float16 or bfloat16")
    return found
