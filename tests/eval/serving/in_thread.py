"""Servers in a thread of this process, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from eval.serving.api import make_app
from eval.serving.serve import endpoint_of, listen
from tests.runs import run_of


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The URL of an ASGI app."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with listen("127.0.0.1", "0") as listening:  # clients wait until it has started
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(5)


@contextmanager
def tiny_server(*overrides: str) -> Iterator[str]:
    """The URL of the tiny model's API with LazyLLM: models tiny, tiny/lazy and tiny/baseline."""
    lazy = ("method=lazy", "method.schedule={2: 0.3}")
    endpoint = endpoint_of(run_of("model=tiny", *lazy, "baseline=false", *overrides))
    assert list(endpoint.methods) == ["tiny", "tiny/lazy", "tiny/baseline"]
    with served(make_app(endpoint)) as url:
        yield f"{url}/v1"
