"""Servers with OpenAI's API: what each kind can do, which one answers at a URL, and one streamed and timed request.

The clock starts just before the POST of a body that is already serialised, on a connection that is already open. An
event counts as a token if it has text, reasoning or a tool call; comments, roles and usage do not.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import httpx2

from eval.store.visit import ServerRequest
from lazyllm.errors import UserError

log = logging.getLogger(__name__)

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # before each retry; Retry-After counts if longer, to a minute
_RETRIED = (429, 500, 502, 503, 504)
_ADVICE = {  # by status
    **dict.fromkeys((401, 403), "the key is read from the environment variable {api_key_env} (server.api_key_env)"),
    404: "expected a server with /v1/{api} (server.api) and a model {name!r}",
    422: "the server refuses a field of the request: give its server.kind, or change extra_body",
}


class RequestError(Exception):
    """This request failed; others may succeed. The message is one line."""


@dataclass(frozen=True)
class Completion:
    """One answer. ttft_s, last_token_s: seconds from just before the POST to the first and to the last event with a
    token; an end token is one."""

    text: str
    reasoning: str
    ttft_s: float
    last_token_s: float
    request: ServerRequest


_GREEDY = {"temperature": 0.0, "top_p": 1.0}
_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
_MORE = _GREEDY | _PENALTIES | {"min_p": 0.0}
_VLLM = _MORE | {"top_k": 0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Kind:
    """A server's software: the fields that it takes beyond OpenAI's, as it refuses or ignores others.

    owner: what it calls the owner of its models. sampling: greedy, with everything that the model's own generation
    config could set. token_ids: whether a prompt may be its token ids. usage: whether it takes `stream_options`.
    cold: what keeps a prompt out of the prefix cache: "salt" (`cache_salt`), "flush" (POST /flush_cache before each
        request), "off" (`cache_prompt: false`), "nothing" (it has no such cache), "noise" (a random line before it).
    page: where it tells its version.
    """

    owner: str
    sampling: Mapping[str, Any]
    token_ids: bool = False
    usage: bool = True
    cold: str = "noise"
    page: str = ""


KINDS = {
    "vllm": Kind("vllm", _VLLM, token_ids=True, cold="salt", page="/version"),
    "sglang": Kind("sglang", _VLLM | {"top_k": -1}, token_ids=True, cold="flush", page="/server_info"),
    "llama.cpp": Kind("llamacpp", _MORE | {"top_k": 1, "repeat_penalty": 1.0}, cold="off", page="/props"),
    # transformers serve, and lazyllm-bench serve: other fields get 422; a frequency penalty of 0 is no penalty
    "transformers": Kind("lazyllm-bench", _GREEDY | {"frequency_penalty": 0.0}, usage=False, cold="nothing"),
    "plain": Kind("", _GREEDY | _PENALTIES),
}


@dataclass(frozen=True)
class Server:
    """A model of a server: the settings `server.*` of the same names, and what the server reports (`describe`): its
    version, the positions of prompt and answer, the models that it lists."""

    url: str
    name: str
    kind: str | None = None
    api: str = "completions"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    api_key_env: str = "OPENAI_API_KEY"
    timeout_s: float = 600.0
    version: str | None = None
    positions: int | None = None
    models: tuple[str, ...] = ()

    @property
    def takes(self) -> Kind:
        """The request fields that this kind of server accepts; set by `describe`."""
        return KINDS[str(self.kind)]

    @property
    def root(self) -> str:
        """The URL without its version, where servers have their own paths."""
        return self.url.removesuffix("/v1")

    @property
    def _key(self) -> str:
        return os.environ.get(self.api_key_env, "").strip()

    @cached_property
    def _http(self) -> httpx2.Client:
        """Connections, as many as requests at once. The key is in the headers only. Raises UserError."""
        if not (self._key.isascii() and self._key.isprintable()):  # the client's own error would show the key
            raise UserError(
                f"the key in {self.api_key_env} (server.api_key_env) has characters that no header can hold"
            )
        key = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return httpx2.Client(
            headers={"Content-Type": "application/json", **key},
            timeout=httpx2.Timeout(self.timeout_s, connect=10.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )

    def ask(self, method: str, url: str) -> dict[str, Any]:
        """The JSON object of a page, {} if there is none; a POST has no body. Raises UserError or RequestError."""
        try:
            response = self._http.request(method, url)
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise self._no_server(error) from error
        if response.status_code in (401, 403) or (method == "POST" and not response.is_success):
            raise self._refusal(response)
        return _json(response.text) if response.is_success else {}

    def answer(self, body: bytes) -> Completion:
        """The answer to a request for a stream. Retries only before the first byte of an answer.

        Raises RequestError; UserError if all other requests would fail too.
        """
        path = "chat/completions" if self.api == "chat" else "completions"
        request = self._http.build_request("POST", f"{self.url}/{path}", content=body)
        for retries, pause_s in enumerate((*PAUSES_S, None)):
            after = ""
            try:
                self._http.get(f"{self.url}/models")  # opens the connection
                sent_at, start = time.time(), time.perf_counter()
                with closing(self._http.send(request, stream=True)) as response:
                    headers_s = time.perf_counter() - start
                    if response.status_code not in _RETRIED or pause_s is None:
                        return self._read(response, start, sent_at=sent_at, headers_s=headers_s, retries=retries)
                    after = response.headers.get("Retry-After", "")
            except httpx2.ReadTimeout as error:
                raise RequestError(f"no answer within {self.timeout_s:g} s (server.timeout_s)") from error
            except httpx2.RequestError as error:
                if pause_s is None:
                    raise self._no_server(error) from error
                if retries == 0:
                    log.warning("no server answers at %s: trying again for %g s", self.url, sum(PAUSES_S))
            time.sleep(max(pause_s, min(60, float(after)) if after.isdigit() else 0))
        raise AssertionError

    def _read(self, response: httpx2.Response, start: float, **reported: Any) -> Completion:
        """The answer of a stream, in which each event is one line of data. reported: fields of `ServerRequest`."""
        text, reasoning, other, usage, ended = "", "", "", {}, False
        tokens: list[float] = []  # stamps of the events with a token
        try:
            if response.status_code != 200:
                raise self._refusal(response, reported["retries"])
            for line in _lines(response):
                now = time.perf_counter() - start
                if now > self.timeout_s:
                    raise RequestError(f"the answer took more than {self.timeout_s:g} s (server.timeout_s)")
                if not line.startswith("data:"):
                    other = line.strip() or other
                    continue
                reported.setdefault("first_event_s", now)
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    ended = True
                    continue
                event = _json(data)
                if event.get("error") or "choices" not in event:
                    raise httpx2.RemoteProtocolError(self._message(data))
                usage = event.get("usage") or usage
                choice = next(iter(event["choices"] or []), {})
                delta, reason = choice.get("delta") or choice, choice.get("finish_reason")
                content = delta.get("content") or delta.get("text") or ""
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                ended |= reason is not None
                text, reasoning = text + content, reasoning + thought
                if content or thought or delta.get("tool_calls") or reason == "stop" or (reason and not tokens):
                    tokens.append(now)
                if content:
                    reported.setdefault("first_content_s", now)
            if not ended or not tokens:
                raise httpx2.RemoteProtocolError(self._message(other) or "without an end")
            number, later_s = usage.get("completion_tokens"), tokens[-1] - tokens[0]  # 0 if they came in one event
            request = ServerRequest(
                **{"first_content_s": None, **reported},
                end_s=time.perf_counter() - start,
                tpot_s=later_s / (number - 1) if number is not None and number > 1 and later_s > 0 else None,
                prompt_tokens=usage.get("prompt_tokens"),
                completion_tokens=number,
                cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            )
        except (httpx2.RequestError, AttributeError, TypeError) as error:  # of the connection, or no such events
            broken = f"the answer broke off after {time.perf_counter() - start:.1f} s"
            raise RequestError(f"{broken}: {str(error) or repr(error)}") from error
        return Completion(text, reasoning, tokens[0], tokens[-1], request)

    def _refusal(self, response: httpx2.Response, retries: int = 0) -> Exception:
        """The error for a response without an answer: UserError if every other request would get the same response."""
        message = f"HTTP {response.status_code}: {self._message(response.read().decode(errors='replace'))}"
        if advice := _ADVICE.get(response.status_code, ""):
            return UserError(f"{self.url}: {message}; {advice.format(**vars(self))}")
        return RequestError(f"{message} after {retries} retries" if retries else message)

    def _no_server(self, error: Exception) -> UserError:
        return UserError(
            f"no server answers at {self.url} ({error!r}): start it, then give the same command again; "
            "finished examples are safe"
        )

    def _message(self, text: str) -> str:
        """The server's error message on one line, without the key."""
        body = _json(text)
        error = body.get("error") or body.get("detail") or body.get("message") or text
        line = " ".join(str(error.get("message", error) if isinstance(error, dict) else error).split())
        return (line.replace(self._key, "***") if self._key else line)[:300]


