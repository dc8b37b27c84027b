"""Reading a PEFT folder: `adapter_config.json` (rank, alpha, targets) and `adapter_model.safetensors` (the pairs A, B).

:class:`PEFTHelper` answers "which rank and which scaling has module m", :func:`parse_fine_tuned_lora_name` turns a
tensor's name into (module, is it A), :func:`read_tensors` reads no tensor before the names of all have been checked. No
pickle is ever read.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from punica.adapters.check import SCALE_SUFFIX, check_any, check_expected_modules, is_scale_of_another
from punica.adapters.request import LoRARequest, loading, resolve_adapter_path
from punica.adapters.wrap import MoEEPSpec
from punica.checks import check_count
from punica.config import LoRAConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
# These initialisations subtract something from the base weights, and training went on from there.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga")

NameMapper = Callable[[str], str] | Mapping[str, str]


def _check_alpha(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not abs(value) <= sys.float_info.max:  # false for NaN too; JSON may hold integers that no float can
        raise ValueError(f"{name} must be finite, got {value if isinstance(value, float) else 'a huge integer'}")


@dataclass(frozen=True, kw_only=True)
class UnsupportedFeatures:
    """What changes a layer's result beyond `+ scaling * B A`; any truthy value is refused."""

    use_dora: bool = False
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    fan_in_fan_out: bool = False
    layer_replication: list | None = None
    alora_invocation_tokens: list[int] | None = None
    use_qalora: bool = False
    use_bdlora: Any = None


