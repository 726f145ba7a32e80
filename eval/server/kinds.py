"""What the servers can do, and which one answers at a URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.server.client import Client, Endpoint
from lazyllm.errors import UserError

_GREEDY = {"temperature": 0.0, "top_p": 1.0}
_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Kind:
    """A server's software: the fields that it takes beyond OpenAI's, as it refuses or ignores others.

    sampling: greedy, with everything that the model's own generation config could set.
    token_ids: whether a prompt may be its token ids. usage: whether it takes `stream_options`.
    cold: what keeps a prompt out of the prefix cache: "salt" (`cache_salt`), "flush" (POST /flush_cache before each
        request), "off" (`cache_prompt: false`), "nothing" (it has no such cache), "noise" (a random line before it).
    lists: whether it answers for the models that it lists only.
    """

    name: str
    sampling: Mapping[str, Any]
    token_ids: bool = False
    usage: bool = True
    cold: str = "noise"
    lists: bool = False


_MORE = _GREEDY | _PENALTIES | {"min_p": 0.0}
KINDS = {
    "vllm": Kind("vllm", _MORE | {"top_k": 0, "repetition_penalty": 1.0}, token_ids=True, cold="salt", lists=True),
    "sglang": Kind("sglang", _MORE | {"top_k": -1, "repetition_penalty": 1.0}, token_ids=True, cold="flush"),
    "llama.cpp": Kind("llama.cpp", _MORE | {"top_k": 1, "repeat_penalty": 1.0}, cold="off"),
    # transformers serve, and lazyllm-bench serve: other fields get 422; a frequency penalty of 0 is no penalty
    "transformers": Kind("transformers", _GREEDY | {"frequency_penalty": 0.0}, usage=False, cold="nothing"),
    "plain": Kind("plain", _GREEDY | _PENALTIES),
}
_VERSIONS = {
    "vllm": ("/version", "version"),
    "sglang": ("/server_info", "version"),
    "llama.cpp": ("/props", "build_info"),
}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "lazyllm-bench": "transformers"}


@dataclass(frozen=True)
class Server:
    """An endpoint and what its server said. positions: of prompt and answer; None if it does not say.

    version, models: the server's version, and the models that it lists.
    """

    endpoint: Endpoint
    kind: Kind
    version: str | None
    positions: int | None
    models: tuple[str, ...]


def describe(endpoint: Endpoint, kind: str | None = None) -> Server:
    """Ask the server what it is. kind: in place of what it says. Raises UserError if it does not have the model."""
    with Client(endpoint) as client:
        listed = client.models()
        models = tuple(str(entry.get("id")) for entry in listed)
        entry = next((entry for entry in listed if entry.get("id") == endpoint.model), {})
        chosen = KINDS[kind] if kind is not None else _kind(client, listed)
        if chosen.lists and endpoint.model not in models:
            raise UserError(f"{endpoint.url} has no model {endpoint.model!r}: give one of {', '.join(models)}")
        path, key = _VERSIONS.get(chosen.name, ("", ""))
        page = (client.get(f"{endpoint.root}{path}") or {}) if path else {}
        positions = (page.get("default_generation_settings") or {}).get("n_ctx")  # of llama.cpp
    return Server(
        endpoint, chosen, page.get(key) or entry.get("version"), positions or entry.get("max_model_len"), models
    )


def _kind(client: Client, listed: list[dict[str, Any]]) -> Kind:
    owners = [_OWNERS[owner] for entry in listed if (owner := entry.get("owned_by")) in _OWNERS]
    if owners:
        return KINDS[owners[0]]
    paths = (client.get(f"{client.endpoint.root}/openapi.json") or {}).get("paths", {})
    return KINDS["transformers" if {"/load_model", "/v1/completions"} <= set(paths) else "plain"]
