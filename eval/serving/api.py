"""OpenAI's API around one model and its methods: completions and chat, streamed or not, one generation at a time.

A field that is not honoured is refused with status 400, never ignored.
Every error is OpenAI's object, {"error": {"message", "type", "param", "code"}}, in which `param` names the field.
Sampling is as asked: by default OpenAI's, temperature 1 and top_p 1. Nothing is taken from the model's own settings
but its end tokens. Equal requests with equal seeds get equal answers.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from starlette.exceptions import HTTPException
from torch import Tensor
from transformers import PreTrainedModel, TopPLogitsWarper

from eval.benchmarks.rows import is_text
from lazyllm import start
from lazyllm.engine.generation import Greedy, end_ids_of
from lazyllm.errors import reason_of
from lazyllm.machine import version_of
from lazyllm.methods import Method
from lazyllm.models.chat_template import render

log = logging.getLogger(__name__)


def _as_text(content: object) -> object:
    """The text of a message in parts; anything else as it is, to be refused."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


_Text = Annotated[str, Field(min_length=1)]
_Zero = Annotated[float, Field(ge=0, le=0)]
_One = Annotated[float, Field(ge=1, le=1)]
_Empty = Annotated[str, Field(max_length=0)]
_EmptyList = Annotated[list[Any], Field(max_length=0)]
_EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """A null is a field that was left out, as in OpenAI's API; one that must be given is refused with it."""
        if not isinstance(fields, dict):
            return fields
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in fields.items() if value is not None or name in required}


class StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ResponseFormat(_Fields):
    type: Literal["text"]


class Asked(_Fields):
    """The fields that both kinds of request have. Those of one value ask for nothing, and are refused with another."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[_Text], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""  # of no effect on an answer, as are the next two
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    n: Literal[1] = 1
    presence_penalty: _Zero = 0
    frequency_penalty: _Zero = 0
    logit_bias: _EmptyObject = {}
    top_k: Annotated[int, Field(ge=-1, le=0)] = 0  # this and the next two are other servers'
    min_p: _Zero = 0
    repetition_penalty: _One = 1

    @field_validator("stream_options")
    @classmethod
    def _only_in_streams(cls, options: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise ValueError("expected stream=true with it")
        return options


class CompletionRequest(Asked):
    prompt: _Text
    max_tokens: int = Field(16, ge=1)
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    logprobs: None = None
    suffix: _Empty = ""


class ChatMessage(_Fields):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_as_text)]
    tool_calls: _EmptyList = []
    annotations: _EmptyList = []


class ChatRequest(Asked):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] = False
    top_logprobs: _Zero = 0
    response_format: ResponseFormat = ResponseFormat(type="text")
    metadata: _EmptyObject = {}
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    modalities: list[Literal["text"]] = ["text"]
    verbosity: Literal["medium"] = "medium"
    reasoning_effort: Literal["none"] = "none"
    tools: _EmptyList = []
    functions: _EmptyList = []
    tool_choice: Literal["none", "auto"] = "auto"  # without tools, this and the next two choose nothing
    function_call: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class RefusedError(HTTPException):
    """An answer's error: its HTTP status, and the `param` and `code` of OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class End:
    """The end of an answer. usage: numbers of tokens, the end token included."""

    reason: Literal["stop", "length"]
    usage: Mapping[str, int]


