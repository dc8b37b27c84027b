"""Names, from the tensors of a checkpoint to the modules of the model; which tensors of an adapter are read."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from punica.checks import clip

PEFT_PREFIX = "base_model.model."
TIED = ("embed_tokens", "lm_head")  # PEFT names one of a pair with tied weights, and saves both
BASE_WEIGHTS = tuple(f"{name}.base_layer.weight" for name in TIED)  # that PEFT saves along, by their ends
_NOT_READ = (*BASE_WEIGHTS, ".lora_velora_embed")  # VeLoRA's tensors are of its backward pass alone
MOST_NAME = 1 << 14  # characters of a renamed tensor
MOST_PARTS = 32  # of a module's name, each end of which is looked up: without a limit in quadratic time

# Experts stored projection by projection, as SGLang, Megatron-Bridge and vLLM do (`experts_shared_outer_loras`,
# `enable_moe_shared_loras`): under `...experts.w1` A is [E, r, in] and B [E, out, r], with 1 for E where all share one.
W1, W2, W3, W13 = range(-2, -6, -1)  # part numbers of whole projections; those of single matrices start at 0
PROJECTIONS = {  # by their last name components
    "w1": W1, "gate_proj": W1, "w2": W2, "down_proj": W2, "w3": W3, "up_proj": W3, "w13": W13, "gate_up_proj": W13,
}  # fmt: skip

NameMapper = Callable[[str], str] | Mapping[str, str]

# <module>.lora_A[.<adapter>].weight, or <module>.lora_embedding_A[.<adapter>]
_TENSOR_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.[^.]+)?(?(embedding)|\.weight)"
)
_STACKED_NAME = re.compile(r"(?:.*\.)?experts(?:\.base_layer)*")
_EXPERT_NAME = re.compile(r"(?:.*\.)?experts\.(?P<expert>\d+)\..+")


def last_component(name: str) -> str:
    return name.rpartition(".")[2]


def adapter_component(name: str) -> str:
    """Return the end of a module's name in adapters; of experts the part from `experts` on: `experts.3.w1`."""
    parts = name.split(".")
    return ".".join(parts[parts.index("experts") :]) if "experts" in parts else parts[-1]


def sibling(name: str, last: str) -> str:
    parent, dot, _ = name.rpartition(".")
    return f"{parent}{dot}{last}"


def starts_of_parts(name: str) -> list[int]:
    """Return the offsets of the name and of its parts behind a dot."""
    return [0, *(position + 1 for position, character in enumerate(name) if character == ".")]


def is_stacked_name(module: str) -> bool:
    """Tell if a module is all experts of a layer at once: `...experts`, `...experts.base_layer`."""
    return _STACKED_NAME.fullmatch(module) is not None


def is_projection_name(module: str) -> bool:
    """Tell if a module is one projection of all experts of a layer: `...experts.w1`."""
    owner, _, last = module.rpartition(".")
    return last in PROJECTIONS and last_component(owner) == "experts"


class MoEEPSpec(NamedTuple):
    """Experts of a rank: `local_num_experts` of `global_num_experts`, in equal blocks one after the other."""

    ep_rank: int
    local_num_experts: int
    global_num_experts: int

    def is_remote(self, module: str) -> bool:
        """Tell if a module is known to belong to one expert of another rank."""
        match = _EXPERT_NAME.fullmatch(module)
        return match is not None and int(match["expert"]) // self.local_num_experts != self.ep_rank


class TensorName(NamedTuple):
    """Meaning of a tensor's name: A or B of a module."""

    module: str
    is_a: bool
    configured: str  # the module in the adapter's config, before the `weights_mapper` where that name can be parsed


def _mapped(name: str, weights_mapper: NameMapper | None) -> str:
    """Rename a checkpoint tensor by a function or a dict `{old: new}`, without `base_model.model.`."""
    name = name.removeprefix(PEFT_PREFIX)
    if weights_mapper is None:
        return name
    if isinstance(weights_mapper, Mapping):
        for old, new in weights_mapper.items():
            if len(name) + name.count(old) * len(new) > MOST_NAME:  # before it is built: names could grow at each turn
                raise ValueError(f"weights_mapper replaces {clip(old)} by {clip(new)}: at most {MOST_NAME} characters")
            name = name.replace(old, new)
        return name
    if callable(weights_mapper):
        return weights_mapper(name)
    raise TypeError(f"weights_mapper must be a function or a dict, got {type(weights_mapper).__name__}")


