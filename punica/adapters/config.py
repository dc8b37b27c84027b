"""`PEFTHelper`: rank, scaling and targets of every module, from `adapter_config.json`.

The file is untrusted input: its size is limited, and its regular expressions are matched in bounded time.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from punica.adapters.activation import check_invocation
from punica.adapters.names import TIED, is_stacked_name, starts_of_parts
from punica.adapters.patterns import ModuleNames, NamePattern, UnboundedPattern
from punica.checks import check_bool, check_count, check_number, clip
from punica.config import LoRAConfig

CONFIG_FILE = "adapter_config.json"
MOST_CONFIG_BYTES = 4 << 20
MOST_PATTERNS = 4096  # keys of rank_pattern, and of alpha_pattern
# Parameters of all experts of a layer in the order in which their module has them: PEFT wraps the first innermost.
_EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
# Features that change a layer's result beyond `+ scaling * B A`; any truthy value is refused.
_UNSUPPORTED = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "fan_in_fan_out", "layer_replication",
    "use_qalora", "use_bdlora", "kasa_config", "arrow_config", "monteclora_config",
)  # fmt: skip
_WHOLE_MODULES = (
    ": whole modules were trained; put them into a base model of their own (PEFT's merge_and_unload and "
    "save_pretrained), or train these modules with LoRA as well"
)
# These initialisations subtract something from the base weights, and training went on from there.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")
_OTHER_INITS = ("gaussian", "eva", "orthogonal", "mica", "true", "false")
_OF_TRAINING = frozenset({  # settings that no result of a layer depends on
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config",
    "megatron_config", "quantization_config", "use_cache", "use_gradient_checkpointing", "use_unsloth",
})  # fmt: skip


def resolve_adapter_path(path: str | Path) -> Path:
    """Absolute path of an adapter folder, `~` expanded, no network. FileNotFoundError: no such folder."""
    try:
        resolved = Path(path).expanduser().resolve()
        is_folder = resolved.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long, links in a circle, no home folder, a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileNotFoundError(f"adapter folder {clip(str(path))} cannot be looked up: {reason}") from error
    if not is_folder:
        raise FileNotFoundError(f"adapter folder {clip(str(resolved))} (from {clip(str(path))}) is no folder")
    return resolved


def read_config_text(path: str | Path) -> bytes:
    """Read a PEFT folder's `adapter_config.json`. FileNotFoundError; ValueError: it is too large."""
    file = resolve_adapter_path(path) / CONFIG_FILE
    if not file.is_file():
        is_below = any(file.parent.glob(f"*/{CONFIG_FILE}"))  # PEFT saves adapters that have names in folders of these
        instead = "; a folder inside has one, pass that" if is_below else ""
        raise FileNotFoundError(f"{str(file)!r} does not exist; a PEFT adapter folder needs {CONFIG_FILE}{instead}")
    with file.open("rb") as opened:
        text = opened.read(MOST_CONFIG_BYTES + 1)
    if len(text) > MOST_CONFIG_BYTES:
        raise ValueError(f"{str(file)!r} is larger than {MOST_CONFIG_BYTES} bytes, which no adapter's config is")
    return text


class _Rule(NamedTuple):
    """Entry of `rank_pattern` or `alpha_pattern`: its key, as an expression, and the value of matching modules."""

    key: str
    pattern: NamePattern
    value: Any


