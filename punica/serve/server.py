"""`Server`: uvicorn with a port taken early, little buffered for a client, and an end in steps. No torch.

    SIGTERM --> `/health` and new requests: 503 --drain_s--> port closed --grace_s--> answers cut, each with an error
    SIGINT: the same without the first wait, which a second signal ends
"""

import asyncio
import errno
import logging
import math
import signal
import socket
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_log = logging.getLogger("uvicorn.error")  # the one that uvicorn shows
SEND_TIMEOUT_S = 60.0
"""Longest wait for a client that takes nothing of its answer; then its connection is closed."""
UNSENT_BYTES = 16 << 10
"""Bytes for a client that the kernel holds beside those on their way; by default megabytes."""
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, which else meet a closed one
_CUT_S = 5  # in which the errors of answers that were cut reach their clients
_BACKLOG = 2048  # connections that may wait while the engine loads
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}  # an address that names have and the machine has not, as of IPv6


def listen(host: str, port: int) -> list[socket.socket]:
    """Take a port on every address of a host; connections wait until a server accepts them. ``port`` 0: a free one.

    OSError: an unknown host, a port in use or not allowed.
    """
    made: list[socket.socket] = []
    absent: OSError | None = None
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            try:
                one = socket.create_server((address[0], port, *address[2:]), family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
                continue
            made.append(one)
            port = one.getsockname()[1]
            with suppress(OSError):  # of kernels without it
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # accepted ones inherit it
        if absent is not None and not made:
            raise absent
    except (OSError, UnicodeError) as error:
        for one in made:
            one.close()
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {host}:{port}: {reason}; pass another --host or --port") from error
    return made


class Connection(H11Protocol):
    """HTTP connection that buffers one write, and ends where its client takes nothing of it for ``send_timeout_s``.

    uvicorn's other parser, the default where it is installed, drops the body of a POST that offers HTTP/2.
    """

    def __init__(self, *given: Any, send_timeout_s: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._send_timeout_s = send_timeout_s
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Have every write wait until the kernel has taken the one before."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        self._forget()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _look(self, before: float = math.inf) -> None:
        """Close the connection where nothing of a write was taken since the last look; else look again later."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._watch = self.loop.call_later(self._send_timeout_s, self._look, left)
        else:
            _log.warning("a client took nothing of its answer for %g s: closed", self._send_timeout_s)
            self.transport.abort()

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


def _is_logged(record: logging.LogRecord) -> bool:
    """Return False for the page's looks, several a second."""
    return not (isinstance(record.args, tuple) and record.args[1:3] == ("GET", "/steps") and record.args[-1] == 200)


class Server(uvicorn.Server):
    """Server of an application of `punica.serve.app`, for :meth:`run` with the sockets of `listen`."""

    def __init__(
        self, app: Any, *, drain_s: float, grace_s: float, send_timeout_s: float = SEND_TIMEOUT_S,
        log_level: str | None = None,
    ) -> None:  # fmt: skip
        http: Any = partial(Connection, send_timeout_s=send_timeout_s)
        super().__init__(uvicorn.Config(
            app, http=http, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=math.ceil(grace_s) + _CUT_S,
            log_level=log_level,
        ))  # fmt: skip
        logging.getLogger("uvicorn.access").addFilter(_is_logged)
        self._backend = app.state.backend
        self._drain_s, self._grace_s = drain_s, grace_s
        self._drains = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            host, port = one.getsockname()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            _log.info("Uvicorn running on http://%s (Press CTRL+C to quit)", address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drains:
            self._drains = False
            return
        self._drains = sig == signal.SIGTERM and not self.should_exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, close the port, let answers end, cut the others."""
        self._backend.refuses = True
        if self._drains:
            _log.info("New requests are refused; the port closes in %g s", self._drain_s)
        loop = asyncio.get_running_loop()
        closes = loop.time() + self._drain_s
        while self._drains and loop.time() < closes:
            await asyncio.sleep(0.05)
        cut = loop.call_later(self._grace_s, self._backend.cut)
        await super().shutdown(sockets)
        cut.cancel()
