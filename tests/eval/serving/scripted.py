"""A server with OpenAI's API that says what a script tells it, and stamps what it sends with the client's own clock."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Reply:
    """One reply. parts: bytes, each sent at once, or seconds to wait. broken: close the connection after the parts."""

    parts: Sequence[bytes | float] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    broken: bool = False


@dataclass
class Seen:
    """What a server has got: each POST's path and body, the connection of each request, and stamps of what it sent.

    at_once: the greatest number of POSTs that were answered at the same time.
    """

    posts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    connections: list[tuple[str, int]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    received: float = 0.0
    sent: list[float] = field(default_factory=list)
    at_once: int = 0


def event(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    """An event of /v1/completions."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


def chat(finish: str | None = None, **delta: Any) -> bytes:
    """An event of /v1/chat/completions."""
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n".encode()


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    """The event with the counts only."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    counts |= {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


@contextmanager
def scripted(reply: Callable[[int, dict[str, Any]], Reply], model: dict[str, Any]) -> Iterator[tuple]:
    """(url, what it has seen) of a server. reply: of the POST with a number, from 0. model: its entry in /v1/models."""
    seen, lock, busy = Seen(), threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.connections.append(("GET", self.client_address[1]))
            seen.keys.add(self.headers.get("Authorization"))
            body = json.dumps({"data": [model]}).encode() if self.path == "/v1/models" else b"{}"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            nonlocal busy
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            with lock:
                busy += 1
                seen.at_once = max(seen.at_once, busy)
                seen.received, number = time.perf_counter(), len(seen.posts)
                seen.posts.append((self.path, body))
                seen.connections.append(("POST", self.client_address[1]))
            answer = reply(number, body)
            try:
                self._send(answer)
            finally:
                with lock:
                    busy -= 1

        def _send(self, answer: Reply) -> None:
            if answer.parts and isinstance(answer.parts[0], float):
                time.sleep(answer.parts[0])
            if answer.status:
                self.send_response(answer.status)
                for name, value in {"Transfer-Encoding": "chunked", **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
            for part in answer.parts:
                if isinstance(part, float):
                    time.sleep(part)
                    continue
                seen.sent.append(time.perf_counter())
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                self.wfile.flush()
            if answer.broken or not answer.status:
                self.close_connection = True
                self.connection.shutdown(2)
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # the client may have gone
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