class TextSampler(Greedy):
    """Chooses the tokens of a request, and hands on their text: each token's at once, unless its characters are
    incomplete or may begin a stop string. Stop strings and special tokens are not part of the text.

    put: called with each piece of the text. is_cancelled: whether to end with the next token. reason: why it ended.
    """

    reason: Literal["stop", "length"] = "length"

    def __init__(
        self,
        asked: Asked,
        model: PreTrainedModel,
        tokenizer: Any,
        put: Callable[[str], object],
        is_cancelled: Callable[[], bool],
    ) -> None:
        super().__init__(end_ids_of(model))
        self._asked, self._tokenizer, self._put, self._is_cancelled = asked, tokenizer, put, is_cancelled
        self._keep_top = TopPLogitsWarper(asked.top_p)
        self._random = torch.Generator(model.device)
        _ = self._random.seed() if asked.seed is None else self._random.manual_seed(asked.seed)
        self._token_ids: list[int] = []
        self._before = self._told = 0  # the text of the tokens before `_told` was taken, from `_before` on together
        self._held = ""  # what may begin a stop string

    def sample(self, logits: Tensor) -> Tensor:
        if self._asked.temperature == 0:
            return super().sample(logits)
        scores = logits.double()[None]  # so that no temperature is rounded to 0
        scores = (scores - scores.max()) / self._asked.temperature  # at most 0, so that none overflows
        no_ids: Any = None  # the rule reads no tokens
        odds = self._keep_top(no_ids, scores)[0].softmax(dim=0)
        # the winner of an exponential race is a draw; unlike torch.multinomial, NaN does not fail on the device
        token_id = (odds / torch.empty_like(odds).exponential_(generator=self._random)).argmax()
        return torch.stack([odds[token_id], token_id.double()])

    def read(self, sampled: list[float]) -> tuple[int, bool]:
        token_id, has_ended = super().read(sampled)
        if has_ended:
            self.reason = "stop"
        else:
            self._token_ids.append(token_id)
            self.hand_on()
        return token_id, self.reason == "stop" or self._is_cancelled()

    def hand_on(self, is_last: bool = False) -> None:
        """Hand on what can be; after the last token, all that was held.

        Tokens before the new ones are decoded too, as a text may begin otherwise than it goes on.
        """
        old, new = self._token_ids[self._before : self._told], self._token_ids[self._before :]
        before, text = (self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (old, new))
        if is_last or (len(text) > len(before) and not text.endswith("\N{REPLACEMENT CHARACTER}")):
            self._before, self._told = self._told, len(self._token_ids)
            self._held += text[len(before) :]
        held, stop = self._held, self._asked.stop
        found = [at for at in map(held.find, stop) if at >= 0]
        begun = [n for word in stop for n in range(1, len(word)) if held.endswith(word[:n])]
        until = min(found) if found else len(held) - (0 if is_last else max(begun, default=0))
        if found:
            self.reason = "stop"
        if until:
            self._put(held[:until])
        self._held = held[until:]


@dataclass(frozen=True)
class Endpoint:
    """A model, its tokenizer, and the methods that requests choose by name; the first is for those that name none.

    is_ending: set when the process shall end: answers in progress and waiting ones are refused at the next token.
    """

    model: PreTrainedModel
    tokenizer: Any
    methods: Mapping[str, Method]
    is_ending: threading.Event = field(default_factory=threading.Event)
    _one_at_a_time: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def positions(self) -> int:
        return self.model.config.max_position_embeddings

    def name_of(self, name: str | None) -> str:
        """The model's name; of the first if None is given. Raises RefusedError."""
        name = next(iter(self.methods)) if name is None else name
        if name not in self.methods:
            there = ", ".join(self.methods)
            raise RefusedError(404, f"model: no model {name!r:.80}; there are {there}", "model", "model_not_found")
        return name

    def prompt_of(self, asked: CompletionRequest | ChatRequest) -> tuple[list[int], int]:
        """The prompt's tokens, and the most new ones. Raises RefusedError for a prompt that cannot be."""
        if isinstance(asked, CompletionRequest):
            param, text, most, is_rendered = "prompt", asked.prompt, asked.max_tokens, False
        else:
            param, text, most = "messages", self._chat_text(asked), asked.max_completion_tokens or asked.max_tokens
            is_rendered = bool(self.tokenizer.chat_template)
        if not is_text(text):
            raise RefusedError(400, f"{param}: half a surrogate pair, which no tokenizer takes", param)
        ids = self.tokenizer(text, add_special_tokens=not is_rendered, verbose=False)["input_ids"]
        most = most or max(1, self.positions - len(ids))
        if not ids or len(ids) + most > self.positions:
            said = f"{param}: {len(ids)} tokens and {most} new ones; expected 1 or more, and {self.positions} together"
            raise RefusedError(400, said, param, "context_length_exceeded" if ids else None)
        return ids, most

    def _chat_text(self, asked: ChatRequest) -> str:
        """The messages in the chat template; without one, a line each, before the answer's line."""
        messages = [{"role": message.role, "content": message.content} for message in asked.messages]
        if not self.tokenizer.chat_template:
            return "\n".join(message["content"] for message in messages)
        try:
            return render(self.tokenizer, messages, asked.chat_template_kwargs)
        except (TypeError, ValueError) as error:  # of arguments that are not the template's, or what it refuses
            raise RefusedError(400, f"messages: {error}", "messages") from error

    async def answer(self, asked: CompletionRequest | ChatRequest) -> AsyncGenerator[str | End]:
        """The answer's text in pieces, then its end. A reader that leaves ends the generation. Raises RefusedError."""
        loop, told, is_left = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

        def is_cancelled() -> bool:
            return is_left.is_set() or self.is_ending.is_set()

        def work(sampler: TextSampler) -> End | None:
            """None if it was cancelled."""
            if is_cancelled():
                return None
            with start(self.model, ids, method) as conversation:
                tokens = len(conversation.answer_with(sampler, max_new_tokens=most).token_ids)
            if self.is_ending.is_set():
                return None
            sampler.hand_on(is_last=True)
            usage = {"prompt_tokens": len(ids), "completion_tokens": tokens, "total_tokens": len(ids) + tokens}
            return End(sampler.reason, usage)

        try:
            method, (ids, most) = self.methods[self.name_of(asked.model)], self.prompt_of(asked)
            put = partial(loop.call_soon_threadsafe, told.put_nowait)
            sampler = TextSampler(asked, self.model, self.tokenizer, put, is_cancelled)
            end = loop.run_in_executor(self._one_at_a_time, work, sampler)
            end.add_done_callback(told.put_nowait)  # behind the last piece
            while (piece := await told.get()) is not end:
                yield piece
            if (ended := end.result()) is None:
                raise RefusedError(503, "the server is ending")
            yield ended
        except RefusedError:
            raise
        except ValueError as error:  # of a method that cannot take this prompt
            raise RefusedError(400, str(error)) from error
        except Exception as error:
            log.exception("a request failed")
            raise RefusedError(500, reason_of(error)) from error
        finally:
            is_left.set()


