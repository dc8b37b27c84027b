"""Routes of the server, its errors in OpenAI's form, and an id on every answer."""

import logging
import re
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from punica import __version__
from punica.adapters import LoRARequest
from punica.checks import clip
from punica.serve.access import Keys
from punica.serve.backend import Backend, Metrics, stopping_error
from punica.serve.catalogue import Catalogue
from punica.serve.errors import ApiError, invalid_body, unreadable_body
from punica.serve.protocol import AnyBody, ChatBody, CompletionBody, LoadAdapter, UnloadAdapter, check_supported
from punica.serve.responses import GenerationResponse, Generator
from punica.serve.router_metrics import RouterMetrics

_log = logging.getLogger(__name__)
_ID_HEADER = b"x-request-id"
_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class Settings:
    """Names, keys and limits of a server.

    Args:
        adapters: those that have a name from the start; their ids are distinct.
        roots: real paths of the folders that ``/v1/load_lora_adapter`` may read; none: it is refused.
        max_queue: most generations that wait beside a full batch; further calls get 429.
        max_body: bytes of a request's body; longer ones get 413.
        names_in_metrics, demo: of the command line.
    """

    base: str
    adapters: Sequence[LoRARequest] = ()
    keys: Keys = field(default_factory=Keys)
    roots: Sequence[Path] = ()
    max_queue: int = 1024
    max_body: int = 1 << 20
    names_in_metrics: bool = False
    demo: bool = False


def make_app(backend: Backend, settings: Settings) -> FastAPI:
    """Build the ASGI application that serves an engine, which runs from start-up to shut-down.

    ValueError: the engine has no tokenizer. TypeError: an engine in place of its `Backend`.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a Backend, got {type(backend).__name__}; give EngineProcess(build)")
    codec = backend.facts.codec
    if codec is None:
        raise ValueError("the engine has no tokenizer, so no text to serve; add tokenizer files to the checkpoint")
    models = settings.base, settings.adapters, settings.keys, settings.roots
    catalogue = Catalogue(*models, backend.facts.max_model_len)
    generator = Generator(backend, codec, backend.facts.max_batch_size + settings.max_queue)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        backend.start()
        try:
            yield
        finally:
            await backend.stop()
            generator.tokenizing.shutdown()

    async def refuse_at_the_end() -> None:
        if backend.refuses:
            raise stopping_error("takes no new requests")

    app = _App(title="punica", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.backend, app.state.max_body = backend, settings.max_body
    _add_errors(app, backend.metrics)
    served = APIRouter(prefix="/v1", dependencies=[Depends(refuse_at_the_end)])
    _add_models(served, generator, catalogue)
    app.include_router(served)
    _add_operations(app, backend, RouterMetrics(backend.metrics.registry, settings.base, settings.names_in_metrics))
    _add_page(app, backend, catalogue, settings.demo)
    return app


class Envelope:
    """ASGI middleware: ``x-request-id`` on every answer, the client's or a new one where no valid one came, and 413 to
    a body of more than ``max_body`` bytes, at the first byte beyond.
    """

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app, self._max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope.get("headers", ()) if name == _ID_HEADER), b"")
        request_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        num_received = 0

        async def counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body:
                raise HTTPException(413, f"the body has more than {self._max_body} bytes, this server's limit")
            return message

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (_ID_HEADER, request_id)]}
            await send(message)

        await self._app({**scope, "request_id": request_id.decode()}, counted, identified)


class _App(FastAPI):
    """Application whose answers have ids, those to unexpected errors included."""

    def build_middleware_stack(self) -> ASGIApp:
        return Envelope(super().build_middleware_stack(), self.state.max_body)


def _add_models(routes: APIRouter, generator: Generator, catalogue: Catalogue) -> None:
    def respond(request: Request, body: AnyBody) -> Response:
        adapter = catalogue.served(body, _key(request))
        check_supported(body)
        return GenerationResponse(generator, body, adapter)

    @routes.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return respond(request, body)

    @routes.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return respond(request, body)

    @routes.head("/models", include_in_schema=False)
    @routes.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": catalogue.visible(_key(request))}

    @routes.head("/models/{name:path}", include_in_schema=False)
    @routes.get("/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        catalogue.find(name, _key(request))
        return catalogue.describe(name)

    @routes.post("/load_lora_adapter")
    async def load_lora_adapter(request: Request, body: LoadAdapter) -> Response:
        await catalogue.load(body, _key(request), generator.backend)
        return PlainTextResponse(f"Success: LoRA adapter {clip(body.lora_name)} added successfully.")

    @routes.post("/unload_lora_adapter")
    async def unload_lora_adapter(request: Request, body: UnloadAdapter) -> Response:
        await catalogue.unload(body.lora_name, _key(request), generator.backend)
        return PlainTextResponse(f"Success: LoRA adapter {clip(body.lora_name)} removed successfully.")


def _add_operations(app: FastAPI, backend: Backend, routers: RouterMetrics) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        health = "stopping" if backend.refuses else backend.health
        return JSONResponse({"status": health}, 503 if health in ("failed", "stopping") else 200)

    @app.head("/version", include_in_schema=False)
    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def exposition() -> Response:
        routers.view = await backend.look(with_steps=False)
        return Response(backend.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI, backend: Backend, catalogue: Catalogue, demo: bool) -> None:
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    for tag in ("script", "style"):
        code = page.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        policy += f"; {tag}-src 'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'"
    headers = {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'", "Cache-Control": "no-cache"}

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers=headers)

    @app.get("/steps")
    async def steps(request: Request) -> Response:
        """Return the last steps, and what the engine holds, with the names of those models that the key opens."""
        catalogue.keys.check(_key(request))
        view, opens = await backend.look(with_steps=True), partial(catalogue.keys.opens, _key(request))
        names = {number: name for number, name in view.get("names", {}).items() if opens(name)}
        shown = {"names": names, "model": catalogue.base if opens(catalogue.base) else None, "demo": demo}
        return JSONResponse(view | shown, headers={"Cache-Control": "no-store"})


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    def answer(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        metrics.rejected.labels(error.status).inc()
        return JSONResponse(error.body, error.status, {**(headers or {}), **error.headers})

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        cause = error.__cause__  # json.loads's
        return answer(invalid_body(error.errors()) if cause is None else unreadable_body(cause))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        if error.status_code == 400 and error.__cause__ is not None:  # of what else ends the reading of a body
            return answer(unreadable_body(error.__cause__))
        return answer(ApiError(error.status_code, str(error.detail)), error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        _log.error("request %s failed", request.scope["request_id"], exc_info=error)
        return answer(ApiError(500, "internal error; see the server's log"))


def _key(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None
