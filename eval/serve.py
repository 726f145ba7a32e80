"""A server with OpenAI's API around a model of ours, with methods: lazyllm-bench serve model=tiny method=lazy port=8123

    lazyllm-bench serve model=tiny 'methods=[lazy,fastkv]' port=8123

/v1/models lists the model's name (the first method), NAME/METHOD of each method, and NAME/baseline; requests choose by
name. Other arguments are those of lazyllm-bench run. It listens on this machine only unless host=ADDRESS is given. One
request runs at a time, and others wait. The handlers are those of `transformers serve`, around one loaded model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from eval.run.config import run_config
from eval.run.job import job
from eval.run.run import Run
from lazyllm.errors import UserError, parser_of, require


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb `serve`; ends by SIGTERM or Ctrl-C. Returns the exit code. Raises UserError."""
    _, arguments = parser_of("serve", __doc__).parse_known_args(arguments)
    own = {"port": "8000", "host": "127.0.0.1", "methods": ""}
    others = [word for word in arguments if word.partition("=")[0] not in own]
    own |= {key: value for key, _, value in (word.partition("=") for word in arguments) if key in own}
    require(own["port"].isdigit() and int(own["port"]) < 2**16, "port", own["port"], "a number below 65536")
    names = re.findall(r"[^\s,\[\]]+", own["methods"])
    methods = [[f"method={name}"] for name in names] or [[]]
    # the dataset, which none is needed for, is one that is made here
    runs = [Run(run_config(["dataset=lookup", "baseline=false", *others, *method])) for method in methods]
    if any(run.is_served or len(run.asked) > 1 for run in runs):
        raise UserError("serve takes a model and methods of this process: model=NAME method=NAME, or methods=[...]")
    missing = [package for package in ("fastapi", "uvicorn", "openai") if find_spec(package) is None]
    if missing:
        raise UserError(f"serve needs {missing[0]}: pip install --editable '.[serve]' in the repository's folder")
    with job():
        import uvicorn

        logging.getLogger("transformers.cli").setLevel(logging.ERROR)  # it warns of each request
        app, models = app_of(runs)
        host = f"[{own['host']}]" if ":" in own["host"] else own["host"]
        print(f"http://{host}:{own['port']}/v1: {', '.join(models)}", flush=True)
        options: Any = {"log_level": "warning", "timeout_graceful_shutdown": 2}  # seconds for answers in progress
        uvicorn.run(app, host=own["host"], port=int(own["port"]), **options)
    return 0


def app_of(runs: Sequence[Run]) -> tuple[Any, list[str]]:
    """The ASGI app that serves the methods of the runs, of one model, and the names that it lists. Raises UserError."""
    from fastapi import FastAPI, HTTPException
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerateManager, GenerationState

    from lazyllm import using
    from lazyllm.methods import Baseline
    from lazyllm.models.load import load_tokenizer_of, load_weights

    spec, name = runs[0].spec, runs[0].config.model.name
    model, tokenizer = load_weights(spec), load_tokenizer_of(spec)
    positions = model.config.max_position_embeddings
    methods = {arm.settings["name"]: arm.method(run.datasets[0].name) for run in runs for arm in run.arms}
    methods = {"": next(iter(methods.values())), **methods, "baseline": Baseline()}
    stack = ExitStack()
    models = {f"{name}/{key}".rstrip("/"): stack.enter_context(using(copy(model), it)) for key, it in methods.items()}

    class FittingPrompts(GenerateManager):
        """Refuses a prompt that is too long before the stream, and its status, begins."""

        def generate_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, *a: Any, **k: Any
        ) -> Any:
            tokens, new = inputs["input_ids"].shape[-1], gen_config.max_new_tokens or 1
            require(tokens + new <= positions, "tokens", f"{tokens} + {new} new", f"at most {positions} together")
            return super().generate_streaming(model, processor, inputs, gen_config, *a, **k)

    manager: Any = ModelManager()  # has the models that are served, and loads no other
    manager.load_model_and_processor = lambda key, **_: (models[key.removesuffix("@main")], tokenizer)
    app, state, one_at_a_time = FastAPI(), GenerationState(), FittingPrompts()
    app.state.methods = stack  # keeps the contexts: one that is collected takes its method off its model
    state.get_manager = lambda *_, **__: one_at_a_time  # all models share the thread that generates

    def add(path: str, handler: Any) -> None:
        @app.post(path)
        async def answer(body: dict[str, Any]) -> Any:
            try:
                if body.setdefault("model", name) not in models:
                    raise HTTPException(404, f"no model {body['model']!r}; there are {', '.join(models)}")
                if not isinstance(stop := body.get("stop") or [], str | list) or {*map(type, stop)} - {str}:
                    raise TypeError("stop: expected a text, or a list of texts")  # transformers sees it too late
                return await handler.handle_request(body, uuid4().hex)
            except (KeyError, TypeError, ValueError) as error:
                raise HTTPException(400, f"{type(error).__name__}: {error}") from error

    add("/v1/completions", CompletionHandler(manager, state))
    add("/v1/chat/completions", ChatCompletionHandler(manager, state))

    @app.get("/health")
    @app.get("/v1/models")
    def listed() -> dict[str, Any]:
        facts = {"object": "model", "owned_by": "lazyllm-bench", "version": version("lazyllm-bench")}
        return {"object": "list", "data": [{"id": key, **facts, "max_model_len": positions} for key in models]}

    return app, list(models)
