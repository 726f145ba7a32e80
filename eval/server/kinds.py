"""What the servers can do, and which one answers at a URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.server.client import Endpoint
from lazyllm.errors import UserError

_GREEDY = {"temperature": 0.0, "top_p": 1.0}
_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Kind:
    """A server's software: the fields that it takes beyond OpenAI's, as it refuses or ignores others.

    owner: what it calls the owner of its models. sampling: greedy, with everything that the model's own generation
    config could set. token_ids: whether a prompt may be its token ids. usage: whether it takes `stream_options`.
    cold: what keeps a prompt out of the prefix cache: "salt" (`cache_salt`), "flush" (POST /flush_cache before each
        request), "off" (`cache_prompt: false`), "nothing" (it has no such cache), "noise" (a random line before it).
    page: where it tells its version. lists: whether it answers for the models that it lists only.
    """

    name: str
    owner: str
    sampling: Mapping[str, Any]
    token_ids: bool = False
    usage: bool = True
    cold: str = "noise"
    page: str = ""
    lists: bool = False


_MORE = _GREEDY | _PENALTIES | {"min_p": 0.0}
_VLLM = _MORE | {"top_k": 0, "repetition_penalty": 1.0}
_KINDS = (
    Kind("vllm", "vllm", _VLLM, token_ids=True, cold="salt", page="/version", lists=True),
    Kind("sglang", "sglang", _VLLM | {"top_k": -1}, token_ids=True, cold="flush", page="/server_info"),
    Kind("llama.cpp", "llamacpp", _MORE | {"top_k": 1, "repeat_penalty": 1.0}, cold="off", page="/props"),
    # transformers serve, and lazyllm-bench serve: other fields get 422; a frequency penalty of 0 is no penalty
    Kind("transformers", "lazyllm-bench", _GREEDY | {"frequency_penalty": 0.0}, usage=False, cold="nothing"),
    Kind("plain", "", _GREEDY | _PENALTIES),
)
KINDS = {kind.name: kind for kind in _KINDS}


@dataclass(frozen=True)
class Server:
    """An endpoint and what its server said: its version, the positions of prompt and answer, and the models it lists.

    version, positions: None if it does not say.
    """

    endpoint: Endpoint
    kind: Kind
    version: str | None
    positions: int | None
    models: tuple[str, ...]


def describe(endpoint: Endpoint) -> Server:
    """Ask the server what it is. Raises UserError if it does not have the model; "" stands for the first it lists."""
    listed = endpoint.ask("GET", f"{endpoint.url}/models").get("data")
    if not isinstance(listed, list):
        raise UserError(f"{endpoint.url}/models lists no models: give a URL such as http://HOST:PORT/v1")
    models = tuple(str(entry.get("id")) for entry in listed)
    entry = next((entry for entry in listed if endpoint.name in ("", entry.get("id"))), {})
    owners = [entry.get("owned_by") for entry in listed]
    name = endpoint.kind or next((kind.name for kind in _KINDS if kind.owner in owners), None)
    if name is None:  # transformers serve tells no owner of its own
        paths = endpoint.ask("GET", f"{endpoint.root}/openapi.json").get("paths", {})
        name = "transformers" if {"/load_model", "/v1/completions"} <= paths.keys() else "plain"
    kind = KINDS[name]
    if kind.lists and endpoint.name not in ("", *models):
        raise UserError(f"{endpoint.url} has no model {endpoint.name!r}: give one of {', '.join(models)}")
    page = endpoint.ask("GET", f"{endpoint.root}{kind.page}") if kind.page else {}
    version = page.get("version") or page.get("build_info") or entry.get("version")
    positions = (page.get("default_generation_settings") or {}).get("n_ctx") or entry.get("max_model_len")
    return Server(endpoint, kind, version, positions, models)
