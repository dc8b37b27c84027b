"""Bodies of HTTP requests, as OpenAI and vLLM name their fields."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    """Body of ``/v1/load_lora_adapter``. ``load_inplace`` replaces a loaded adapter of that name.

    ``is_3d_lora_weight`` and ``weights_mapper`` (renames the adapter's tensors): see
    :class:`punica.adapters.LoRARequest`. ``base_model_name`` changes nothing; the LoRA sidecar of Kubernetes' inference
    gateway sends it.
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
    """Fields that completions and chats share; further ones are checked by :func:`punica.serve.sampling.params_of`.

    ``user`` identifies the end user, and changes nothing; so do its successors ``safety_identifier`` and
    ``prompt_cache_key``. ``top_k`` to ``ignore_eos`` are vLLM's, and so are ``min_tokens`` to ``skip_special_tokens``.
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

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class TextPart(BaseModel):
    """Part of a message's content; only text is served. Further fields are the client's own, and change nothing."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Message of a chat. Of further fields see :data:`punica.serve.sampling.UNSUPPORTED_IN_MESSAGES`.

    ``content`` may be null where it is the assistant's. ``name``: of the speaker, for templates that show it.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    role: Name
    content: str | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """The message as templates read it; parts of a text are joined by line ends, as vLLM joins them."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}


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
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


AnyBody = CompletionBody | ChatBody
