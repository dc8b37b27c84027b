"""`RequestIds`: an ``x-request-id`` on every answer."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
_VALID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIds:
    """ASGI middleware that returns a client's ``x-request-id``, or one of its own where none or no valid one came.

    An id has at most 128 visible ASCII characters. ``scope["request_id"]`` is that of a request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        given = next((value for name, value in scope.get("headers", ()) if name == _HEADER), b"")
        request_id = given if _VALID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (_HEADER, request_id)]}
            await send(message)

        await self._app({**scope, "request_id": request_id.decode()}, receive, identified)
