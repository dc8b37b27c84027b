"""`Stopping`: the end of a server in steps, from new requests that are refused to answers that are cut."""

from collections.abc import Iterator
from contextlib import contextmanager

from punica.serve.backpressure import RETRY_AFTER_S
from punica.serve.calls import Call
from punica.serve.errors import ApiError


class Stopping:
    """State of a server that ends. Nothing is refused before :meth:`refuse`, and no answer is cut before :meth:`cut`.

    Its steps are taken on the event loop, by `punica.serve.server.Server`.
    """

    def __init__(self) -> None:
        self.refuses = False
        self._cuts = False
        self._calls: set[Call] = set()

    def refuse(self) -> None:
        """Answer new requests with 503 from now on."""
        self.refuses = True

    def cut(self) -> None:
        """End all running answers with an error."""
        self.refuses = self._cuts = True
        for call in self._calls:
            call.end(_error("ended this answer"))

    async def check(self) -> None:
        """ApiError 503 with Retry-After, for a new request to a server that ends."""
        if self.refuses:
            raise _error("takes no new requests")

    @contextmanager
    def holding(self, call: Call) -> Iterator[None]:
        """Let :meth:`cut` end a call inside. ApiError 503: all have been ended."""
        if self._cuts:
            raise _error("ended this answer")
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.remove(call)


def _error(what: str) -> ApiError:
    return ApiError(
        503, f"the server is stopping and {what}; send the request again, later or to another server",
        code="server_stopping", headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
    )  # fmt: skip
