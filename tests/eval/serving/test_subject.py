"""Runs on servers: one that follows a script, and `lazyllm-bench serve` around the tiny model."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.run.asked import Asked
from eval.run.run import prepare
from eval.serving import client
from eval.store.folder import read_visits
from eval.store.results import Results
from eval.store.visit import Visit
from lazyllm.engine.generation import Conversation
from lazyllm.errors import UserError
from lazyllm.models.tokenizers import load_tokenizer
from lazyllm.presets import PRESETS
from tests.eval.serving.in_thread import tiny_server
from tests.eval.serving.scripted import DONE, Reply, Seen, chat, event, scripted, usage
from tests.eval.store.visits import flattened
from tests.runs import measure, run_of

TINY = load_tokenizer(PRESETS["tiny"].source)
Script = Callable[[int, dict[str, Any]], Reply]


def entry(owner: str) -> dict[str, Any]:
    return {"id": "m", "owned_by": owner, "max_model_len": 4096}


def tokens(body: dict[str, Any]) -> int:
    """The prompt's tokens, as a server with the tiny model's tokenizer counts them."""
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(TINY(prompt)["input_ids"])


def yes(_: int, body: dict[str, Any]) -> Reply:
    return Reply([event("Yes"), event(" no"), event("", "stop"), usage(tokens(body), 3, cached=0), DONE])


def said(text: str) -> Reply:
    """An answer of a chat."""
    return Reply([chat(role="assistant", content=""), chat(content=text), chat("stop"), DONE])


def served(url: str, out: Path | None, *overrides: str) -> Asked:
    fixed = ("model=server", f"server.url={url}", "model.name=m", "model.tokenizer=tiny", "dataset=lookup", "limit=3")
    return run_of(*fixed, "warmup=0", *([f"out={out}"] if out is not None else []), *overrides)


def run(url: str, out: Path, *overrides: str) -> list[Any]:
    measure(served(url, out, *overrides), show=False)
    return [*map(flattened, read_visits(out))]


def measured(visits: list[Visit], label: str = "baseline") -> list[Any]:
    """An arm's first answers."""
    return [visit.answers[label][0] for visit in visits if label in visit.answers]


def on(script: Script, out: Path, *overrides: str, owner: str = "vllm") -> tuple[list[Visit], Seen]:
    """The visits of a run on a server of this kind that follows the script, and what the server saw."""
    with scripted(script, entry(owner)) as (url, seen):
        return run(url, out, *overrides), seen


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0.0, 0.0))


def test_visit_holds_what_a_server_tells_and_null_for_the_rest(tmp_path: Path) -> None:
    arms = "compare={half: {name: server, extra_body: {depth: 2}}, deep: {name: server, extra_body: {depth: 9}}}"
    visits, seen = on(yes, tmp_path / "run", arms, "server.extra_body={top: 1}")
    assert len(visits) == 3
    for visit in visits:
        assert list(visit.answers) == ["baseline", "half", "deep"]
        for (side,) in visit.answers.values():
            request = side.request
            assert (side.text, side.token_ids, side.computed, side.kv_bytes, side.kl) == ("Yes no", *[None] * 4)
            assert (request.prompt_tokens, request.completion_tokens) == (visit.turns[0].tokens, 3)
            assert request.cached_tokens == 0
            assert 0 < request.headers_s <= request.first_event_s <= side.ttft_s <= side.total_s <= request.end_s
            assert request.tpot_s == pytest.approx((side.total_s - side.ttft_s) / 2)
        assert visit.answers["half"][0].same_answer == 1
        assert visit.answers["baseline"][0].same_answer is None
    assert sorted(body.get("depth", 0) for _, body in seen.posts) == [0] * 3 + [2] * 3 + [9] * 3
    assert {body["top"] for _, body in seen.posts} == {1}
    frame = Results.read([tmp_path]).frame
    assert set(frame["generated_tokens"]) == {3}
    assert set(frame["arm"]) == {"baseline", "half", "deep"}
    half = frame[frame["arm"] == "half"]
    assert half["step_s"].tolist() == [one.request.tpot_s for one in measured(visits, "half")]
    about = json.loads((tmp_path / "run" / "run.json").read_text())["identity"]["arms"]
    assert {label: arm["server"]["kind"] for label, arm in about.items()} == dict.fromkeys(about, "vllm")


