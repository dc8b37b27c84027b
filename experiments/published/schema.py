"""Lines of a file of requests and of a file of answers, as JSON Schema; reading with one clear error per file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from experiments.harness.schema import ConfigError

_COUNT = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "number", "minimum": 0}
REQUEST: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A request: one line of <popularity>.jsonl, in order of arrival",
    "type": "object",
    "properties": {
        "id": {**_COUNT, "description": "place in the stream, from 0"},
        "arrival_s": {**_SECONDS, "description": "seconds from the start of the run; 0: it waits from the start"},
        "adapter": {"type": "string", "description": "LoRA adapter that the request names"},
        "prompt": {"type": "array", "items": _COUNT, "minItems": 1, "description": "token ids below the vocabulary"},
        "new_tokens": {"type": "integer", "minimum": 1, "description": "to generate, with no stop token"},
    },
    "required": ["id", "arrival_s", "adapter", "prompt", "new_tokens"],
    "additionalProperties": False,
}
ANSWER: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "An answer: one line per request, in any order",
    "type": "object",
    "properties": {
        "id": {**_COUNT, "description": "of its request"},
        "token_s": {
            "type": "array", "items": _SECONDS,
            "description": "seconds from the start of the run at which each token came out, ascending",
        },
        "error": {"type": "string", "description": "why the request has no or too few tokens; absent after success"},
    },
    "required": ["id", "token_s"],
    "additionalProperties": False,
}  # fmt: skip


def read_lines(path: Path, schema: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Read a file of JSON lines, by ``id``. ConfigError names the file, its first wrong line, and why."""
    lines: dict[int, dict[str, Any]] = {}
    validator = Draft202012Validator(schema)
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a file of JSON lines") from None
    for number, text in enumerate(texts, start=1):
        where = f"{path}, line {number}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where} is no JSON ({error}): write one object per line") from None
        if wrong := next(iter(sorted(validator.iter_errors(line), key=str)), None):
            place = "/".join(map(str, wrong.absolute_path)) or "the line"
            raise ConfigError(f"{where}, {place}: {wrong.message}; the schema is {schema['title']!r}")
        if line["id"] in lines:
            raise ConfigError(f"{where}: id {line['id']} is there twice, give each once")
        lines[line["id"]] = line
    if not lines:
        raise ConfigError(f"{path} is empty: give a file of JSON lines")
    return lines
