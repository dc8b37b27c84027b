"""Routes of the server, and its errors in OpenAI's form."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from punica import __version__
from punica.adapters import LoRARequest
from punica.checks import clip
from punica.engine import Engine
from punica.serve.backend import Backend
from punica.serve.backpressure import BodyLimit, Room
from punica.serve.catalogue import Catalogue
from punica.serve.engine_thread import EngineThread
from punica.serve.errors import ApiError, invalid_body, unreadable_body
from punica.serve.keys import Keys
from punica.serve.metrics import Metrics
from punica.serve.protocol import ChatBody, CompletionBody, LoadAdapter, UnloadAdapter
from punica.serve.request_ids import RequestIds
from punica.serve.responses import GenerationResponse, Generator
from punica.serve.sampling import check_supported
from punica.serve.stopping import Stopping
from punica.serve.text import TokenStrings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Names, keys and limits of a server.

    Args:
        base: name of the base model.
        adapters: those that have a name from the start; their ids are distinct.
        keys: who may use what.
        roots: real paths of the folders that ``/v1/load_lora_adapter`` may read; none: it is refused.
        max_queue: most generations that wait beside a full batch; further calls get 429.
        max_body: bytes of a request's body; longer ones get 413.
    """

    base: str
    adapters: Sequence[LoRARequest] = ()
    keys: Keys = field(default_factory=Keys)
    roots: Sequence[Path] = ()
    max_queue: int = 1024
    max_body: int = 1 << 20


class _App(FastAPI):
    """Application whose answers have ids, those to unexpected errors included."""

    def build_middleware_stack(self) -> ASGIApp:
        """Put the ids around all other layers."""
        return RequestIds(super().build_middleware_stack())


def make_app(engine: Engine, settings: Settings) -> FastAPI:
    """Build the ASGI application that serves one engine; errors of :func:`app_of`."""
    return app_of(EngineThread(engine, Metrics()), settings)


def app_of(backend: Backend, settings: Settings) -> FastAPI:
    """Build the ASGI application that serves an engine, which runs from start-up to shut-down.

    ValueError: the engine has no tokenizer.
    """
    codec = backend.engine.codec
    if codec is None:
        raise ValueError("the engine has no tokenizer, so no text to serve; add tokenizer files to the checkpoint")
    metrics, room, stopping = backend.metrics, Room(backend.num_places + settings.max_queue), Stopping()
    catalogue = Catalogue(settings.base, settings.adapters, settings.keys, settings.roots)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        backend.start()
        try:
            yield
        finally:
            await backend.stop()
            tokenizing.shutdown()

    tokenizing = ThreadPoolExecutor(1, "punica-tokenizer")
    generator = Generator(backend, codec, TokenStrings(codec), room, stopping, tokenizing)
    app = _App(title="punica", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.stopping = stopping  # for the server
    app.add_middleware(BodyLimit, max_body=settings.max_body)
    _add_errors(app, metrics)
    served = APIRouter(prefix="/v1", dependencies=[Depends(stopping.check)])
    _add_generation(served, generator, catalogue)
    _add_adapters(served, backend, catalogue)
    app.include_router(served)
    _add_operations(app, backend, metrics, stopping)
    return app


def _add_generation(routes: APIRouter, generator: Generator, catalogue: Catalogue) -> None:
    def respond(request: Request, body: CompletionBody | ChatBody) -> Response:
        adapter = catalogue.find(body.model, _key(request))
        check_supported(body)
        return GenerationResponse(generator, body, adapter)

    @routes.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return respond(request, body)

    @routes.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return respond(request, body)


def _add_adapters(routes: APIRouter, backend: Backend, catalogue: Catalogue) -> None:
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
        await catalogue.load(body, _key(request), backend)
        return PlainTextResponse(f"Success: LoRA adapter {clip(body.lora_name)} added successfully.")

    @routes.post("/unload_lora_adapter")
    async def unload_lora_adapter(request: Request, body: UnloadAdapter) -> Response:
        await catalogue.unload(body.lora_name, _key(request), backend)
        return PlainTextResponse(f"Success: LoRA adapter {clip(body.lora_name)} removed successfully.")


def _add_operations(app: FastAPI, backend: Backend, metrics: Metrics, stopping: Stopping) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        health = "stopping" if stopping.refuses else backend.health
        return JSONResponse({"status": health}, 503 if health in ("failed", "stopping") else 200)

    @app.head("/version", include_in_schema=False)
    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


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
    """Return the bearer token of a request."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None
