"""`Backend`: an engine as the API sees it, wherever it runs; all methods are called on the event loop."""

from abc import ABC, abstractmethod
from typing import Protocol

from punica.adapters import LoRARequest
from punica.engine.pretrained import GenerationDefaults
from punica.engine.text import TextCodec
from punica.serve.calls import Call
from punica.serve.metrics import Metrics


class EngineFacts(Protocol):
    """Sizes and settings of an engine, as far as the API needs them."""

    @property
    def codec(self) -> TextCodec | None:
        """Its tokenizer."""

    @property
    def defaults(self) -> GenerationDefaults:
        """Sampling of requests that leave parameters out."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request."""


class Backend(ABC):
    """Engine of a server."""

    engine: EngineFacts
    metrics: Metrics

    @abstractmethod
    def start(self) -> None:
        """Begin to deliver pieces on the running event loop."""

    @abstractmethod
    async def stop(self) -> None:
        """Abort what is unfinished and end."""

    @property
    @abstractmethod
    def num_places(self) -> int:
        """Requests that are served at once."""

    @property
    @abstractmethod
    def has_lora(self) -> bool:
        """True where adapters can be served."""

    @property
    @abstractmethod
    def is_healthy(self) -> bool:
        """True while the engine runs and its last step did not raise."""

    @property
    def health(self) -> str:
        """State in one word: ``"ok"``, ``"degraded"`` (slower than it was started for) or ``"failed"``."""
        return "ok" if self.is_healthy else "failed"

    @abstractmethod
    async def submit(self, call: Call) -> None:
        """Queue all requests of a call, or none; raises what ``Engine.add_request`` raises. ApiError 503: it ended."""

    @abstractmethod
    def abort(self, call: Call) -> None:
        """Take out the requests of a call that have not ended; also of one whose :meth:`submit` was cancelled."""

    @abstractmethod
    async def admit(self, adapter: LoRARequest) -> None:
        """Read and check an adapter that is about to get a name, and serve this version of it.

        FileNotFoundError, TypeError, ValueError: it does not fit.
        """

    @abstractmethod
    async def retire(self, adapter_id: int) -> None:
        """Remove an adapter from the engine's memory as soon as no request uses it."""