@pytest.mark.parametrize(
    ("owner", "sent", "not_sent"),
    [
        ("vllm", {"temperature": 0, "top_k": 0, "stream_options": {"include_usage": True}}, {"cache_prompt"}),
        ("lazyllm-bench", {"top_p": 1}, {"stream_options", "cache_salt", "top_k", "presence_penalty"}),
        ("llamacpp", {"cache_prompt": False, "repeat_penalty": 1}, {"cache_salt", "repetition_penalty"}),
        ("someone", {"frequency_penalty": 0, "seed": 0}, {"top_k", "cache_salt", "cache_prompt"}),
    ],
)
def test_requests_are_greedy_cold_and_have_no_field_that_the_server_refuses(
    tmp_path: Path, owner: str, sent: dict[str, Any], not_sent: set[str]
) -> None:
    records, seen = on(yes, tmp_path / "run", owner=owner)
    texts = prompt_texts()
    bodies = [body for _, body in seen.posts]
    noise = [one.request.noise for one in measured(records)]
    assert all(body.items() >= sent.items() and not body.keys() & not_sent for body in bodies)
    prompts = [TINY.decode(body["prompt"]) if owner == "vllm" else body["prompt"] for body in bodies]
    if owner == "someone":  # each prompt has its own line before it, and the record tells which
        assert len(set(noise)) == 3
        assert prompts == [f"{line}{text}" for line, text in zip(noise, texts, strict=True)]
    else:
        assert noise == [None] * 3
        assert [TINY(text)["input_ids"] for text in texts] == [
            body["prompt"] if owner == "vllm" else TINY(body["prompt"])["input_ids"] for body in bodies
        ]
    salts = [body.get("cache_salt") for body in bodies]
    assert len(set(salts)) == (3 if owner == "vllm" else 1)


def prompt_texts() -> list[str]:
    """The prompts of the same run in this process."""
    return [case.prompt.text for case in prepare(run_of("dataset=lookup", "limit=3")).cases]


def test_warm_prompt_is_asked_twice_and_chat_has_its_messages(tmp_path: Path) -> None:
    def answer(number: int, body: dict[str, Any]) -> Reply:
        assert body["messages"][0] == {"role": "system", "content": "Be brief"}
        return said(str(number))

    settings = ("server.api=chat", "server.cache=warm", "model.system=Be brief")
    records, seen = on(answer, tmp_path / "run", *settings)
    assert [one.text for one in measured(records)] == ["1", "3", "5"]
    bodies = [body for _, body in seen.posts]
    assert bodies[0::2] == bodies[1::2]
    assert [body["messages"][1]["content"] for body in bodies[::2]] == prompt_texts()


@pytest.mark.parametrize(
    ("setting", "times"), [("server.cache=cold", 1), ("server.cache=warm", 2), ("server.api=chat", 1)]
)
def test_later_turn_asks_the_conversation_with_the_servers_own_answers(
    tmp_path: Path, setting: str, times: int
) -> None:
    def answer(number: int, body: dict[str, Any]) -> Reply:
        return said("Yes no") if "messages" in body else yes(number, body)

    records, seen = on(answer, tmp_path / "run", "turns=2", setting, owner="lazyllm-bench")
    bodies = [body for _, body in seen.posts]
    assert len(bodies) == 2 * 3 * times
    expected = []
    for case in prepare(run_of("dataset=lookup", "limit=3", "turns=2")).cases:
        (turn,) = case.prompt.turns
        expected += [[case.prompt.text], [case.prompt.text, "Yes no", turn.text]]
    for body, texts in zip(bodies[::times], expected, strict=True):
        if "messages" in body:
            roles = ("user", "assistant", "user")
            asked = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            assert body["messages"] == asked
        else:
            assert TINY(body["prompt"])["input_ids"] == TINY("".join(texts))["input_ids"]
    for visit in records:
        first, later = visit.answers["baseline"]
        assert later.total_s_so_far == pytest.approx(first.total_s + later.total_s)


def test_answer_that_breaks_off_is_a_failure_and_the_same_command_goes_on(tmp_path: Path) -> None:
    def broken(number: int, body: dict[str, Any]) -> Reply:
        return Reply([event("Ye")], broken=True) if number == 1 else yes(number, body)

    with scripted(broken, entry("vllm")) as (url, seen):
        first = run(url, tmp_path / "run")
        assert [len(visit.answers) for visit in first] == [1, 0, 1]
        assert "the answer broke off after" in first[1].failures["baseline"].reason
        visits = run(url, tmp_path / "run")
        assert (len(measured(visits)), len(visits), len(seen.posts)) == (3, 4, 4)


