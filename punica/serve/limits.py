"""Limits on what clients send: generations inside the server at once, bytes of a body, and the end of the server."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from punica.serve.backend import Call
from punica.serve.errors import ApiError

RETRY_AFTER_S = 1


class Room:
    """Counter of admitted generations, waiting or running, up to ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold room for ``count`` generations. ApiError 400: more than ever fit; 429 with Retry-After: full now."""
        if count > self.limit:
            raise ApiError(400, f"{count} generations in one call, this server takes {self.limit}; send fewer", "n")
        if self.taken + count > self.limit:
            raise ApiError(
                429, f"{self.taken} generations wait or run, the limit is {self.limit}; retry later",
                code="server_overloaded", headers={"Retry-After": str(RETRY_AFTER_S)},
            )  # fmt: skip
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than ``max_body`` bytes, at the first byte beyond."""

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app, self._max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_received = 0

        async def counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body:
                raise HTTPException(413, f"the body has more than {self._max_body} bytes, this server's limit")
            return message

        await self._app(scope, counted, send)


class Stopping:
    """End of a server in steps, which `punica.serve.server.Server` takes on the event loop: first new requests are
    refused (:meth:`refuse`), then running answers are cut (:meth:`cut`).
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
            call.end(_stopping("ended this answer"))

    async def check(self) -> None:
        """ApiError 503 with Retry-After, for a new request to a server that ends."""
        if self.refuses:
            raise _stopping("takes no new requests")

    @contextmanager
    def holding(self, call: Call) -> Iterator[None]:
        """Let :meth:`cut` end a call inside. ApiError 503: all have been ended."""
        if self._cuts:
            raise _stopping("ended this answer")
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.remove(call)


def _stopping(what: str) -> ApiError:
    return ApiError(
        503, f"the server is stopping and {what}; send the request again, later or to another server",
        code="server_stopping", headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
    )  # fmt: skip