@dataclass(frozen=True)
class PEFTHelper:
    """The content of `adapter_config.json` as far as inference needs it.

    For module m (adapter naming, without `base_model.model.`) `r_m` and `alpha_m` come from `rank_pattern` and
    `alpha_pattern`: the value of the first key, in file order, that matches m or a suffix of m after a dot; else they
    are the global ones. For a module that `target_parameters` adapts, the parameter's name must match, `<m>.weight` or
    `...experts.gate_up_proj`. Then

        delta W_m = scaling_m * B_m A_m,   scaling_m = alpha_m / r_m   (alpha_m / sqrt(r_m) with `use_rslora`)

    These are PEFT's own rules in training, which sorts the patterns' keys when it saves. `target_modules` is
    informational: the tensors decide which modules are adapted. Unknown keys are ignored, with a warning of features
    that are on.

    TypeError: a value of another type. ValueError: rank < 1, alpha not finite, no target, too many patterns, or a key
    that is no regular expression or cannot be matched in bounded time.
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
    alora_invocation_tokens: tuple[int, ...] | None = None
    ensure_weight_tying: bool = False
    unsupported: dict[str, Any] = field(default_factory=dict)  # features that are on
    exclude_modules: Any = field(default=None, compare=False)
    layers_to_transform: Any = field(default=None, compare=False)
    _unknown: list[str] = field(init=False, repr=False, compare=False, default_factory=list)  # features that are on
    _parameters: frozenset[str] = field(init=False, repr=False, compare=False)
    _rules: dict[str, list[_Rule]] = field(init=False, repr=False, compare=False)
    # rules of rank and alpha by name in patterns, as far as resolved; None: the global value
    _matched: dict[str, list[_Rule | None]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "r", check_count("r", self.r))
        object.__setattr__(self, "lora_alpha", check_number("lora_alpha", self.lora_alpha))
        check_bool("use_rslora", self.use_rslora)
        for key in ("target_modules", "target_parameters"):
            object.__setattr__(self, key, _targets(key, getattr(self, key)))
        if not self.target_modules and not self.target_parameters:
            raise ValueError("target_modules or target_parameters is required, got neither")
        object.__setattr__(self, "alora_invocation_tokens", check_invocation(self.alora_invocation_tokens))
        if self.alora_invocation_tokens and (self.target_parameters or self.init_lora_weights == "mica"):
            both = "target_parameters" if self.target_parameters else "init_lora_weights='mica'"
            raise ValueError(f"alora_invocation_tokens and {both} do not go together, as in PEFT")
        object.__setattr__(self, "_parameters", frozenset(self.target_parameters or ()))
        ranks = _compile_rules(self.rank_pattern, "rank_pattern", check_count)
        alphas = _compile_rules(self.alpha_pattern, "alpha_pattern", check_number)
        object.__setattr__(self, "_rules", {"rank_pattern": ranks, "alpha_pattern": alphas})

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> PEFTHelper:
        """Build from the parsed JSON, or from `LoraConfig.to_dict()`; unknown keys are no error, `null` is not given.
        TypeError: `config` is not a mapping. ValueError: required keys are missing, all of which are named.
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"adapter config must be a JSON object, got {type(config).__name__}")
        missing = [key for key in ("r", "lora_alpha") if config.get(key) is None]
        if not config.get("target_modules") and not config.get("target_parameters"):
            missing.append("target_modules (or target_parameters)")
        if missing:
            lacks = f"adapter config lacks the required keys {missing}; it has {clip(sorted(map(str, config)))}"
            raise ValueError("; ".join([*_peft_type_problems(config.get("peft_type")), lacks]))
        known = {f.name for f in fields(cls) if f.init} - {"unsupported"}
        given = {key: value for key, value in config.items() if key in known and value is not None}
        made = cls(**given, unsupported={key: config[key] for key in _UNSUPPORTED if config.get(key)})
        if made.alora_invocation_tokens and config.get("velora_config"):
            raise ValueError("alora_invocation_tokens and velora_config do not go together, as in PEFT")
        unknown = config.keys() - known - _OF_TRAINING - set(_UNSUPPORTED)
        others = sorted(key for key in map(str, unknown) if config.get(key))
        made._unknown.extend(key for key in others if key.startswith("use_") or key.endswith("_config"))
        return made

    @classmethod
    def from_local_dir(cls, path: str | Path) -> PEFTHelper:
        """Read `adapter_config.json` of a PEFT folder. FileNotFoundError; ValueError, TypeError: invalid content."""
        return cls.from_text(read_config_text(path), resolve_adapter_path(path) / CONFIG_FILE)

    @classmethod
    def from_text(cls, text: bytes, file: Path) -> PEFTHelper:
        """Build from the content of the JSON `file`, which errors name."""
        try:
            config = json.loads(text.decode("utf-8"))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
            raise ValueError(f"{str(file)!r} is not valid JSON: {error}") from error
        except RecursionError:
            raise ValueError(f"{str(file)!r} is nested too deeply to be an adapter's config") from None
        try:
            return cls.from_dict(config)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{str(file)!r}: {error}") from error

    def resolve(self, modules: Iterable[str]) -> None:
        """Find ranks and alphas of these modules, all at once; ValueError: matching takes too long."""
        names = [name for name in dict.fromkeys(map(self._name_in_patterns, modules)) if name not in self._matched]
        if not names or not any(self._rules.values()):
            return
        together = ModuleNames(names)
        found: dict[str, list[_Rule | None]] = {name: [None, None] for name in names}
        for which, (pattern_name, rules) in enumerate(self._rules.items()):
            for rule in rules:
                try:
                    matches = together.matching(rule.pattern)
                except ValueError as error:
                    raise UnboundedPattern(f"{pattern_name} key {clip(rule.key)}: {error}") from error
                for name, is_match in zip(names, matches, strict=True):
                    if is_match and found[name][which] is None:
                        found[name][which] = rule
        self._matched.update(found)

    def _rules_of(self, module_name: str) -> list[_Rule | None]:
        self.resolve([module_name])
        return self._matched.get(self._name_in_patterns(module_name), [None, None])

    def _name_in_patterns(self, module_name: str) -> str:
        """Return the name that PEFT matches: the parameter's for `target_parameters`, else the module's."""
        owner, depth = module_name.replace(".base_layer", ""), module_name.count(".base_layer")
        candidates = _EXPERT_PARAMETERS if is_stacked_name(module_name) else ("weight",)
        names = [
            name for name in (f"{owner}.{parameter}" for parameter in candidates)
            if any(name[start:] in self._parameters for start in starts_of_parts(name))
        ]  # fmt: skip
        return names[-1 - depth] if depth < len(names) else module_name

    def rank_of(self, module_name: str) -> int:
        rule, _ = self._rules_of(module_name)
        return self.r if rule is None else rule.value

    def source_of_rank(self, module_name: str) -> str:
        """Name the field that gives a module its rank, for an error."""
        rule, _ = self._rules_of(module_name)
        remedy = "its first key that matches; PEFT sorts the keys when it saves: no two should match one module"
        return " (r)" if rule is None else f" (rank_pattern[{clip(rule.key)}], {remedy})"

    def alpha_of(self, module_name: str) -> float:
        _, rule = self._rules_of(module_name)
        return self.lora_alpha if rule is None else rule.value

    def scaling_of(self, module_name: str) -> float:
        """Return `alpha_m / r_m`, or `alpha_m / sqrt(r_m)` with `use_rslora` (rank-stabilised LoRA)."""
        rank = self.rank_of(module_name)
        return self.alpha_of(module_name) / (math.sqrt(rank) if self.use_rslora else rank)

    def validate_legal(self, lora_config: LoRAConfig, modules: Iterable[str] | None = None) -> None:
        """Refuse as :meth:`refuse_illegal`, and warn of :attr:`doubts`."""
        self.refuse_illegal(lora_config, modules)
        for doubt in self.doubts:
            warnings.warn(doubt, stacklevel=2)

    def refuse_illegal(
        self, lora_config: LoRAConfig, modules: Iterable[str] | None = None, *, tensors_decide: bool = False
    ) -> None:
        """Refuse unsupported features and ranks above `max_lora_rank`: a ValueError with all problems.

        `modules`: check the ranks of these alone; `None`: all in the config. `tensors_decide`: accept what has an
        effect only with certain tensors: `bias`, and `fan_in_fan_out`, which PEFT drops for linear layers; and
        activated LoRA, which the manager accepts where the caller computes rows before the activation by the base.
        """
        problems = _peft_type_problems(self.peft_type)
        if self.bias != "none" and not (tensors_decide and self.bias in ("all", "lora_only")):
            problems.append(f"bias is {clip(self.bias)}, only 'none' is supported")
        if self.alora_invocation_tokens and not tensors_decide:
            problems.append(f"alora_invocation_tokens is set ({clip(list(self.alora_invocation_tokens))})")
        for feature, value in self.unsupported.items():
            if not (tensors_decide and feature == "fan_in_fan_out"):
                remedy = _WHOLE_MODULES if feature == "modules_to_save" else ""
                problems.append(f"{feature} is set ({clip(value)}) and not supported{remedy}")
        rules: list[_Rule | None] = [None, *self._rules["rank_pattern"]]
        if modules is not None and len(rules) > 1:
            modules = list(modules)
            self.resolve(modules)
            rules = [self._rules_of(name)[0] for name in modules]
        limit = lora_config.max_lora_rank
        for rule in dict.fromkeys(rules):
            where, rank = ("r", self.r) if rule is None else (f"rank_pattern[{clip(rule.key)}]", rule.value)
            if rank > limit:
                remedy = "raise LoRAConfig.max_lora_rank"
                problems.append(f"{where}: rank {clip(rank)} exceeds max_lora_rank {limit} ({remedy})")
        if problems:
            raise ValueError("this adapter cannot be served: " + "; ".join(problems))

    @property
    def doubts(self) -> list[str]:
        """Texts on what may make outputs wrong: a base model that training changed, or unknown features."""
        init, found = self.init_lora_weights, []
        if str(init).lower() not in _OTHER_INITS:
            is_known = isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS)
            found.append(
                f"init_lora_weights={clip(init)} {'' if is_known else 'is not known here and '}may have altered the "
                "base model during training; unless the adapter was converted to plain LoRA when it was saved, outputs "
                "on the original base model will be wrong"
            )
        if self._unknown:
            found.append(
                f"{clip(self._unknown)} of its config are not known here; if they change what a layer computes, "
                "outputs will be wrong"
            )
        return found

    def disagreement(self, modules: Iterable[str]) -> str | None:
        """Describe names in `target_modules` without a tensor in the adapted `modules`, and modules that it leaves out;
        `None` if there are none, or if other settings could explain them.
        """
        targets = self.target_modules
        if not isinstance(targets, list) or self.target_parameters or self.exclude_modules:
            return None
        wanted = set(targets)
        found = {name: wanted.intersection(name[start:] for start in starts_of_parts(name)) for name in modules}
        unused = sorted(wanted.difference(*found.values()))
        if self.layers_to_transform not in (None, []):  # leaves out other layers and embeddings, but no full name
            left_out = re.compile(r"\b\d+\.|embed_tokens").search
            unused = [name for name in unused if name.startswith("model.") or not left_out(name)]
        others = sorted(name for name, matched in found.items() if not (matched or name.endswith(TIED)))
        told = [f"there are no tensors for {clip(unused)}"] if unused else []
        told += [f"there are tensors for {clip(others)}, which are served and which PEFT ignores"] if others else []
        return f"target_modules are {clip(targets)}, but {', and '.join(told)}" if told else None


