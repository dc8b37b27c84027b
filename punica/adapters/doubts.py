"""Warnings of an adapter that loads, and whose outputs may be wrong; each is shown once for an adapter."""

from collections.abc import Iterable, Mapping
from typing import Any

from punica.checks import clip

BASE_WEIGHTS = ("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")
"""Ends of the names of base weights that PEFT saves along."""
# These initialisations subtract something from the base weights, and training went on from there.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")
_OTHER_INITS = ("gaussian", "eva", "orthogonal", "true", "false")
_OF_TRAINING = frozenset({
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config",
    "megatron_config", "quantization_config", "use_cache", "use_gradient_checkpointing", "use_unsloth",
})  # fmt: skip
"""Settings of a config that no result of a layer depends on."""


def doubt_of_init(init: bool | str) -> str | None:
    """Describe an `init_lora_weights` that changes the base model; with pissa, olora, corda, lora_ga and loftq, and
    perhaps with unknown ones, training starts from another one than the serving backbone. `None` for the others.
    """
    if str(init).lower() in _OTHER_INITS:
        return None
    is_known = isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS)
    unknown = "" if is_known else "is not known here and "
    return (
        f"init_lora_weights={clip(init)} {unknown}may have altered the base model during training; unless the "
        "adapter was converted to plain LoRA when it was saved, outputs on the original base model will be wrong"
    )


def doubt_of_switches(config: Mapping[str, Any], known: Iterable[str]) -> str | None:
    """Describe features that a config turns on and that are not ``known``, as a later PEFT may have them."""
    others = config.keys() - known - _OF_TRAINING
    on = sorted(
        key for key in map(str, others) if config.get(key) and (key.startswith("use_") or key.endswith("_config"))
    )
    if not on:
        return None
    return f"{clip(on)} of its config are not known here; if they change what a layer computes, outputs will be wrong"


def doubt_of_base_weights(keys: Iterable[str]) -> str | None:
    """Describe base weights among an adapter's tensors, which are left out; `None`: there are none."""
    saved = sorted(key for key in keys if key.endswith(BASE_WEIGHTS))
    if not saved:
        return None
    return (
        f"{clip(saved)} are not read; PEFT saves them beside adapters of embedding and head, and loads them over the "
        "base model's. If they were changed, for added tokens for example, outputs will be wrong: serve the adapter on "
        "the model that it was trained on"
    )
