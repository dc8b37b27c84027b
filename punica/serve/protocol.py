"""Bodies of HTTP requests, as OpenAI and vLLM name their fields, and the engine's `SamplingParams` from these."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from punica.checks import clip
from punica.engine import SamplingParams
from punica.engine.text import ending_at
from punica.serve.errors import ApiError, refused

MOST_CHOICES = 128
MOST_MESSAGES = 10_000
Name = Annotated[str, Field(max_length=256, pattern=r"^[\w.:/@+-]+$")]
TokenIds = Annotated[list[int], Field(min_length=1)]


class Body(BaseModel):
    """Checked strictly: no value changes its type, no field is unknown. Null asks for nothing, as if not given."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


_Part = Annotated[str, Field(max_length=256)]


class LoadAdapter(Body):
    """Body of ``/v1/load_lora_adapter``: fields of :class:`punica.adapters.LoRARequest`. ``load_inplace`` replaces a
    loaded adapter of that name. ``base_model_name``, of the LoRA sidecar of Kubernetes' gateway, changes nothing.
    """

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    weights_mapper: Annotated[dict[_Part, _Part], Field(max_length=64)] | None = None
    base_model_name: str | None = None


class UnloadAdapter(Body):
    """Body of ``/v1/unload_lora_adapter``; vLLM's ``lora_int_id`` must be null, ids are the server's own."""

    lora_name: Name
    lora_int_id: None = None
    base_model_name: str | None = None


class StreamOptions(Body):
    """``include_usage``: one more chunk at the end, with the numbers of tokens. ``continuous_usage_stats``, vLLM's: the
    others have those so far. ``include_obfuscation``: chunks are never padded.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Literal[False] | None = False


class GenerationBody(BaseModel):
    """Fields that completions and chats share; further ones are checked by :func:`check_supported`. ``user`` and its
    successors ``safety_identifier`` and ``prompt_cache_key`` change nothing. ``cache_salt`` is vLLM's. ``adapters`` is
    this server's, a mixture on the base model: weights by adapters' names.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    adapters: dict[Name, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Annotated[str, Field(max_length=20)], float] | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None

    @property
    def limit_name(self) -> str:
        return "max_tokens"


class CompletionBody(GenerationBody):
    """Body of ``/v1/completions``: one prompt or several, text or token ids."""

    prompt_name: ClassVar[str] = "prompt"
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item, return-value]

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    """Message of a chat; ``content`` may be null where it is the assistant's, its parts `messages_of` checks."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Name
    content: str | list[dict[str, Any]] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """The message for the chat template."""
        return {"role": self.role, "content": self.content or "", **({} if self.name is None else {"name": self.name})}


class ChatBody(GenerationBody):
    """Body of ``/v1/chat/completions``. ``chat_template_kwargs`` are variables of the template, as in vLLM."""

    prompt_name: ClassVar[str] = "messages"
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def prompts(self) -> list[list[dict[str, Any]]]:
        return [[message.variables for message in self.messages]]

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


AnyBody = CompletionBody | ChatBody

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,), "allowed_token_ids": (), "best_of": (), "use_beam_search": (False,),
    "echo": (False,), "suffix": ("",), "prompt_logprobs": (), "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "functions": ([],), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (),
    "web_search_options": (), "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],), "priority": (0,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "lora_path": (),
}  # fmt: skip
"""Parameters that are refused, with the values besides null that ask for nothing, so may be sent."""
WITHOUT_EFFECT = frozenset({
    "store", "metadata", "service_tier", "prompt_cache_retention", "prompt_cache_options",
})  # fmt: skip
"""Parameters that ask for no other answer: whatever their value, it is not read."""
_CHOICES = {"tools": "tool_choice", "functions": "function_call"}
UNSUPPORTED_IN_MESSAGES = frozenset({
    "tools", "tool_calls", "tool_call_id", "tool_plan", "function_call", "refusal", "audio", "image", "images",
    "videos", "files", "task", "reasoning", "reasoning_content", "reasoning_details", "thinking", "thinking_blocks",
    "prefix", "partial",
})  # fmt: skip
"""Fields of messages that other servers put into the prompt, refused unless empty. Further ones are a client's own."""
_SEEDS = 1 << 64