def make_app(endpoint: Endpoint) -> FastAPI:
    """The ASGI app."""
    app = FastAPI(title="lazyllm-bench serve", version=version_of("lazyllm-bench"))

    @app.post("/v1/completions", response_model=None)
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        return await _respond(endpoint, asked, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await _respond(endpoint, asked, request)

    about = {"object": "model", "created": 0, "owned_by": "lazyllm-bench", "version": version_of("lazyllm-bench")}
    entries = {name: {"id": name, **about, "max_model_len": endpoint.positions} for name in endpoint.methods}

    @app.get("/health")
    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [*entries.values()]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        return entries[endpoint.name_of(name)]

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        named = error
        if not isinstance(named, RefusedError):  # FastAPI's, of a page that is not there
            named = RefusedError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(named.body, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # an unknown field explains others: a message with tool_calls may lack its content
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        where, said, code = ".".join(map(str, first["loc"][1:])), first["msg"].removeprefix("Value error, "), None
        if isinstance(error.body, bytes):  # FastAPI parses by the header alone
            said = "the body is no JSON: expected Content-Type: application/json"
        elif first["type"] == "json_invalid":
            where, said = "", f"the body is no JSON: {first['ctx']['error']}"
        elif first["type"] == "extra_forbidden":
            said, code = f"{where}: an unknown field", "unknown_parameter"
        else:
            given = "" if first["type"] == "missing" else f", got {first['input']!r:.80}"
            said = f"{where or 'body'}: {said}{given}"
        return await refused(request, RefusedError(400, said, where or None, code))

    return app


async def _respond(endpoint: Endpoint, asked: CompletionRequest | ChatRequest, request: Request) -> Response:
    is_chat = isinstance(asked, ChatRequest)
    kind = ("chat.completion.chunk" if asked.stream else "chat.completion") if is_chat else "text_completion"
    about = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}", "object": kind, "created": int(time.time())}
    about["model"] = endpoint.name_of(asked.model)

    def told(said: Mapping[str, str], reason: str | None = None, **more: Any) -> dict[str, Any]:
        """The answer, or an event of its stream."""
        part = {"delta" if asked.stream else "message": said} if is_chat else {"text": said.get("content", "")}
        return {**about, "choices": [{"index": 0, **part, "logprobs": None, "finish_reason": reason}], **more}

    async def lines(piece: str | End) -> AsyncGenerator[str]:
        """Of a stream. Its last choice has the usage too, unless `stream_options` says where to tell it."""
        options = asked.stream_options
        try:
            async with aclosing(answer):
                if is_chat:
                    yield _line(told({"role": "assistant", "content": ""}))
                while not isinstance(piece, End):
                    yield _line(told({"content": piece}))
                    piece = await anext(answer)
            yield _line(told({}, piece.reason, **({} if options else {"usage": piece.usage})))
            if options and options.include_usage:
                yield _line(told({}, choices=[], usage=piece.usage))
            yield "data: [DONE]\n\n"
        except RefusedError as error:  # the status has been sent
            yield _line(error.body)

    answer, text = endpoint.answer(asked), ""
    piece = await anext(answer)  # an error before it gets its own status
    if asked.stream:
        return StreamingResponse(lines(piece), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    async with aclosing(answer):
        while not isinstance(piece, End):
            if await request.is_disconnected():
                return Response(status_code=499)
            text, piece = text + piece, await anext(answer)
    return JSONResponse(told({"role": "assistant", "content": text}, piece.reason, usage=piece.usage))


def _line(event: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"