def parse_fine_tuned_lora_name(name: str, weights_mapper: NameMapper | None = None) -> tuple[str, bool]:
    """Split a checkpoint tensor's name into `(module_name, is_lora_a)`. ValueError: any other name.

    `base_model.model.<m>.lora_A.weight`, `<m>.lora_A.<adapter>.weight`, and the same without the prefix give
    `(<m>, True)`; B gives `False`; embeddings are spelled `<m>.lora_embedding_A`.
    """
    return _parse(name, weights_mapper)[:2]


def _parse(key: str, weights_mapper: NameMapper | None) -> TensorName:
    mapped = _mapped(key, weights_mapper)
    if "lora_magnitude_vector" in mapped:
        raise ValueError(f"{clip(key)} is of DoRA, which is not supported; merge the adapter or train plain LoRA")
    match = _TENSOR_NAME.fullmatch(mapped)
    if match is None:
        raise ValueError(
            f"unsupported LoRA weight {clip(key)}; expected <module>.lora_A.weight, .lora_B.weight or "
            f".lora_embedding_A/B{_remedy_of(key)}"
        )
    own = match if weights_mapper is None else _TENSOR_NAME.fullmatch(_mapped(key, None)) or match
    configured = own["module"]
    if (parts := configured.count(".") + 1) > MOST_PARTS:
        raise ValueError(f"{clip(configured)} has {parts} parts, a module's name at most {MOST_PARTS}; rename it")
    return TensorName(match["module"], match["side"] == "A", configured)


def _remedy_of(key: str) -> str:
    if key.endswith(".bias"):
        return ". It is a bias, trained with bias='all' or 'lora_only': train with bias='none', or merge the adapter"
    if not key.endswith(("embed_tokens.weight", "lm_head.weight")):
        return ""
    return (
        ". PEFT saves whole embeddings along after the vocabulary was resized (merge the adapter into that model, "
        "merge_and_unload) or with save_embedding_layers=True (save it again without)"
    )


def lora_names(
    keys: Iterable[str], weights_mapper: NameMapper | None, skip_prefixes: Sequence[str] | None
) -> dict[str, TensorName]:
    """Parse the names of LoRA tensors, but for modules whose name, or its part after some dot, starts with one of
    `skip_prefixes`. ValueError: a key is not a LoRA name, two keys name the same matrix, or there are none.
    """
    names: dict[str, TensorName] = {}
    owner: dict[tuple[str, bool], str] = {}
    for key in keys:
        mapped = _mapped(key, weights_mapper)
        skipped = any(f".{prefix}" in f".{mapped}" for prefix in skip_prefixes or ())
        if skipped or key.endswith(_NOT_READ):
            continue
        names[key] = name = _parse(key, weights_mapper)
        first = owner.setdefault(name[:2], key)
        if first != key:
            side = "A" if name.is_a else "B"
            raise ValueError(f"tensors {clip(first)} and {clip(key)} are both {side} of module {clip(name.module)}")
    if not names:
        raise ValueError("the adapter has no LoRA tensors at all")
    return names


@dataclass(frozen=True)
class NameRules:
    """Names that the tensors of an adapter may have."""

    expected: Collection[str]  # last components of modules; of experts, the part from `experts` on
    moe_ep_spec: MoEEPSpec | None = None  # the experts of this rank; tensors of others are left out
    most_tensors: int = 1 << 17
    skip_prefixes: Sequence[str] | None = None  # of modules to leave out, see `lora_names`

    def wanted(self, keys: Collection[str], weights_mapper: NameMapper | None = None) -> dict[str, TensorName]:
        """Check the names of an adapter's tensors, as :func:`lora_names`; return those of the LoRA tensors that this
        rank reads. ValueError: too many, or modules that are not expected.
        """
        if len(keys) > self.most_tensors:
            raise ValueError(f"it has {len(keys)} tensors, an adapter of this model at most {self.most_tensors}")
        names, expected = lora_names(keys, weights_mapper, self.skip_prefixes), set(self.expected)
        modules = {name.module for name in names.values()}
        if offenders := sorted(module for module in modules if adapter_component(module) not in expected):
            endings = sorted(expected)
            shown = f"{endings[:40]} and {len(endings) - 40} more" if len(endings) > 40 else str(endings)
            raise ValueError(f"the model has no {clip(offenders)} of the adapter; expected names end in {shown}")
        spec = self.moe_ep_spec
        return {key: name for key, name in names.items() if spec is None or not spec.is_remote(name.module)}
