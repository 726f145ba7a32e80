"""A server around the tiny model in a thread of this process, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from eval.openai_api import make_app
from eval.serve import endpoint_of, listen
from tests.runs import run_of


@contextmanager
def tiny_server(*overrides: str) -> Iterator[str]:
    """The URL of a server with LazyLLM: models tiny, tiny/lazy and tiny/baseline."""
    endpoint = endpoint_of(
        run_of("model=tiny", "method=lazy", "method.schedule={2: 0.3}", "baseline=false", *overrides)
    )
    assert list(endpoint.methods) == ["tiny", "tiny/lazy", "tiny/baseline"]
    server = uvicorn.Server(uvicorn.Config(make_app(endpoint), log_level="error"))
    with listen("127.0.0.1", "0") as listening:  # clients wait until it has started
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(5)