def _peft_type_problems(peft_type: object) -> list[str]:
    """Describe a `peft_type` (a str, or PEFT's enum) that is neither LORA nor absent."""
    name = "LORA" if peft_type is None else str(peft_type).rpartition(".")[2]
    if name.upper() == "XLORA":
        return ["peft_type is 'XLORA', whose router is not served; request its adapters as a mixture, by weights"]
    return [] if name.upper() == "LORA" else [f"peft_type is {clip(name)}, only 'LORA' is supported"]


def _targets(key: str, value: Any) -> list[str] | str | None:
    """Return a str as it is, a collection of str as a list (a set is sorted). TypeError otherwise."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{key} must be a str or a list of str, got {clip(value)} ({type(value).__name__})")
    return sorted(value) if isinstance(value, set | frozenset) else list(value)


def _compile_rules(patterns: Any, name: str, check: Callable[[str, object], float]) -> list[_Rule]:
    """Compile the rules of `{KEY: value}` in file order; a `^` in KEY matches only at the module name's start."""
    if patterns is None:
        return []
    if not isinstance(patterns, Mapping):
        raise TypeError(f"{name} must be a dict of name pattern to value, got {clip(patterns)}")
    if len(patterns) > MOST_PATTERNS:
        remedy = "set the most frequent value globally, and name modules together by an expression"
        raise ValueError(f"{name} has {len(patterns)} keys, at most {MOST_PATTERNS} are read; {remedy}")
    rules = []
    for key, value in patterns.items():
        if not isinstance(key, str):
            raise TypeError(f"keys of {name} must be str, got {clip(key)} ({type(key).__name__})")
        number = check(f"{name}[{clip(key)}]", value)
        try:
            rules.append(_Rule(key, NamePattern(key), number))
        except ValueError as error:
            raise ValueError(f"{name} key {error}") from error
    return rules
