"""Named attacks and accidents: what a tenant may put into a folder or a request. Each one changes a valid folder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PATTERNS = {
    "nested plus": "([a-z0-9_.]+)+!",
    "lookahead": "(?=(.+)+!).*",
    "negative lookahead": "(?!(.+)+!)(.+)+!",
    "counted": "(.{1,40}){1,40}!",
    "back-reference": r"(.*)\1*!",
    "condition": "(a)?(?(1)b|c)*!",
    "possessive": "(.*+)*!",
    "atomic": "(?>.*)*!",
    "huge count": "a{99999999999}",
    "count of many digits": "a{" + "9" * 4500 + "}",
    "many nested groups": "(" * 2000 + "a" + ")" * 2000,
    "megabyte": "a" * (1 << 20),
    "open group": "(q_proj",
    "bad escape": "\\",
    "flags in the middle": "a(?i)b",
    "surrogate": "\ud800",
    "zero byte": "\0",
    "empty": "",
    "everything": ".*",
    "lookbehind": r"(?<=self_attn\.)q_proj",
    "no module": "no_such_module",
}
_ENDLESS = {pattern for name, pattern in PATTERNS.items() if pattern.endswith("!") or name in ("lookahead", "megabyte")}
ENDLESS = _ENDLESS | {pattern[:500] for pattern in _ENDLESS}
VALUES: dict[str, Any] = {
    "null": None, "true": True, "false": False, "zero": 0, "minus one": -1, "huge": 10**30, "fraction": 2.5,
    "text": "many", "empty text": "", "list": [1], "empty list": [], "nested list": [[[[1]]]],
    "object": {"a": {"b": 1}},
    "empty object": {}, "long text": "x" * 300_000, "many": list(range(20_000)), "NaN": float("nan"),
    "infinity": float("inf"),
}  # fmt: skip
KEYS = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "peft_type",
        "init_lora_weights", "modules_to_save", "use_dora", "target_parameters", "fan_in_fan_out", "lora_bias",
        "layer_replication")  # fmt: skip
TEXTS = {
    "empty": b"",
    "a list": b"[]",
    "cut": b'{"r": 4, "lora_al',
    "deep lists": b'{"r": ' + b"[" * 100_000,
    "deep and closed": b'{"x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "latin-1": '{"r": 4, "lora_alpha": 8, "target_modules": ["größe"]}'.encode("latin-1"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "zero bytes": b"\0" * 1000,
    "ten megabytes": b'{"x": "' + b"a" * (10 << 20) + b'"}',
    "integer of many digits": b'{"r": ' + b"9" * 10_000 + b', "lora_alpha": 1, "target_modules": ["q_proj"]}',
    "no rank": b'{"lora_alpha": 8, "target_modules": ["q_proj"]}',
    "no targets": b'{"r": 4, "lora_alpha": 8}',
    "only unknown keys": json.dumps({f"key {i}": i for i in range(5000)}).encode(),
    "html": b"<!DOCTYPE html><html>404</html>",
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
}


def _header(entries: dict[str, Any], data: int = 64) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * data


def _tensor(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FILES = {
    "empty": b"",
    "header longer than the file": (1 << 20).to_bytes(8, "little") + b"{}",
    "header of all memory": (2**63).to_bytes(8, "little") + b"{}",
    "header is no JSON": (20).to_bytes(8, "little") + b"x" * 20,
    "header without tensors": (2).to_bytes(8, "little") + b"{}",
    "deep header": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "pickle": b"\x80\x04\x95" + b"\0" * 200,
    "LFS pointer": TEXTS["LFS pointer"],
    "offsets beyond the file": _header({NAME: _tensor([4, 64], 0, 1 << 40)}),
    "offsets backwards": _header({NAME: _tensor([4, 4], 64, 0)}),
    "offsets overlap": _header({NAME: _tensor([4, 4], 0, 64), NAME + "x": _tensor([4, 4], 32, 96)}, 96),
    "negative shape": _header({NAME: {"dtype": "F32", "shape": [-4, 4], "data_offsets": [0, 64]}}),
    "shape and bytes disagree": _header({NAME: _tensor([4, 5], 0, 64)}),
    "unknown dtype": _header({NAME: _tensor([4, 4], 0, 64, "F31")}),
    "zero dimensions": _header({NAME: _tensor([], 0, 4)}, 4),
    "hundred dimensions": _header({NAME: _tensor([1] * 100, 0, 4)}, 4),
    "same name twice": (lambda t: len(t).to_bytes(8, "little") + t + b"\0" * 64)(
        json.dumps({NAME: _tensor([4, 4], 0, 64)})[:-1].encode() + b", " + json.dumps({NAME: 1})[1:].encode()
    ),
    "many tensors": _header({f"t{i}.lora_A.weight": _tensor([0], 0, 0) for i in range(20_000)}, 0),
    "a name of a megabyte": _header({"x" * (1 << 20): _tensor([4, 4], 0, 64)}),
    "huge metadata": _header({"__metadata__": {"x": "y" * (3 << 20)}, NAME: _tensor([4, 4], 0, 64)}),
}

Tensors = dict[str, torch.Tensor]


def _on_first(change: Callable[[torch.Tensor], torch.Tensor], part: str = "lora_A") -> Callable[[Tensors], Tensors]:
    def apply(tensors: Tensors) -> Tensors:
        name = min(name for name in tensors if part in name)
        return {**tensors, name: change(tensors[name]).contiguous()}

    return apply


def _renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def _with(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.ones(shape)}


def _with_value(value: float, part: str) -> Callable[[Tensors], Tensors]:
    return _on_first(lambda t: t.index_fill(0, torch.tensor([0]), value), part)


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS: dict[str, Callable[[Tensors], Tensors]] = {
    **{f"{value} in {part}": _with_value(value, part) for value in (float("nan"), float("inf"), float("-inf"), 3e38)
       for part in ("lora_A", "lora_B")},
    **{f"{dtype} {part}": _on_first(lambda t, dtype=dtype: (t * 3).to(dtype), part)
       for dtype in (torch.int32, torch.bool, torch.uint8, torch.int64, torch.float64, torch.float16, torch.bfloat16,
                     torch.float8_e4m3fn, torch.float8_e5m2) for part in ("lora_A", "lora_B")},
    **{f"{what} {part}": _on_first(change, part) for part in ("lora_A", "lora_B") for what, change in {
        "transposed": lambda t: t.T, "flat": torch.flatten, "3-D": lambda t: t[None], "no rows": lambda t: t[:0],
        "no columns": lambda t: t[:, :0], "a row less": lambda t: t[:-1],
        "columns twice": lambda t: torch.cat([t, t], 1),
        "scalar": lambda t: t.sum(),
    }.items()},
    "no B": lambda tensors: {name: t for name, t in tensors.items() if "lora_B" not in name},
    "no A": lambda tensors: {name: t for name, t in tensors.items() if "lora_A" not in name},
    "one B missing": lambda tensors: {
        n: t for n, t in tensors.items() if n != max(k for k in tensors if "lora_B" in k)},
    "A and B exchanged": lambda tensors: {
        n.replace("lora_A", "?").replace("lora_B", "lora_A").replace("?", "lora_B"): t for n, t in tensors.items()},
    "other layer": _renamed("layers.0", "layers.99"),
    "negative layer": _renamed("layers.0", "layers.-1"),
    "unknown module": _renamed("q_proj", "router"),
    "packed module": _renamed("q_proj", "qkv_proj"),
    "no module": _with("lora_A.weight", 4, 64),
    "dots only": _with("....lora_A.weight", 4, 64),
    "base weight": _with("base_model.model.model.layers.0.self_attn.q_proj.weight", 64, 64),
    "whole embedding": _with("base_model.model.model.embed_tokens.weight", 256, 64),
    "whole head": _with("base_model.model.lm_head.weight", 256, 64),
    "DoRA magnitude": _with(f"{PREFIX}.lora_magnitude_vector", 64),
    "bias": _with(f"{PREFIX}.lora_B.bias", 64),
    "scale of nothing": _with(f"{PREFIX}.lora_A.weight_scale", 1),
    "named adapter beside": _with(f"{PREFIX}.lora_A.other.weight", 4, 64),
    "attribute name": _with("base_model.model.__class__.lora_A.weight", 4, 64),
    "path name": _with("../../../etc/passwd.lora_A.weight", 4, 64),
    "newline": _with("model\n.lora_A.weight", 4, 64),
    "no tensors": lambda tensors: {},
    "double prefix": _renamed("base_model.model.", "base_model.model.base_model.model."),
}  # fmt: skip


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))


def edit_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def _in_place_of(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        if name:
            (folder / name).unlink()
        else:
            shutil.rmtree(folder)
        make(folder / name)

    return apply


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "gone": shutil.rmtree, "is a file": _in_place_of("", lambda path: path.write_text("a file")),
    "links to itself": _in_place_of("", lambda path: path.symlink_to(path)),
    "only a pickle": lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin") and None,
    **{f"{name} {what}": _in_place_of(name, make) for name in (CONFIG, WEIGHTS) for what, make in {
        "missing": lambda path: None, "is a folder": Path.mkdir, "is a pipe": os.mkfifo,
        "is a device": lambda path: path.symlink_to("/dev/zero"), "dangles": lambda path: path.symlink_to("nowhere"),
        "links to itself": lambda path: path.symlink_to(path),
    }.items()},
}  # fmt: skip
PATHS = {
    "very long": "/" + "/".join(["a" * 200] * 100),
    "zero byte": "/tmp\0/adapter",
    "no home": "~no_such_user/adapter",
    "root": "/",
    "surrogate": "/\udcff",
    "a URL": "https://huggingface.co/a/b",
}


def all_cases() -> dict[str, Callable[[Path], Any]]:
    """`{name: change of a valid folder}`; a change may return another path to ask for."""
    cases: dict[str, Callable[[Path], Any]] = {}

    def configured(name: str, **changes: Any) -> None:
        cases[name] = lambda folder: edit_config(folder, **changes)

    for key in KEYS:
        for name, value in VALUES.items():
            configured(f"{key}: {name}", **{key: value})
    for name, pattern in PATTERNS.items():
        configured(f"rank_pattern key: {name}", rank_pattern={pattern: 4})
        configured(f"alpha_pattern key: {name}", alpha_pattern={pattern: 4})
        configured(f"target expression: {name}", target_modules=pattern)
    for count in (4096, 5000, 50_000):
        configured(f"rank_pattern of {count} keys", rank_pattern={f"layers.{i}.q_proj": 4 for i in range(count)})
    for name, value in VALUES.items():
        configured(f"rank_pattern value: {name}", rank_pattern={"q_proj": value})
        configured(f"alpha_pattern value: {name}", alpha_pattern={"q_proj": value})
    for kind, file, contents in (("config", CONFIG, TEXTS), ("file", WEIGHTS, FILES)):
        for name, content in contents.items():
            cases[f"{kind}: {name}"] = lambda f, file=file, content=content: (f / file).write_bytes(content) and None
    for name, change in TENSORS.items():
        cases[f"tensors: {name}"] = lambda folder, change=change: edit_tensors(folder, change)
    cases |= {f"folder: {name}": change for name, change in FOLDERS.items()}
    return cases | {f"path: {name}": lambda folder, path=path: path for name, path in PATHS.items()}
