"""`lazyllm-bench serve` as OpenAI's client sees it, its sampler and texts against slow oracles, and its end."""

import math
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import openai
import pytest
import torch

from eval.serving.api import ChatRequest, CompletionRequest, Endpoint, RefusedError, TextSampler
from eval.serving.serve import listen
from lazyllm.errors import UserError
from lazyllm.methods import Baseline
from lazyllm.models.load import load_model
from lazyllm.models.tokenizers import load_tokenizer
from lazyllm.presets import PRESETS
from tests.eval.serving.in_thread import tiny_server

PROMPT = "entry zanur lantern copper. the old house was quiet. Question: entry zanur"
ANSWER = " lantern copper."
HELLO = [{"role": "user", "content": "lamp"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_server() as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def complete(client: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | fields)


def test_completion_tells_text_reason_usage_and_the_name_that_was_asked_for(client: Any, tiny: Any) -> None:
    tokens = len(tiny[1](PROMPT)["input_ids"])
    for name in ("tiny", "tiny/lazy", "tiny/baseline"):
        answer = complete(client, model=name)
        assert (answer.model, answer.object, answer.choices[0].text) == (name, "text_completion", ANSWER)
        assert answer.choices[0].finish_reason == "stop"
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (tokens, 4, tokens + 4)
    cut = complete(client, max_tokens=2)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)
    models = list(client.models.list())
    assert [model.id for model in models] == ["tiny", "tiny/lazy", "tiny/baseline"]
    assert [client.models.retrieve(model.id) for model in models] == models
    with pytest.raises(openai.NotFoundError, match="no model 'other'; there are tiny"):
        client.models.retrieve("other")


def test_sampling_is_as_asked(client: Any) -> None:
    def text(**fields: Any) -> str:
        return complete(client, max_tokens=16, **fields).choices[0].text

    assert text(temperature=2, seed=1) == text(temperature=2, seed=1) != text(temperature=2, seed=2)
    assert text(temperature=2, seed=1, top_p=1e-6) == text(temperature=0)
    assert text(temperature=1e-300, seed=1) == text(temperature=0)
    first = text(temperature=2)
    assert any(text(temperature=2) != first for _ in range(100))  # without a seed, each is another
    assert text(temperature=2, seed=1) == "".join(
        event.choices[0].text for event in complete(client, max_tokens=16, temperature=2, seed=1, stream=True)
    )


@pytest.mark.parametrize("stop", [["copper"], "copper", ["never", "copper", "per"]])
def test_stop_string_ends_the_answer_and_is_not_in_it(client: Any, stop: Any) -> None:
    for stream in (False, True):
        answer = complete(client, stop=stop, stream=stream)
        events = list(answer) if stream else [answer]
        assert "".join(event.choices[0].text for event in events) == ANSWER.partition("copper")[0]
        assert events[-1].choices[0].finish_reason == "stop"
        assert events[-1].usage.completion_tokens == 2


def test_stream_tells_usage_where_it_is_asked_to(client: Any) -> None:
    by_default = list(complete(client, stream=True))
    assert [event.choices[0].text for event in by_default] == [" lantern", " copper", ".", ""]
    assert [event.usage is not None for event in by_default] == [False, False, False, True]
    asked = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert [len(event.choices) for event in asked] == [1, 1, 1, 1, 0]
    assert [event.usage and event.usage.completion_tokens for event in asked] == [None] * 4 + [4]
    none = list(complete(client, stream=True, stream_options={"include_usage": False}))
    assert [event.usage for event in none] == [None] * 4
    assert len({event.id for event in asked}) == 1


def test_chat_without_a_template_has_a_line_for_each_message(client: Any, tiny: Any) -> None:
    context, _, question = PROMPT.partition(" Question")
    parts = [{"type": "text", "text": "Question"}, {"type": "text", "text": question}]
    messages: Any = [{"role": "system", "content": context}, {"role": "user", "content": parts}]
    chat = client.chat.completions.create
    answer = chat(model="tiny/lazy", messages=messages, temperature=0, max_completion_tokens=8)
    plain = complete(client, model="tiny/lazy", prompt=f"{context}\nQuestion{question}")
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", plain.choices[0].text)
    assert (answer.object, answer.model) == ("chat.completion", "tiny/lazy")
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert plain.choices[0].text.startswith(" lantern")
    stream = list(chat(model="tiny/lazy", messages=messages, temperature=0, max_tokens=8, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in stream) == message.content
    assert {event.object for event in stream} == {"chat.completion.chunk"}
    assert stream[-1].choices[0].finish_reason == answer.choices[0].finish_reason


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"prompt": "lamp " * 5000}, 400, "prompt", "4096 together"),
        ({"prompt": [1, 2]}, 400, "prompt", "valid string"),
        ({"prompt": None}, 400, "prompt", "got None"),
        ({"prompt": ""}, 400, "prompt", "at least 1"),
        ({"max_tokens": "x"}, 400, "max_tokens", "'x'"),
        ({"max_tokens": 0}, 400, "max_tokens", "got 0"),
        ({"max_tokens": True}, 400, "max_tokens", "got True"),
        ({"temperature": 3}, 400, "temperature", "got 3"),
        ({"top_p": 0}, 400, "top_p", "got 0"),
        ({"stop": [2]}, 400, "stop.0", "got 2"),
        ({"stop": [""]}, 400, "stop.0", "at least 1"),
        ({"n": 3}, 400, "n", "got 3"),
        ({"logprobs": 2}, 400, "logprobs", "got 2"),
        ({"echo": True}, 400, "echo", "got True"),
        ({"suffix": "x"}, 400, "suffix", "got 'x'"),
        ({"presence_penalty": 1}, 400, "presence_penalty", "got 1"),
        ({"logit_bias": {"1": 2}}, 400, "logit_bias", "got"),
        ({"stream_options": {"depth": 2}, "stream": True}, 400, "stream_options.depth", "unknown"),
        ({"stream_options": {"include_usage": True}, "stream": False}, 400, "stream_options", "stream=true"),
        ({"depth": 2}, 400, "depth", "unknown"),
        ({"model": "other"}, 404, "model", "tiny/lazy"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role", "got 'tool'"),
        ({"messages": [{"role": "assistant", "content": None}]}, 400, "messages.0.content", "got None"),
        ({"messages": [{"role": "assistant"}]}, 400, "messages.0.content", "required"),
        ({"messages": [{"role": "assistant", "content": "x", "name": "y"}]}, 400, "messages.0.name", "unknown"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, 400, "messages.0.tool_calls", "at"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools", "at most 0"),
        ({"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice", "got 'required'"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "response_format.type", "json_object"),
        ({"messages": HELLO, "modalities": ["text", "audio"]}, 400, "modalities.1", "got 'audio'"),
        ({"messages": HELLO, "reasoning_effort": "low"}, 400, "reasoning_effort", "should be 'none'"),
        ({"messages": HELLO, "store": True}, 400, "store", "got True"),
        ({"messages": HELLO, "metadata": {"a": "b"}}, 400, "metadata", "at most 0"),
        ({"top_k": 5}, 400, "top_k", "got 5"),
        ({"repetition_penalty": 1.1}, 400, "repetition_penalty", "got 1.1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": "lamp " * 5000}]}, 400, "messages", "4096 together"),
    ],
)
def test_what_is_not_honoured_is_refused_by_the_field_s_name(
    client: Any, url: str, stream: bool, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    path, prompt = ("chat/completions", {}) if "messages" in fields else ("completions", {"prompt": "lamp"})
    body = {"model": "tiny", "max_tokens": 2, "stream": stream} | prompt | fields
    refused = httpx2.post(f"{url}/{path}", json=body, timeout=60)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert len(error["message"]) < 200
    assert httpx2.post(f"{url}/completions", json={"prompt": "lamp", "max_tokens": 2}, timeout=60).status_code == 200
    with pytest.raises(openai.APIStatusError) as raised:
        client.post(f"/{path}", body=body, cast_to=object)
    assert (raised.value.param, message in raised.value.message) == (param, True)


def test_values_that_ask_for_nothing_change_nothing(client: Any) -> None:
    both: Any = {"logit_bias": {}, "n": 1, "user": "me"}
    both |= {"extra_body": {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "safety_identifier": "me"}}
    assert complete(client, **both, suffix="", best_of=1, echo=False).choices[0].text == ANSWER
    tools: Any = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": []}
    chat: Any = {"model": "tiny", "temperature": 0, "max_tokens": 4, "messages": list(HELLO)}
    plain = client.chat.completions.create(**chat)
    chat["messages"] += [plain.choices[0].message.model_dump(), {"role": "user", "content": "lamp"}]  # as an agent does
    chat |= {"response_format": {"type": "text"}, "modalities": ["text"], "top_logprobs": 0, **tools, **both}
    chat |= {"store": False, "metadata": {}, "service_tier": "auto", "verbosity": "medium", "reasoning_effort": "none"}
    again = client.chat.completions.create(**chat)
    assert again.usage.prompt_tokens > plain.usage.prompt_tokens


def test_other_pages_and_bodies_have_the_same_errors(url: str) -> None:
    half = b'{"messages": [{"role": "user", "content": "half a pair \\ud800"}]}'
    for refused in (
        httpx2.get(f"{url}/nothing"),
        httpx2.get(f"{url}/completions"),
        httpx2.post(f"{url}/completions", content=b'{"prompt"', headers={"Content-Type": "application/json"}),
        httpx2.post(f"{url}/completions", json=[1]),
        httpx2.post(f"{url}/chat/completions", content=half, headers={"Content-Type": "application/json"}),
    ):
        assert refused.status_code in (400, 404, 405)
        assert refused.headers.get("Allow") == ("POST" if refused.status_code == 405 else None)
        assert refused.json()["error"].keys() == {"message", "type", "param", "code"}
    text = httpx2.post(f"{url}/completions", content=b'{"prompt": "lamp"}', headers={"Content-Type": "text/plain"})
    assert text.json()["error"]["message"] == "the body is no JSON: expected Content-Type: application/json"


@pytest.mark.parametrize("part", ["sample", "__init__"])  # of a generation, and before it
def test_error_of_a_generation_has_its_status_and_the_server_lives(
    client: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(TextSampler, part, fail)
        for stream in (True, False):
            with pytest.raises(openai.InternalServerError, match="RuntimeError: no memory"):
                complete(client, stream=stream)
    assert complete(client).choices[0].text == ANSWER


def test_reader_that_goes_away_ends_its_generation(url: str, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []

    def read(self: TextSampler, sampled: list[float]) -> tuple[int, bool]:
        token, ended = original(self, sampled)
        tokens.append(token)
        time.sleep(0.01)
        return token, ended

    original = TextSampler.read
    monkeypatch.setattr(TextSampler, "read", read)
    body = {"prompt": "lamp", "max_tokens": 2000, "temperature": 2, "seed": 1, "stream": True}
    with httpx2.stream("POST", f"{url}/completions", json=body) as response:
        next(response.iter_lines())
    assert complete(client).choices[0].text == ANSWER  # waits for the other's end
    assert len(tokens) < 200


def test_thinking_template_takes_its_arguments_and_refuses_others(tiny: Any) -> None:
    model, tokenizer = tiny[0], load_tokenizer(PRESETS["tiny"].source)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if not enable_thinking %}<think></think>{% endif %}"
    )
    end = "<think></think>"
    fields = {"messages": [{"role": "user", "content": "lamp"}], "max_completion_tokens": 3, "max_tokens": 2}
    asked = ChatRequest.model_validate(fields)
    for args, last in (({}, end), ({"enable_thinking": True}, "")):
        asked.chat_template_kwargs = args
        ids, most = Endpoint(model, tokenizer, {"tiny": Baseline()}).prompt_of(asked)
        assert (tokenizer.decode(ids), most) == (f"{tokenizer.bos_token}[user]lamp{last}", 3)
    asked.chat_template_kwargs = {"tokenize": False}  # an argument of the tokenizer's method
    with pytest.raises(RefusedError, match=r"messages: .*tokenize"):
        Endpoint(model, tokenizer, {"tiny": Baseline()}).prompt_of(asked)


# ------------------------------------------------------------------------------------------------ against slow oracles


def sampler(tiny: Any, **fields: Any) -> tuple[TextSampler, list[str]]:
    told: list[str] = []
    asked = CompletionRequest(prompt="x", **fields)
    model, tokenizer = tiny
    return TextSampler(asked, model, tokenizer, told.append, lambda: False), told


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8), (1.0, 0.3)])
def test_draws_have_the_odds_of_temperature_and_top_p(tiny: Any, temperature: float, top_p: float) -> None:
    logits, draws = [2.0, 1.0, 0.5, -1.0, 1.5], 4000
    weights = [math.exp(value / temperature) for value in logits]
    odds, kept, total = [weight / sum(weights) for weight in weights], list[int](), 0.0
    for index in sorted(range(len(odds)), key=lambda index: -odds[index]):  # the fewest that reach top_p together
        if total < top_p:
            kept.append(index)
            total += odds[index]
    one, _ = sampler(tiny, temperature=temperature, top_p=top_p, seed=7)
    counts = Counter(int(one.sample(torch.tensor(logits))[1]) for _ in range(draws))
    assert counts.keys() <= {*kept}
    for index in kept:
        p = odds[index] / total
        assert abs(counts[index] - draws * p) <= 5 * math.sqrt(draws * p * (1 - p)) + 1e-9


