"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

import re
from collections.abc import Mapping, Sequence
from json import JSONDecodeError
from typing import Any

from punica.checks import clip

RETRY_AFTER = {"Retry-After": "1"}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_MOST_REASONS = 3  # of one invalid body that are named in the message
_SHOWN = 20  # characters of an invalid body
_KINDS = {
    type(None): "empty or null", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number",
}  # fmt: skip
_FORM = re.compile(r"str|list\[.*\]")  # pydantic's name of one of the forms that a value may have


class ApiError(Exception):
    """Refusal or failure of one HTTP request, with its status, the parameter at fault and OpenAI's code."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        param = None if self.param is None else _encodable(self.param)
        return {"error": {"message": _encodable(self.message), "type": kind, "param": param, "code": self.code}}


def refused(message: str, names: Mapping[str, str]) -> ApiError:
    """Return the 400 for an argument error of the engine; ``param`` is the first of ``names``, from the engine's to the
    API's, that its ``message`` contains.
    """
    first = min(filter(message.__contains__, names), key=lambda name: (message.find(name), -len(name)), default=None)
    if first is None:
        return ApiError(400, message)
    for inner, name in names.items():
        if inner != name:
            message = message.replace(inner, name)
    return ApiError(400, message, names[first])


def unreadable_body(error: BaseException) -> ApiError:
    """Return the 400 for a body of which no JSON value can be read, by an error of ``json.loads``."""
    if isinstance(error, JSONDecodeError) and error.pos < len(error.doc):
        return ApiError(400, f"the body is not JSON: {error}, where {clip(error.doc[error.pos :][:_SHOWN])} is")
    return ApiError(400, f"the body cannot be read as JSON: {error}")


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the 400 for a body that does not fit its model; ``errors`` as pydantic lists them."""
    first = errors[0]
    if first["loc"] == ("body",):
        if isinstance(first["input"], bytes):
            text = "the body is read as JSON only with the header Content-Type: application/json; send it"
        else:
            text = f"the body is {_KINDS.get(type(first['input']), 'no object')}, must be a JSON object"
        return ApiError(400, text)
    param = _place(first["loc"][1:2])
    same = [error for error in errors if _place(error["loc"][1:2]) == param]
    depth = max(len(error["loc"]) for error in same)  # of forms that a value may have, the nearest
    deepest = [error for error in same if len(error["loc"]) == depth]
    reasons = dict.fromkeys(f"{_place(error['loc'][1:]) or 'body'}: {error['msg']}" for error in deepest)
    return ApiError(400, clip("; ".join(list(reasons)[:_MOST_REASONS]))[1:-1], param or None)


def _place(path: Sequence[str | int]) -> str:
    """Return ``messages[0].content[1]`` of ``("messages", 0, "content", "list[dict]", 1)``."""
    steps = [step for step in path if isinstance(step, int) or not _FORM.fullmatch(step)]
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _encodable(text: str) -> str:
    """Return ``text`` without lone surrogates, which JSON can carry in and UTF-8 cannot carry out."""
    return text.encode(errors="replace").decode()
