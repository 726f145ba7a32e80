"""A server with OpenAI's API around a model of ours, with methods: lazyllm-bench serve model=tiny method=lazy port=8123

    lazyllm-bench serve model=tiny 'compare=[lazy,fastkv]' port=8123

/v1/models lists the model's name (the first method), NAME/METHOD of each method, and NAME/baseline; requests choose by
name. Other arguments are those of lazyllm-bench run. It listens on this machine only unless host=ADDRESS is given. One
request runs at a time, and others wait. /docs lists the fields that it takes; it refuses others.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from eval.run.asked import Asked, ask
from eval.run.config import run_config
from eval.run.job import job
from eval.run.local import LocalModel
from lazyllm.errors import UserError, parser_of, require

if TYPE_CHECKING:
    from eval.serving.api import Endpoint

GRACE_S = 2  # for answers in progress, after SIGTERM


def main(arguments: Sequence[str]) -> int:
    """The command `serve`; ends by SIGTERM or Ctrl-C. Returns the exit code. Raises UserError."""
    _, arguments = parser_of("serve", __doc__).parse_known_args(arguments)
    own = {"host": "127.0.0.1", "port": "8000"}
    others = [word for word in arguments if word.partition("=")[0] not in own]
    own |= {key: value for key, _, value in (word.partition("=") for word in arguments) if key in own}
    # the dataset, which none is needed for, is one that is made here
    asked = ask(run_config(["dataset=lookup", "baseline=false", *others]))
    model_of(asked)
    missing = [package for package in ("fastapi", "uvicorn") if find_spec(package) is None]
    if missing:
        raise UserError(f"serve needs {missing[0]}: pip install --editable '.[serve]' in the repository's folder")
    with job(), listen(**own) as listening, suppress(KeyboardInterrupt):
        serve(endpoint_of(asked), listening)
    return 0


def listen(host: str, port: str) -> socket.socket:
    """A socket that listens: clients that connect before the weights are loaded wait. Raises UserError."""
    require(host != "", "host", host, "an address")  # "" stands for all of them
    try:
        return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, ValueError) as error:
        raise UserError(f"host={host} port={port}: no server can listen there ({error})") from error


def serve(endpoint: Endpoint, listening: socket.socket) -> None:
    """Answer requests until SIGTERM or Ctrl-C: then answers in progress are refused, and end with their next token."""
    import uvicorn

    from eval.serving.api import make_app

    host, port = listening.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    class EndingServer(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            endpoint.is_ending.set()
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # tracebacks of those that are cut
            super().handle_exit(sig, frame)

    print(f"http://{address}/v1: {', '.join(endpoint.methods)}", flush=True)
    options: Any = {"log_level": "warning", "timeout_graceful_shutdown": GRACE_S}
    EndingServer(uvicorn.Config(make_app(endpoint), **options)).run([listening])


def model_of(asked: Asked) -> LocalModel:
    """The model in this process. Raises UserError for servers."""
    if not isinstance(asked.subject, LocalModel):
        raise UserError("serve takes a model of this process: model=NAME, with method=NAME or compare=[...]")
    return asked.subject


def endpoint_of(asked: Asked) -> Endpoint:
    """The methods of a run, by the names that requests give them, around its model. Raises UserError."""
    from eval.serving.api import Endpoint
    from lazyllm.methods import Baseline
    from lazyllm.models.load import load_weights

    model = model_of(asked)
    arms = model.arms(asked.datasets, asked.suite.length(asked.data), None)
    methods = {arm.label: arm.method(asked.datasets[0].name) for arm in arms}
    methods = {"": next(iter(methods.values())), **methods, "baseline": Baseline()}
    name, tokenizer = asked.config.model.name, model.tokenizer  # refused before weights load
    named = {f"{name}/{key}".rstrip("/"): method for key, method in methods.items()}
    return Endpoint(load_weights(model.spec), tokenizer, named)