def test_logits_that_are_not_finite_are_an_error(tiny: Any) -> None:
    for value in (math.nan, math.inf):
        one, _ = sampler(tiny, temperature=1)
        with pytest.raises(FloatingPointError):
            one.read(one.sample(torch.tensor([0.0, value])).tolist())


def expected_text(tokenizer: Any, token_ids: list[int], stop: list[str]) -> tuple[str, int]:
    """The text up to the first stop string, decoding all tokens anew after each, and how many tokens that took."""
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=True)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}") if text.endswith("\N{REPLACEMENT CHARACTER}") else text
        if found := [whole.find(word) for word in stop if word in whole]:
            return whole[: min(found)], count
    return tokenizer.decode(token_ids, skip_special_tokens=True), len(token_ids)


@pytest.mark.parametrize("seed", range(12))
def test_pieces_are_the_text_up_to_the_first_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    loaded: tuple[Any, Any] = load_model("tiny")
    model, tokenizer = loaded
    text = "né 漢字 🙂 the lamp, a lantern of copper.\n ab aab aaab"
    known = tokenizer(text, add_special_tokens=False)["input_ids"]
    for _ in range(20):
        ids = [rng.choice(known) if rng.random() < 0.7 else rng.randrange(len(tokenizer)) for _ in range(30)]
        ids = [token for token in ids if token not in (model.config.eos_token_id, tokenizer.eos_token_id)]
        ids = known + ids if rng.random() < 0.5 else ids
        stop = rng.sample(["aab", "ab", "copper.", "pp", "字", "\n", " a", "lamp, a lan"], rng.randrange(4))
        one, told = sampler(loaded, stop=stop)
        expected, count = expected_text(tokenizer, ids, stop)
        ends = [one.read([0.0, float(token)])[1] for token in ids[:count]]
        assert ends[:-1] == [False] * (count - 1)
        one.hand_on(is_last=True)
        assert "".join(told) == expected
        assert ends[-1] == (one.reason == "stop")
        assert "" not in told


