"""The client against a server that follows a script: what it reads, when, and what it tries again."""

from typing import Any

import pytest

from eval.serving import client
from eval.serving.client import Completion, RequestError, Server, describe
from lazyllm.errors import UserError
from tests.eval.serving.scripted import DONE, Reply, Seen, chat, event, scripted, usage

MODEL = {"id": "m", "owned_by": "vllm", "max_model_len": 512}
FINE = Reply([event("Yes"), event(".", "stop"), usage(7, 3), DONE])
EMPTY = b': ping\n\ndata: {"choices": null}\n\n'
HALF = event("Yés").find("é".encode("unicode-escape")[:1]) + 3


def asked(*replies: Reply, api: str = "completions", timeout_s: float = 20.0) -> tuple[Completion, Seen]:
    """The answer of a server that gives these replies one after the other."""
    server = scripted(lambda number, _: replies[number], MODEL)
    with server as (url, seen):
        return Server(url, "m", api=api, timeout_s=timeout_s).answer(b'{"stream": true}'), seen


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("api", "parts", "text", "reasoning", "counts"),
    [
        ("completions", [event("a"), event("b"), event("", "stop"), usage(5, 3, cached=0), DONE], "ab", "", (5, 3, 0)),
        ("completions", [EMPTY, event("two words", "length", error=None)], "two words", "", (None, None, None)),
        ("completions", [event("Yés")[:HALF], event("Yés")[HALF:], event("", "stop")], "Yés", "", (None, None, None)),
        ("completions", ['data: {"choices": [{"text": "Y\u2028é\x85", "finish_reason": "stop"}]}\r\n\r\n'.encode()],
         "Y\u2028é\x85", "", (None, None, None)),
        ("completions", [event(finish="stop"), DONE], "", "", (None, None, None)),  # the only token is the end token
        ("completions", [event(finish="length"), DONE], "", "", (None, None, None)),  # or a part of a letter
        ("chat", [chat(role="assistant", content=""), chat(content="a"), chat("stop"), DONE], "a", "", (None,) * 3),
        ("chat", [chat(reasoning_content="hm"), chat(content="a"), chat("stop")], "a", "hm", (None, None, None)),
        ("chat", [chat(reasoning="hm"), chat("length")], "", "hm", (None, None, None)),
        ("chat", [chat(tool_calls=[{"index": 0}]), chat("tool_calls")], "", "", (None, None, None)),
    ],
)  # fmt: skip
def test_stream_has_text_and_counts(api: str, parts: list[bytes], text: str, reasoning: str, counts: tuple) -> None:
    answer, seen = asked(Reply(parts), api=api)
    assert (answer.text, answer.reasoning) == (text, reasoning)
    assert (answer.request.prompt_tokens, answer.request.completion_tokens, answer.request.cached_tokens) == counts
    assert seen.posts[0][0] == ("/v1/chat/completions" if api == "chat" else "/v1/completions")


def test_stamps_are_of_tokens_and_lie_between_those_of_the_server() -> None:
    parts = [chat(role="assistant", content=""), 0.06, chat(reasoning_content="hm"), 0.06, chat(content="a")]
    answer, seen = asked(Reply([*parts, 0.06, chat(content="b"), chat("stop"), 0.06, DONE]), api="chat")
    role, thought, content, _, end, done = (stamp - seen.received for stamp in seen.sent)
    request = answer.request
    stamps = [request.headers_s, request.first_event_s, answer.ttft_s, request.first_content_s, answer.last_token_s]
    assert stamps == sorted(stamps)
    assert answer.last_token_s < request.end_s
    # the client's clock starts before the server's, and it cannot see what is not sent yet
    for stamp, sent in zip([*stamps[1:], request.end_s], [role, thought, content, end, done], strict=True):
        assert stamp is not None
        assert stamp >= sent


def test_connection_is_open_before_the_clock_starts() -> None:
    _, seen = asked(FINE)
    assert [kind for kind, _ in seen.connections] == ["GET", "POST"]
    assert len({port for _, port in seen.connections}) == 1


@pytest.mark.parametrize(
    ("failures", "retries"),
    [
        ([Reply(status=429, headers={"Retry-After": "0"}), Reply(status=500), Reply(status=503)], 3),
        ([Reply(status=0)], 1),  # it closes the connection without a word
        ([], 0),
    ],
)
def test_request_is_sent_again_before_the_first_byte(failures: list[Reply], retries: int) -> None:
    answer, seen = asked(*failures, FINE)
    assert (answer.text, answer.request.retries, len(seen.posts)) == ("Yes.", retries, 1 + retries)


