"""A server of OpenAI's completions whose models misbehave, each in the way that its name says."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """Models: right, slow, http-429, http-500, cut, endless (no [DONE]), no-json, error, no-usage, wrong, short, long.

    Attributes:
        refuses: fields of a body that get 400, as a strict server answers what it does not know.
        key: the API key that every request must carry, if any.
        pause: seconds before the first token of the model slow.
        bodies: those that came, in order.
        most: most requests under way at once; one ends before the last bytes of its answer are sent.
    """

    daemon_threads = True

    def __init__(self, models: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models, self.refuses, self.key, self.pause = models, set[str](), "", 0.2
        self.bodies, self.under_way, self.most = list[dict[str, Any]](), 0, 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[None]:
        with self.lock:
            self.bodies.append(body)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            yield
        finally:
            with self.lock:
                self.under_way -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that leaves
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def is_open(self) -> bool:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.answer(401, {"error": {"message": "no key"}})
            return False
        return True

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            if self.is_open():
                self.answer(200, {"data": self.server.models})
        elif self.path == "/version":
            self.answer(200, {"version": "1.2"})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.counted(body):
            if not self.is_open():
                return
            if refused := self.server.refuses & body.keys():
                return self.answer(400, {"error": {"message": f"unknown {refused}"}})
            if body["model"].startswith("http-"):
                return self.answer(int(body["model"].removeprefix("http-")), {"error": {"message": "no"}})
            self.stream(body)
        if body["model"] != "cut":
            self.end(body["model"])

    def stream(self, body: dict[str, Any]) -> None:
        model, wanted = body["model"], body["max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if model == "slow":
            time.sleep(self.server.pause)
        tokens = {"short": 1, "long": wanted + 1}.get(model, wanted)
        for place in range(tokens):
            self.event({"choices": [{"text": f" {place}"}]})
            if model == "cut" or (model == "error" and place == 0):
                break
        if model == "cut":
            self.close_connection = True
            return
        if model == "no-json":
            self.send("data: {\n\n")
        if model == "error":
            self.event({"error": {"message": "out of memory"}})
        if model != "no-usage":
            said = tokens - 1 if model == "wrong" else tokens
            self.event({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": said}})

    def end(self, model: str) -> None:
        if model != "endless":
            self.send("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, content: dict[str, Any]) -> None:
        self.send(f"data: {json.dumps(content)}\n\n")

    def send(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()


def models_of(*adapters: str, owner: str = "fake") -> list[dict[str, Any]]:
    """A base model and adapters of it, as /v1/models lists them."""
    base = {"id": "base", "owned_by": owner, "parent": None}
    return [base, *({"id": name, "owned_by": owner, "parent": "base"} for name in adapters)]


@contextmanager
def fake_server(*adapters: str) -> Iterator[FakeServer]:
    """A fake with these adapters, in a thread while the block runs."""
    with FakeServer(models_of(*adapters)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