# -------------------------------------------------------------------------------------------------------------- its end


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_requests_ends_it_without_a_traceback(end: signal.Signals) -> None:
    command = [sys.executable, "-m", "eval.cli", "serve", "model=tiny", "port=0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    url = next(line.partition(": ")[0] for line in server.stdout if line.startswith("http://"))
    body, waiting = {"prompt": "lamp", "max_tokens": 2000, "temperature": 2, "seed": 1}, list[str]()

    def ask(stream: bool) -> None:
        with suppress(httpx2.RequestError):  # the connection may be cut
            waiting.append(httpx2.post(f"{url}/completions", json=body | {"stream": stream}, timeout=60).text)

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    with httpx2.stream("POST", f"{url}/completions", json=body | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        server.send_signal(end)
        assert "the server is ending" in "".join(lines)
    said, _ = server.communicate(timeout=20)
    for thread in threads:
        thread.join(10)
    assert server.returncode in (0, -signal.SIGTERM)
    assert said == ""
    assert all("the server is ending" in text for text in waiting)


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", "taken"), ("127.0.0.1", "70000"), ("127.0.0.1", "1²"), ("", "0"), ("no such", "0")]
)
def test_address_that_cannot_be_listened_on_is_refused_before_weights_load(host: str, port: str) -> None:
    with listen("127.0.0.1", "0") as taken, pytest.raises(UserError, match=f"host={host}"):
        listen(host, port.replace("taken", str(taken.getsockname()[1])))