@pytest.mark.parametrize(
    ("replies", "posts", "message"),
    [
        ([Reply([event("Yes")], broken=True)], 1, "the answer broke off after"),
        ([Reply([event("Yes")])], 1, "without an end"),
        ([Reply([b'{"error": {"message": "no adapter"}}'])], 1, "no adapter"),  # in place of a stream
        ([Reply([b'data: {"choices": [{"text": 3}]}\n\n'])], 1, "the answer broke off after"),
        ([Reply([event("Yes", "stop"), b'data: {"choices": [], "usage": {"completion_tokens": "2"}}'])], 1, "not supp"),
        ([Reply([event("Yes"), b'data: {"error": {"message": "out of memory"}}\n\n'])], 1, "out of memory"),
        ([Reply([b'data: {"error": "bad "quotes""}\n\n'])], 1, 'bad "quotes"'),
        ([Reply([b"no gzip"], headers={"Content-Encoding": "gzip"})], 1, "the answer broke off after .* header"),
        ([Reply([1.5, event("Yes", "stop")])], 1, r"no answer within 0.5 s \(server.timeout_s\)"),
        ([Reply([event("Yes"), *[0.2, event("!")] * 4, event("", "stop")])], 1, "more than 0.5 s"),
        ([Reply([b'{"message": "too long"}'], 400)], 1, "HTTP 400: too long"),
        ([Reply([b'{"error": {"message": "busy"}}'], 503)] * 4, 4, "HTTP 503: busy after 3 retries"),
    ],
)
def test_request_fails_and_is_not_sent_again_after_the_first_byte(
    replies: list[Reply], posts: int, message: str
) -> None:
    with scripted(lambda number, _: replies[number], MODEL) as (url, seen):
        with pytest.raises(RequestError, match=message):
            Server(url, "m", timeout_s=0.5).answer(b"{}")
        assert len(seen.posts) == posts


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply([b'{"error": {"message": "%s sk-secret"}}' % (b"x" * 291)], 401), r"HTTP 401: x+ \*\*\*; the key is"),
        (Reply([b'{"detail": "no such model"}'], 404), "HTTP 404: no such model; expected a server with"),
        (Reply([b'{"detail": "extra field"}'], 422), "HTTP 422: extra field; the server refuses a field"),
        (Reply(status=0), "no server answers at"),
    ],
)
def test_server_that_would_refuse_all_is_named_in_one_line(reply: Reply, message: str, monkeypatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-secret\n")  # as read from a file
    with (
        scripted(lambda *_: reply, MODEL) as (url, seen),
        pytest.raises(UserError, match=message) as error,
    ):
        Server(url, "m", api_key_env="A_KEY").answer(b"{}")
    assert "sk-" not in str(error.value)
    assert "\n" not in str(error.value)
    assert seen.keys == {"Bearer sk-secret"}
    monkeypatch.setenv("A_KEY", "sk-sécret\n!")
    with pytest.raises(UserError, match=r"the key in A_KEY \(server.api_key_env\) has characters"):
        Server(url, "m", api_key_env="A_KEY").answer(b"{}")


@pytest.mark.parametrize(
    ("entry", "kind", "positions"),
    [
        ({"id": "m", "owned_by": "vllm", "max_model_len": 512}, "vllm", 512),
        ({"id": "m", "owned_by": "sglang"}, "sglang", None),
        ({"id": "m", "owned_by": "lazyllm-bench", "max_model_len": 64}, "transformers", 64),
        ({"id": "m", "owned_by": "someone"}, "plain", None),
    ],
)
def test_server_is_known_by_what_it_says(entry: dict[str, Any], kind: str, positions: int | None) -> None:
    with scripted(lambda *_: FINE, entry) as (url, _):
        server = describe(Server(url, "m"))
        assert (server.kind, server.positions, server.models) == (kind, positions, ("m",))
        assert describe(Server(url, "m", "plain")).kind == "plain"
        if kind in ("vllm", "transformers"):
            with pytest.raises(UserError, match="has no model 'other': give one of m"):
                describe(Server(url, "other"))


def test_server_that_is_gone_is_told_of_before_the_retries(caplog: pytest.LogCaptureFixture) -> None:
    with scripted(lambda *_: Reply(status=0), MODEL) as (url, _), pytest.raises(UserError, match="no server answers"):
        Server(url, "m").answer(b"{}")
    assert [record.getMessage() for record in caplog.records] == [f"no server answers at {url}: trying again for 0 s"]
