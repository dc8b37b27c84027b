"""Keys of a configuration that no dataclass of its schema has: Hydra adds them where a key is written with `+`."""

from dataclasses import fields, is_dataclass
from difflib import get_close_matches

from omegaconf import DictConfig, OmegaConf

from experiments.harness.schema import ConfigError

HYDRA = "hydra"


def refuse_unknown(cfg: DictConfig, above: str = "") -> None:
    """Raise `ConfigError` for the first key of ``cfg`` that its schema does not have, with the nearest one it has."""
    schema = OmegaConf.get_type(cfg)
    known = [field.name for field in fields(schema)] if is_dataclass(schema) else None
    for key in map(str, cfg):
        if known is not None and key not in (*known, HYDRA):
            near = get_close_matches(key, known, n=1)
            listed = f"did you mean {above}{near[0]}=?" if near else f"it has {', '.join(known)}"
            what = above[:-1] or "the configuration"
            raise ConfigError(f"+{above}{key}= would be read by nothing: {what} has no such key; {listed}")
        if isinstance(part := cfg._get_node(key), DictConfig) and not (part._is_none() or part._is_missing()):
            refuse_unknown(part, f"{above}{key}.")
