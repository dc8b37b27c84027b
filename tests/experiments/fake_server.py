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

    def __init__(self, *adapters: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = [{"id": name, "owned_by": "fake", "parent": "base"} for name in adapters]
        self.models.insert(0, {"id": "base", "owned_by": "fake"})
        self.refuses, self.key, self.pause, self.lock = set[str](), "", 0.2, threading.Lock()
        self.bodies, self.under_way, self.most = list[dict[str, Any]](), 0, 0

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

    def is_refused(self) -> bool:
        return bool(self.server.key) and self.headers.get("Authorization") != f"Bearer {self.server.key}"

    def do_GET(self) -> None:
        found = {"/v1/models": {"data": self.server.models}, "/version": {"version": "1.2"}}.get(self.path)
        status = 404 if found is None else 401 if self.is_refused() else 200
        self.answer(status, found if status == 200 else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model, wanted = body["model"], body["max_tokens"]
        with self.server.counted(body):
            if self.is_refused() or self.server.refuses & body.keys() or model.startswith("http-"):
                status = 401 if self.is_refused() else int(model.removeprefix("http-")) if "http-" in model else 400
                return self.answer(status, {"error": {"message": "no"}})
            self.stream(model, {"short": 1, "long": wanted + 1}.get(model, wanted), len(body["prompt"]))
        if model == "cut":
            self.close_connection = True
            return None
        if model != "endless":
            self.send("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        return None

    def stream(self, model: str, tokens: int, prompt: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if model == "slow":
            time.sleep(self.server.pause)
        for place in range(1 if model in ("cut", "error") else tokens):
            self.event({"choices": [{"text": f" {place}"}]})
        if model == "no-json":
            self.send("data: {\n\n")
        if model == "error":
            self.event({"error": {"message": "out of memory"}})
        if model not in ("no-usage", "cut"):
            said = tokens - 1 if model == "wrong" else tokens
            self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": said}})

    def event(self, content: dict[str, Any]) -> None:
        self.send(f"data: {json.dumps(content)}\n\n")

    def send(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()


@contextmanager
def fake_server(*adapters: str) -> Iterator[FakeServer]:
    """A fake with these adapters, in a thread while the block runs."""
    with FakeServer(*adapters) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
