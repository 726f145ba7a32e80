"""A server around the tiny model in a thread of this process, for tests."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from eval.openai_api import make_app
from eval.serve import endpoint_of
from tests.runs import run_of


@contextmanager
def tiny_server() -> Iterator[str]:
    """The URL of a server with LazyLLM: models tiny, tiny/lazy and tiny/baseline."""
    endpoint = endpoint_of(run_of("model=tiny", "method=lazy", "method.schedule={2: 0.3}", "baseline=false"))
    assert list(endpoint.methods) == ["tiny", "tiny/lazy", "tiny/baseline"]
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(make_app(endpoint), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join(5)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