def _lines(response: httpx2.Response) -> Iterator[str]:
    """The lines of a stream; `iter_lines` also ends one at U+2028 and the like, which an answer may hold."""
    rest = ""
    for text in response.iter_text():
        *lines, rest = (rest + text).split("\n")
        yield from lines
    yield rest


def _json(text: str) -> dict[str, Any]:
    """The JSON object of a text; {} if it holds none."""
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def describe(server: Server) -> Server:
    """Ask the server what it is. Raises UserError if it does not have the model; "" stands for the first it lists."""
    server = replace(server, url=server.url.rstrip("/"))
    listed = server.ask("GET", f"{server.url}/models").get("data")
    if not isinstance(listed, list):
        raise UserError(f"{server.url}/models lists no models: give a URL such as http://HOST:PORT/v1")
    models = tuple(str(entry.get("id")) for entry in listed)
    owners = [entry.get("owned_by") for entry in listed]
    if {"vllm", "lazyllm-bench"} & {*owners} and server.name not in ("", *models):  # others may answer for any name
        raise UserError(f"{server.url} has no model {server.name!r}: give one of {', '.join(models)}")
    kind = server.kind or next((name for name, it in KINDS.items() if it.owner in owners), None)
    if kind is None:  # transformers serve reports no owner
        paths = server.ask("GET", f"{server.root}/openapi.json").get("paths", {})
        kind = "transformers" if {"/load_model", "/v1/completions"} <= paths.keys() else "plain"
    page = server.ask("GET", f"{server.root}{KINDS[kind].page}") if KINDS[kind].page else {}
    entry = next((entry for entry in listed if server.name in ("", entry.get("id"))), {})
    version = page.get("version") or page.get("build_info") or entry.get("version")
    positions = (page.get("default_generation_settings") or {}).get("n_ctx") or entry.get("max_model_len")
    return replace(server, kind=kind, version=version, positions=positions, models=models)
