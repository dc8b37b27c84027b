"""What a checkpoint folder says about generation: when it ends, and how tokens are chosen by default."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from punica.checks import check_count, clip
from punica.models.families import read_json
from punica.scheduling import SamplingParams

GENERATION_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class GenerationDefaults:
    """``eos_token_ids``: tokens that end generation (Llama 3 has several). ``params``: the folder's own sampling."""

    eos_token_ids: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)


def read_generation_defaults(folder: str | Path, model_config: Any) -> GenerationDefaults:
    """From ``generation_config.json``; what it does not say about the end comes from the model's config.

    Without ``do_sample`` the default is greedy, as transformers decodes it. ValueError, TypeError: a damaged file,
    values out of range, an end token outside of the vocabulary.
    """
    path = Path(folder).expanduser() / GENERATION_FILE
    values = read_json(path, "a generation config") if path.is_file() else {}
    found = values.get("eos_token_id")
    ends = _token_ids(getattr(model_config, "eos_token_id", None) if found is None else found, model_config, path)
    params = SamplingParams()
    keys = ("repetition_penalty", *(_SAMPLING if values.get("do_sample") else ()))
    chosen = {key: values[key] for key in keys if values.get(key) is not None}
    if values.get("do_sample"):
        chosen.setdefault("temperature", 1.0)
    if chosen.get("top_k") == 0:
        del chosen["top_k"]  # transformers' way to switch it off
    if values.get("max_new_tokens") is not None:
        chosen["max_new_tokens"] = values["max_new_tokens"]
    try:
        return GenerationDefaults(ends, replace(params, **chosen))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{str(path)!r}: {error}") from error


def _token_ids(value: Any, model_config: Any, path: Path) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for token in ids:
        if check_count(f"eos_token_id (of {str(path)!r} or config.json)", token, 0) >= model_config.vocab_size:
            raise ValueError(
                f"eos_token_id is {clip(token)} in {str(path)!r} or config.json, the vocabulary has "
                f"{model_config.vocab_size} ids; correct it, or generation would never end with it"
            )
    return ids