_SAME_NAME = [one.name for one in fields(SamplingParams) if one.name in {*GenerationBody.model_fields} - {"n"}]


def check_supported(body: AnyBody) -> None:
    """ApiError 400 for a parameter that is unknown, or that the engine does not serve with this value.

    Tools of which none may be chosen ask for nothing; nor does what load generators repeat, ``n`` and the model's name.
    """
    given = body.model_extra or {}
    allowed = {**UNSUPPORTED, "best_of": (body.n or 1,), "lora_path": (body.model,)}
    for name, value in given.items():
        choice = _CHOICES.get(name, "")
        if value is None or name in WITHOUT_EFFECT or (choice and given.get(choice) == "none"):
            continue
        if name not in allowed:
            raise ApiError(400, f"unknown parameter {clip(name)}", clip(name)[1:-1], "unknown_parameter")
        # JSON's true is no 1
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed[name]):
            remedy = choice and f'; leave it out, or send {choice}="none"'
            text = f"{name}={clip(value)} is not supported by this server{remedy}"
            raise ApiError(400, text, name, "unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    if not isinstance(body, ChatBody):
        return
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    for place, message in enumerate(body.messages):
        for name, value in (message.model_extra or {}).items():
            if name in UNSUPPORTED_IN_MESSAGES and value not in (None, [], {}, "", False):
                where = f"messages[{place}].{name}"
                raise ApiError(400, f"{where} is not supported by this server", where, "unsupported_parameter")
        if message.content is None and message.role != "assistant":
            raise ApiError(400, f"messages[{place}].content is missing; only an assistant's may be null", "messages")


def params_of(body: AnyBody, defaults: SamplingParams, room: int, end_token_ids: Sequence[int]) -> SamplingParams:
    """Return the parameters of the body over the engine's defaults, with ``room`` for new tokens and the end tokens of
    a template; ApiError 400: a value out of range. Of OpenAI's seeds, 64 bits with a sign, -1 is none, as in vLLM.
    """
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if given.get("top_k") in (0, -1):  # vLLM's ways to keep all tokens
        given["top_k"] = None
    if -_SEEDS // 2 <= given.get("seed", 0) < 0:
        given["seed"] = None if given["seed"] == -1 else given["seed"] % _SEEDS
    given.setdefault("min_tokens", min(defaults.min_tokens, room))
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    top = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    renamed = {"max_new_tokens": body.limit_name, "logprobs": top}
    try:
        found = replace(defaults, **given, n=body.n or 1, max_new_tokens=room, logprobs=body.num_logprobs)
        return ending_at(found, end_token_ids)
    except (TypeError, ValueError) as error:
        raise refused(str(error), dict(zip(_SAME_NAME, _SAME_NAME, strict=True)) | renamed) from error


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Return biases by token id; JSON's keys are texts. ApiError 400 for a key that is no id."""
    for key in given:
        if not (key.isascii() and key.isdecimal()):
            raise ApiError(400, f"logit_bias has the key {clip(key)}, must be a token id", "logit_bias")
    return {int(key): bias for key, bias in given.items()}


def room_for(body: AnyBody, num_prompt: int, defaults: SamplingParams, max_model_len: int) -> int:
    """Return ``max_new_tokens`` for a prompt: as given, or for a chat what is left, for a completion the default.

    ApiError 400 ``context_length_exceeded``: beyond ``max_model_len``, in OpenAI's words, which clients look for.
    """
    left = max_model_len - num_prompt
    wanted: int | None = getattr(body, body.limit_name)
    if wanted is None:
        wanted = max(1, left if isinstance(body, ChatBody) else min(left, defaults.max_new_tokens))
    if wanted > left:
        raise ApiError(
            400, f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt + wanted} tokens ({num_prompt} in the {body.prompt_name}, {wanted} in the completion). "
            "Please reduce the length of either.", body.prompt_name, "context_length_exceeded",
        )  # fmt: skip
    return wanted