@dataclass(frozen=True)
class PEFTHelper(UnsupportedFeatures):
    """The content of `adapter_config.json` as far as inference needs it.

    For module m (adapter naming, without `base_model.model.`) the rank `r_m` and `alpha_m` are the values of the first
    key of `rank_pattern` / `alpha_pattern`, in file order, that matches m or a suffix of m after a dot, else the global
    ones. Then

        delta W_m = scaling_m * B_m A_m,   scaling_m = alpha_m / r_m   (alpha_m / sqrt(r_m) with `use_rslora`)

    These are the rules by which PEFT itself chose ranks and scalings in training; note that PEFT sorts the patterns'
    keys when it saves. `target_modules` is informational (`"all-linear"`, a regular expression, or names): the tensors
    in the folder say which modules are adapted, after `exclude_modules`, `layers_to_transform` and the like.

    Unknown keys are ignored. What cannot be served (DoRA, biases, ...) is read here and refused by
    :meth:`validate_legal`.

    Raises:
        TypeError: rank not an int, alpha not a number, `use_rslora` not a bool, targets or a pattern of another type.
        ValueError: rank < 1, alpha not finite, no target, a pattern key that is no regular expression.
    """

    r: int
    lora_alpha: float
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    peft_type: str | None = None
    init_lora_weights: bool | str = True
    _rank_rules: list[tuple[re.Pattern, int]] = field(init=False, repr=False, compare=False)
    _alpha_rules: list[tuple[re.Pattern, float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("r", self.r)
        _check_alpha("lora_alpha", self.lora_alpha)
        if not isinstance(self.use_rslora, bool):
            raise TypeError(f"use_rslora must be a bool, got {self.use_rslora!r} ({type(self.use_rslora).__name__})")
        for key in ("target_modules", "target_parameters"):
            object.__setattr__(self, key, _targets(key, getattr(self, key)))
        if not self.target_modules and not self.target_parameters:
            raise ValueError("target_modules or target_parameters is required, got neither")
        object.__setattr__(self, "_rank_rules", _compile_rules(self.rank_pattern, "rank_pattern", check_count))
        object.__setattr__(self, "_alpha_rules", _compile_rules(self.alpha_pattern, "alpha_pattern", _check_alpha))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> PEFTHelper:
        """Build from the parsed JSON, or from `LoraConfig.to_dict()`; unknown keys are ignored, `null` means not given.

        Raises:
            TypeError: `config` is not a mapping. ValueError: required keys are missing (all of them are named, and the
                `peft_type` where another method than LoRA explains it).
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"adapter config must be a JSON object, got {type(config).__name__}")
        missing = [key for key in ("r", "lora_alpha") if config.get(key) is None]
        if not config.get("target_modules") and not config.get("target_parameters"):
            missing.append("target_modules (or target_parameters)")
        if missing:
            reason = [problem + "; "] if (problem := _peft_type_problem(config.get("peft_type"))) else []
            raise ValueError(
                f"{''.join(reason)}adapter config lacks the required keys {missing}; it has {sorted(map(str, config))}"
            )
        known = {f.name for f in fields(cls) if f.init}
        return cls(**{key: value for key, value in config.items() if key in known and value is not None})

    @classmethod
    def from_local_dir(cls, path: str | Path) -> PEFTHelper:
        """Read `adapter_config.json` of a PEFT folder.

        Raises:
            FileNotFoundError: no such folder or file. ValueError, TypeError: invalid JSON or content; the message names
                the file.
        """
        file = resolve_adapter_path(path) / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{str(file)!r} does not exist; a PEFT adapter folder needs {CONFIG_FILE}")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
            raise ValueError(f"{str(file)!r} is not valid JSON: {error}") from error
        try:
            return cls.from_dict(config)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{str(file)!r}: {error}") from error

    def rank_of(self, module_name: str) -> int:
        """`r_m` of one module."""
        return next((value for pattern, value in self._rank_rules if pattern.fullmatch(module_name)), self.r)

    def alpha_of(self, module_name: str) -> float:
        """`alpha_m` of one module."""
        return next((value for pattern, value in self._alpha_rules if pattern.fullmatch(module_name)), self.lora_alpha)

    def scaling_of(self, module_name: str) -> float:
        """`alpha_m / r_m`, or `alpha_m / sqrt(r_m)` with `use_rslora` (rank-stabilised LoRA)."""
        rank = self.rank_of(module_name)
        return self.alpha_of(module_name) / (math.sqrt(rank) if self.use_rslora else rank)

    def validate_legal(self, lora_config: LoRAConfig) -> None:
        """Refuse what this library cannot serve, all problems in one message.

        Warns when `init_lora_weights` is pissa, olora, corda or lora_ga: training then started from a changed base
        model, which the serving backbone is not.

        Raises:
            ValueError: DoRA, biases, extra saved modules, other unsupported features, or a rank above `max_lora_rank`.
        """
        problems = [problem] if (problem := _peft_type_problem(self.peft_type)) else []
        if self.bias != "none":
            problems.append(f"bias is {self.bias!r}, only 'none' is supported")
        for feature in fields(UnsupportedFeatures):
            if value := getattr(self, feature.name):
                problems.append(f"{feature.name} is set ({value!r}) and not supported")
        limit = lora_config.max_lora_rank
        ranks = {"r": self.r} | {f"rank_pattern[{key!r}]": rank for key, rank in (self.rank_pattern or {}).items()}
        for where, rank in ranks.items():
            if rank > limit:
                problems.append(f"{where}: rank {rank} exceeds max_lora_rank {limit} (raise LoRAConfig.max_lora_rank)")
        if problems:
            raise ValueError("this adapter cannot be served: " + "; ".join(problems))
        init = self.init_lora_weights
        if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
            warnings.warn(
                f"init_lora_weights={init!r} may have altered the base model during training; unless the adapter was "
                "converted to plain LoRA when it was saved, outputs on the original base model will be wrong",
                stacklevel=2,
            )


def _peft_type_problem(peft_type: object) -> str | None:
    """What is wrong with a `peft_type` (a str, or PEFT's enum); `None` if it is LORA or absent."""
    name = str(peft_type).rpartition(".")[2]
    return None if peft_type is None or name.upper() == "LORA" else f"peft_type is {name!r}, only 'LORA' is supported"


def _targets(key: str, value: Any) -> list[str] | str | None:
    """A str as it is, a collection of str as a list (sorted if it has no order). TypeError otherwise."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{key} must be a str or a list of str, got {value!r} ({type(value).__name__})")
    return sorted(value) if isinstance(value, set | frozenset) else list(value)


def _compile_rules(patterns: Any, name: str, check: Callable[[str, object], object]) -> list[tuple[re.Pattern, Any]]:
    """Compile `{KEY: value}` to `^(.*\\.)?KEY$` in file order; a `^` inside KEY can match only at the name's start."""
    if patterns is None:
        return []
    if not isinstance(patterns, Mapping):
        raise TypeError(f"{name} must be a dict of name pattern to value, got {patterns!r} ({type(patterns).__name__})")
    rules = []
    for key, value in patterns.items():
        check(f"{name}[{key!r}]", value)
        try:
            rules.append((re.compile(rf"(?:.*\.)?(?:{key})"), value))
        except re.error as error:
            raise ValueError(f"{name} key {key!r} is not a regular expression: {error}") from error
    return rules


def read_config(request: LoRARequest, lora_config: LoRAConfig) -> PEFTHelper:
    """The config in a request's folder, if the adapter can be served; no tensor is read.

    Raises:
        FileNotFoundError, ValueError, TypeError: as :meth:`PEFTHelper.from_local_dir` and
            :meth:`PEFTHelper.validate_legal`, with the adapter's name and path in front.
    """
    with loading(request):
        config = PEFTHelper.from_local_dir(request.absolute_path)
        config.validate_legal(lora_config)
    return config


# <module>.lora_A[.<adapter>].weight, or <module>.lora_embedding_A[.<adapter>]
_TENSOR_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.[^.]+)?(?(embedding)|\.weight)"
)


def map_tensor_name(name: str, weights_mapper: NameMapper | None) -> str:
    """A checkpoint tensor's name without `base_model.model.`, renamed by `weights_mapper`.

    The mapper is a function, or a dict `{old: new}` whose keys are replaced in order wherever they occur in the name
    (so a key can be a prefix, a part or a suffix). Raises TypeError for anything else.
    """
    name = name.removeprefix(PEFT_PREFIX)
    if weights_mapper is None:
        return name
    if isinstance(weights_mapper, Mapping):
        for old, new in weights_mapper.items():
            name = name.replace(old, new)
        return name
    if not callable(weights_mapper):
        raise TypeError(f"weights_mapper must be a function or a dict, got {type(weights_mapper).__name__}")
    return weights_mapper(name)


class TensorName(NamedTuple):
    """Which matrix a checkpoint's tensor is: A or B of a module, and how the adapter's own config calls that module.

    `configured` is the name before the `weights_mapper`, by which `rank_pattern` and `alpha_pattern` know the module;
    the mapped one where only that can be parsed.
    """

    module: str
    is_a: bool
    configured: str


def parse_fine_tuned_lora_name(name: str, weights_mapper: NameMapper | None = None) -> tuple[str, bool]:
    """Split a checkpoint tensor's name into `(module_name, is_lora_a)`.

    `base_model.model.<m>.lora_A.weight`, `<m>.lora_A.<adapter>.weight`, and the same without the prefix give
    `(<m>, True)`; B gives `False`; embeddings are spelled `<m>.lora_embedding_A`.

    Raises:
        ValueError: a DoRA magnitude, or any other name ("unsupported LoRA weight").
    """
    return _parse(name, weights_mapper)[:2]


def _parse(key: str, weights_mapper: NameMapper | None) -> TensorName:
    mapped = map_tensor_name(key, weights_mapper)
    if "lora_magnitude_vector" in mapped:
        raise ValueError(
            f"{key!r} is a DoRA magnitude; DoRA adapters are not supported, merge the adapter or train plain LoRA"
        )
    match = _TENSOR_NAME.fullmatch(mapped)
    if match is None:
        raise ValueError(
            f"unsupported LoRA weight {key!r}; expected <module>.lora_A.weight, .lora_B.weight or .lora_embedding_A/B"
        )
    own = _TENSOR_NAME.fullmatch(map_tensor_name(key, None)) or match
    return TensorName(match["module"], match["side"] == "A", own["module"])


def lora_names(
    keys: Iterable[str], weights_mapper: NameMapper | None, skip_prefixes: Sequence[str] | None
) -> dict[str, TensorName]:
    """What the LoRA tensors among `keys` are; base weights that PEFT may save along are left out, and modules whose
    name, or its part after some dot, starts with one of `skip_prefixes`.

    Raises:
        ValueError: a key is not a LoRA name, or two keys name the same matrix.
    """
    names: dict[str, TensorName] = {}
    owner: dict[tuple[str, bool], str] = {}
    for key in keys:
        mapped = map_tensor_name(key, weights_mapper)
        skipped = any(f".{prefix}" in f".{mapped}" for prefix in skip_prefixes or ())
        if skipped or key.endswith(("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")):
            continue
        names[key] = name = _parse(key, weights_mapper)
        first = owner.setdefault(name[:2], key)
        if first != key:
            side = "A" if name.is_a else "B"
            raise ValueError(f"tensors {first!r} and {key!r} are both {side} of module {name.module!r}")
    return names


_STACKED_NAME = re.compile(r"(?:.*\.)?experts(?:\.base_layer)*")


def is_stacked_name(module: str) -> bool:
    """Whether a module is all experts of a layer at once: `...experts`, `...experts.base_layer`."""
    return _STACKED_NAME.fullmatch(module) is not None


def read_tensors(
    folder: str | Path,
    expected_lora_modules: Collection[str],
    weights_mapper: NameMapper | None,
    skip_prefixes: Sequence[str] | None,
    moe_ep_spec: MoEEPSpec | None = None,
) -> dict[str, torch.Tensor]:
    """The LoRA tensors of a PEFT folder, and the scales of those in FP8, after all their names have been checked; those
    of remote experts are left out.

    They are mapped from the file: whoever keeps them copies them, else someone who overwrites the file changes them.

    Raises:
        ValueError: only pickled weights (.bin, .pt), which are never read; the file is no safetensors file, a name is
            not a LoRA name, or a module is not in `expected_lora_modules`.
        FileNotFoundError: no folder, or no weights in it.
    """
    directory = resolve_adapter_path(folder)
    file = directory / WEIGHTS_FILE
    if not file.is_file():
        for pickled in ("adapter_model.bin", "adapter_model.pt"):
            if (directory / pickled).is_file():
                raise ValueError(
                    f"{str(directory / pickled)!r} is a pickle and is not read; convert the adapter to {WEIGHTS_FILE} "
                    "(load it with the peft library and save it with safe_serialization=True)"
                )
        raise FileNotFoundError(f"adapter folder {str(directory)!r} holds no {WEIGHTS_FILE}")
    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            keys = set(handle.keys())
            own = [key for key in handle.keys() if not is_scale_of_another(key, keys)]  # noqa: SIM118 (no dict)
            names = lora_names(own, weights_mapper, skip_prefixes)
            check_any(names)
            check_expected_modules((name.module for name in names.values()), expected_lora_modules)
            wanted = [key for key, name in names.items() if not (moe_ep_spec and moe_ep_spec.is_remote(name.module))]
            scales = [key + SCALE_SUFFIX for key in wanted if key + SCALE_SUFFIX in keys]
            return {key: handle.get_tensor(key) for key in (*wanted, *scales)}
    except SafetensorError as error:
        raise ValueError(f"{str(file)!r} is not a valid safetensors file: {error}") from error
