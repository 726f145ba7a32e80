"""A client of servers with OpenAI's API: one connection, one streamed and timed request at a time.

The clock starts just before the POST of a body that is already serialised, on a connection that is already open. An
event counts as a token if it has text, reasoning or a tool call; comments, roles and usage do not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NoReturn

import httpx2

from eval.store.record import Request
from lazyllm.errors import UserError

CONNECT_S = 10.0
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # before each retry; a longer Retry-After of the server counts
_RETRIED = (429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Endpoint:
    """A model of a server.

    url: with the path, such as http://127.0.0.1:8000/v1. model: its name there. api: "completions" or "chat".
    extra_body: further fields of every request. key_env: the environment variable that holds the key, if there is one.
    timeout_s: the limit for a whole answer.
    """

    url: str
    model: str
    api: str = "completions"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    key_env: str = "OPENAI_API_KEY"
    timeout_s: float = 600.0

    @property
    def root(self) -> str:
        """The URL without its version, where servers have their own paths."""
        return self.url.removesuffix("/v1")


@dataclass(frozen=True)
class Answer:
    """One answer. Times are seconds since just before the POST.

    text, reasoning: all of it. ttft_s, last_token_s: the first and the last event with a token; an end token is one.
    """

    text: str
    reasoning: str
    ttft_s: float
    last_token_s: float
    request: Request


class RequestError(Exception):
    """A request that failed, in a line for people. Others may not fail."""


class _NotYetError(Exception):
    """No answer has begun, so the request may be sent again. final: the error if all retries fail."""

    def __init__(self, final: Exception, after_s: float = 0.0) -> None:
        super().__init__(str(final))
        self.final, self.after_s = final, after_s


class Client:
    """A connection to an endpoint. The key is in its headers only, never in a message."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._key = os.environ.get(endpoint.key_env, "")
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx2.Timeout(endpoint.timeout_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=1),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """What the server says of its models. Raises UserError, without a retry, if it cannot be asked."""
        listed = (self.get(f"{self.endpoint.url}/models") or {}).get("data")
        if not isinstance(listed, list):
            raise UserError(f"{self.endpoint.url}/models lists no models: give a URL such as http://HOST:PORT/v1")
        return listed

    def get(self, url: str) -> Any:
        """The JSON of a page; None if there is none. Raises UserError."""
        response = self._send("GET", url)
        if response.status_code in (401, 403):
            self._refuse(response)
        return _json(response.text) if response.status_code == 200 else None

    def post(self, url: str) -> None:
        """Post nothing. Raises UserError if it is not accepted."""
        if (response := self._send("POST", url)).status_code != 200:
            raise UserError(f"{url}: HTTP {response.status_code}: {self._message(response.text)}")

    def _send(self, method: str, url: str) -> httpx2.Response:
        try:
            return self._http.request(method, url)
        except httpx2.TransportError as error:
            raise self._no_server(error) from error

    def answer(self, body: bytes) -> Answer:
        """The answer to a request for a stream. Retries only before the first byte of an answer.

        Raises RequestError; UserError if all other requests would fail too.
        """
        path = "chat/completions" if self.endpoint.api == "chat" else "completions"
        headers = {"Content-Type": "application/json"}
        request = self._http.build_request("POST", f"{self.endpoint.url}/{path}", content=body, headers=headers)
        for retries, pause in enumerate((*PAUSES_S, None)):
            try:
                return self._answer(request, retries)
            except _NotYetError as error:
                if pause is None:
                    raise error.final from error
                time.sleep(max(pause, error.after_s))
        raise AssertionError

    def _answer(self, request: httpx2.Request, retries: int) -> Answer:
        try:
            self._http.get(f"{self.endpoint.url}/models")  # opens the connection
            sent_at, start = time.time(), time.perf_counter()
            response = self._http.send(request, stream=True)
        except httpx2.ReadTimeout as error:
            raise RequestError(f"no answer within {self.endpoint.timeout_s:g} s (model.timeout_s)") from error
        except httpx2.TransportError as error:
            raise _NotYetError(self._no_server(error)) from error

        def clock() -> float:
            return time.perf_counter() - start

        about = {"headers_s": clock(), "sent_at": sent_at, "retries": retries}
        with closing(response):
            try:
                if response.status_code != 200:
                    response.read()
                    self._refuse(response)
                return self._read(response.iter_lines(), clock, about)
            except httpx2.TransportError as error:
                raise RequestError(f"the answer broke off after {clock():.1f} s ({_reason(error)})") from error

    def _read(self, lines: Iterator[str], clock: Callable[[], float], about: dict[str, Any]) -> Answer:
        """The answer of a stream, in which each event is one line of data. about: what is known of the request."""
        text, reasoning, usage, ended = "", "", {}, False
        events: list[float] = []  # stamps: of all events, of those with a token, of those with text
        tokens: list[float] = []
        contents: list[float] = []
        for line in lines:
            now = clock()
            if now > self.endpoint.timeout_s:
                raise RequestError(f"the answer took more than {self.endpoint.timeout_s:g} s (model.timeout_s)")
            if not line.startswith("data:"):
                continue
            events.append(now)
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                ended = True
                continue
            event = _json(data)
            if "error" in event or "choices" not in event:
                raise RequestError(f"the answer broke off after {now:.1f} s: {self._message(data)}")
            usage = event.get("usage") or usage
            choice = next(iter(event["choices"]), {})
            delta = choice.get("delta") or choice
            content = delta.get("content") or delta.get("text") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            reason = choice.get("finish_reason")
            ended |= reason is not None
            text, reasoning = text + content, reasoning + thought
            if content or thought or delta.get("tool_calls") or reason == "stop":  # an end token has no text
                tokens.append(now)
            if content:
                contents.append(now)
        if not ended or not tokens:
            raise RequestError(f"the answer broke off after {clock():.1f} s, without an end")
        count, later_s = usage.get("completion_tokens"), tokens[-1] - tokens[0]  # 0 if all tokens came in one event
        request = Request(
            **about,
            first_event_s=events[0],
            first_content_s=contents[0] if contents else None,
            end_s=clock(),
            tpot_s=later_s / (count - 1) if count is not None and count > 1 and later_s > 0 else None,
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=count,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )
        return Answer(text, reasoning, tokens[0], tokens[-1], request)

    def _refuse(self, response: httpx2.Response) -> NoReturn:
        """Raise the error of a response that is no answer."""
        endpoint, code = self.endpoint, response.status_code
        said = f"HTTP {code}: {self._message(response.text)}"
        if code in _RETRIED:
            after = response.headers.get("Retry-After", "")
            raise _NotYetError(
                RequestError(f"{said} after {len(PAUSES_S)} retries"), float(after) if after.isdigit() else 0
            )
        key = f"the key is read from the environment variable {endpoint.key_env} (model.key_env)"
        advice = {
            401: key,
            403: key,
            404: f"expected a server with /v1/{endpoint.api} (model.api) and a model {endpoint.model!r}",
            422: "the server refuses a field of the request: give its model.kind, or change extra_body",
        }
        if code in advice:
            raise UserError(f"{endpoint.url}: {said}; {advice[code]}")
        raise RequestError(said)

    def _no_server(self, error: Exception) -> UserError:
        return UserError(
            f"no server answers at {self.endpoint.url} ({_reason(error)}): start it, then give the same command again; "
            "finished examples are safe"
        )

    def _message(self, text: str) -> str:
        """What a server says of an error, in one line, without the key."""
        said = _json(text)
        error = said.get("error") or said.get("detail") or said.get("message") or text
        message = error.get("message", error) if isinstance(error, dict) else error
        line = " ".join(str(message).split())[:300]
        return line.replace(self._key, "***") if self._key else line


def _json(text: str) -> dict[str, Any]:
    """The JSON object of a text; {} if it holds none."""
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