@pytest.mark.parametrize(("load", "done", "posts"), [("load.concurrency=1", 1, 4), ("load.concurrency=2", 0, 7)])
def test_server_that_has_gone_ends_the_run_and_the_same_command_goes_on(
    tmp_path: Path, load: str, done: int, posts: int
) -> None:
    gone = threading.Event()

    def leaves(number: int, body: dict[str, Any]) -> Reply:
        return Reply([0.05], status=0) if number > 0 and not gone.is_set() else yes(number, body)

    with scripted(leaves, entry("vllm")) as (url, seen):
        with pytest.raises(UserError, match=r"no server answers at .*: start it, then give the same command again"):
            run(url, tmp_path / "run", "limit=8", load)
        assert [len(visit.answers) for visit in read_visits(tmp_path / "run")] == [1] * done
        assert len(seen.posts) <= posts  # three tries of each that had begun, not of all
        gone.set()
        records = run(url, tmp_path / "run", "limit=8", load)
        assert (len(records), len({record.key for record in records})) == (8, 8)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (usage(9, 3), r"counts 9 prompt tokens, but \d+ were sent: it cuts or changes the prompt"),
        (None, "took 64 prompt tokens from its cache"),
    ],
)
def test_server_that_changes_prompts_or_takes_them_from_its_cache_is_refused(
    tmp_path: Path, answer: bytes | None, message: str
) -> None:
    def lying(_: int, body: dict[str, Any]) -> Reply:
        return Reply([event("Yes", "stop"), answer or usage(tokens(body), 3, cached=64), DONE])

    with pytest.raises(UserError, match=message):
        on(lying, tmp_path / "run")
    accepted = "server.allow_token_mismatch=true" if answer else "server.cache=warm"
    records, _ = on(lying, tmp_path / "accepted", accepted)
    assert len(records) == 3


@pytest.mark.parametrize(("load", "most"), [("load.concurrency=3", 3), ("load.rate=400", 6), ("load.concurrency=1", 1)])
def test_load_is_on_one_arm_at_a_time(tmp_path: Path, load: str, most: int) -> None:
    def slow(_: int, body: dict[str, Any]) -> Reply:
        return Reply([0.05, event("Yes", "stop"), usage(tokens(body), 2), DONE])

    overrides = ("method=server", "method.extra_body={b: 1}", "limit=6", load)
    records, seen = on(slow, tmp_path / "run", *overrides)
    assert len(records) == 6
    assert 1 <= seen.at_once <= most
    assert (seen.at_once > 1) == (most > 1)
    sides = "".join("S" if "b" in body else "B" for _, body in seen.posts)
    assert sides == ("BBBBBBSSSSSS" if most > 1 else "BSSBSBBSBSSB")  # in a block each, or in turns


def test_blocks_under_load_rotate_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.serving.subject.BLOCK", 1)
    overrides = ("method=server", "method.extra_body={b: 1}", "limit=32", "load.concurrency=2", "max_new_tokens=1")
    visits, _ = on(yes, tmp_path / "run", *overrides)
    firsts = [visit.order[0] for visit in visits]
    assert firsts == ["baseline"] * 8 + ["server"] * 16 + ["baseline"] * 8  # blocks of four times those at once


# ------------------------------------------------------------------------------------------------- lazyllm-bench serve


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The URL of a server around the tiny model, in a thread."""
    with tiny_server() as url:
        yield url


def test_method_behind_a_server_answers_as_in_this_process(endpoint: str, tmp_path: Path, monkeypatch) -> None:
    engine: list[float] = []

    def answer_with(*arguments: Any, **options: Any) -> Any:
        engine.append((out := original(*arguments, **options)).ttft_s)
        return out

    original = Conversation.answer_with
    shared = ("dataset=[lookup,shots]", "limit=2", "max_new_tokens=6", "warmup=0")
    measure(run_of("method.schedule={2: 0.3}", f"out={tmp_path / 'here'}", *shared), show=False)
    names = ("model.name=tiny/baseline", "method=server", "method.model=tiny")
    monkeypatch.setattr(Conversation, "answer_with", answer_with)
    run(endpoint, tmp_path / "there", *names, *shared)
    here, there = ([*map(flattened, read_visits(tmp_path / name))] for name in ("here", "there"))
    for ours, theirs in zip(here, there, strict=True):
        assert (ours.key, ours.turns) == (theirs.key, theirs.turns)
        pairs = [(ours.answers[a][0], theirs.answers[b][0]) for a, b in (("lazy", "server"), ("baseline", "baseline"))]
        for one, other in pairs:
            assert (one.text, one.score) == (other.text, other.score)
            assert other.request.completion_tokens == len(one.token_ids)
    answers = [one for label in ("baseline", "server") for one in measured(there, label)]
    answers.sort(key=lambda one: one.request.sent_at)
    assert all(one.ttft_s >= own for one, own in zip(answers, engine, strict=True))
    assert len(Results.read([tmp_path]).runs) == 2
