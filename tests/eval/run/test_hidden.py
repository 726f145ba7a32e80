"""A hidden question, from the place of the cut to stored numbers: against slow references and the usual prompt."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.lazyllm.engine.test_turns import DROPPING, entering
from tests.reference_turns import ContinuedTurns

import lazyllm
from eval.benchmarks.chat_format import CHAT_FORMATS, ChatFormat
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.embedded import TEMPLATES
from eval.benchmarks.prompts import BuiltPrompt, Message, build_prompt
from eval.benchmarks.suite import Example
from eval.run.case import Case
from eval.run.cases import question_start
from eval.run.hidden import answer_hidden
from eval.run.run import prepare
from eval.run.settings import ModelConfig
from lazyllm.engine.flops import LayerShape
from lazyllm.engine.generation import Forced
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy, Method
from lazyllm.methods.support.hyperparameters import keep_count
from tests.eval.run.test_fidelity import compared
from tests.eval.store.visits import flat
from tests.field_oracles import on_the_rest
from tests.helpers import TOLERANCE, VOCABULARY, byte_tokenizer, slow, tiny
from tests.lazyllm.methods.method_matrix import LISTED
from tests.reference import LazyTurns, casts_in_float64, random_model, random_variant
from tests.runs import measure, small_run
from tests.runs import run_of as written

MARK = "~"  # the first letter of a question, and nowhere else in a row


def drawn_case(rng: random.Random, most: int = 40) -> Case:
    """Random tokens, a letter each, with a random cut."""
    n = rng.randint(12, most)
    ids, cut = tuple(rng.choices(range(VOCABULARY), k=n)), rng.randint(6, n - 2)
    spans, template = np.array([(place, place + 1) for place in range(n)]), ((0, 1), (n - 1, n))
    own: dict[str, Any] = {"spans": spans, "question": cut, "context": ((1, cut),), "template": template}
    prompt = BuiltPrompt("x" * n, ids, tokens_before_truncation=n, truncated=False, **own)
    assert question_start(prompt) == cut
    example = Example("lookup", "0", "x", "x", ("x",))
    return Case(DATASETS["lookup"], example, prompt, 4, (), cut)


def answered(model: Any, case: Case, method: Method, steps: int) -> tuple[lazyllm.Generation, lazyllm.Generation]:
    return answer_hidden(model, replace(case, max_new_tokens=steps), method)


# --- The place of the cut ---


def words(rng: random.Random, most: int) -> str:
    """Text with line ends, double spaces and letters of several bytes and tokens."""
    parts = ["the", " pass", "age", "\n\n", "  ", "é", "日本", "🙂", " 7", ".", "Question", ":"]
    return "".join(rng.choices(parts, k=rng.randint(1, most)))


def obvious_start(tokenizer: Any, prompt: BuiltPrompt) -> int:
    """The first token without which the text lacks the question's first letter."""
    ids = list(prompt.token_ids)
    return next(k for k in range(len(ids)) if MARK in tokenizer.decode(ids[: k + 1]))


@cache
def tokenizers() -> dict[str, Any]:
    merges = [("Ċ", "Ċ"), ("Ċ", "~"), ("Ġ", "~"), ("Ġ", "Ġ"), ("~", "t")]  # some join the question to what precedes
    return {"tiny": tiny()[1], "joining": byte_tokenizer(merges)}


@pytest.mark.parametrize("name", ["tiny", "joining"])
@pytest.mark.parametrize("chat", [CHAT_FORMATS["none"], CHAT_FORMATS["llama2"], CHAT_FORMATS["xgen"]], ids=str)
def test_cut_is_before_the_first_token_with_a_part_of_the_question(name: str, chat: ChatFormat) -> None:
    rng, tokenizer, found = random.Random(f"{name} {chat}"), tokenizers()[name], 0
    for number in range(60):
        parts = words(rng, 12), words(rng, 60), MARK + words(rng, 20)
        own: dict[str, Any] = {
            "instruction": parts[0] * rng.randint(0, 1),
            "answer_prefix": rng.choice(["", " Answer:"]),
        }
        example = Example("lookup", str(number), parts[2], parts[1], ("x",), **own)
        limit = rng.choice([None, rng.randint(4, 80)])
        prompt = build_prompt(example, DATASETS["lookup"], tokenizer, limit, chat)
        if MARK not in prompt.text:  # the cut through the middle took it away
            assert prompt.question is None
            with pytest.raises(UserError, match="empty or cut away"):
                question_start(prompt)
            continue
        assert prompt.question is not None
        assert prompt.text[prompt.question] == MARK
        expected = obvious_start(tokenizer, prompt)
        if 1 <= expected <= len(prompt.token_ids) - 2:
            assert question_start(prompt) == expected
            found += 1
        else:
            with pytest.raises(UserError, match="tokens precede the question"):
                question_start(prompt)
    assert found > 20


def test_first_part_of_a_prompt_has_its_part_of_the_text() -> None:
    """Read letter by letter: what the first tokens stand for, and which of that may be shortened."""
    rng = random.Random(0)
    for number in range(20):
        example = Example("lookup", str(number), MARK + words(rng, 9), words(rng, 40), ("x",), instruction="Notes: ")
        prompt = build_prompt(example, DATASETS["lookup"], tiny()[1], None, CHAT_FORMATS["llama2"])
        cut = question_start(prompt)
        whole, part = prompt.as_input(), prompt.as_input(cut)
        assert part.token_ids.tolist() == list(prompt.token_ids[:cut])
        assert part.spans == whole.spans[:cut]
        stop = max(stop for _, stop in part.spans)
        assert whole.text.startswith(part.text)
        assert MARK not in part.text
        assert part.text[stop:].strip() == ""
        for ranges, of_whole in ((part.context, whole.context), (part.template, whole.template)):
            letters = {place for span in ranges for place in range(*span)}
            assert letters == {place for span in of_whole for place in range(*span) if place < len(part.text)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": (Message("more", (1,)),)}, "give turns=1"),
        ({"spans": None}, "place in the tokens is unknown"),
        ({"question": None}, "empty or cut away"),
        ({"question": 0}, "0 of 12 tokens precede the question: expected 1 or more, and 2 or more behind them"),
        ({"question": 11}, "11 of 12 tokens precede"),
    ],
)
def test_prompts_without_a_question_of_their_own_are_refused(changes: dict[str, Any], message: str) -> None:
    prompt = drawn_case(random.Random(1), 12).prompt
    with pytest.raises(UserError, match=message):
        question_start(replace(prompt, **changes))


# --- Answers ---


@pytest.mark.parametrize("variant", ["mistral, window", *slow("qwen3", "llama, YaRN", "phi3, partial RoPE")])
def test_baseline_gives_the_usual_answer(variant: str) -> None:
    """Of models whose RoPE does not change with the text's length."""
    rng = random.Random(variant)
    with casts_in_float64():
        model = random_variant(variant, 3)
        for _ in range(6):
            case, steps = drawn_case(rng), rng.randint(1, 5)
            usual = lazyllm.generate(model, case.prompt.token_ids, Baseline(), steps, ())
            context, found = answered(model, case, Baseline(), steps)
            assert found.token_ids == usual.token_ids
            assert (found.first_logits - usual.first_logits).abs().max() < TOLERANCE
            assert found.computed.tolist() == usual.computed.tolist()
            counts = ("prompt_tokens", "kv_bytes", "aux_bytes", "scoring_tokens", "pct_prompt_tokens_computed")
            assert [getattr(found, key) for key in counts] == [getattr(usual, key) for key in counts]
            assert context.prompt_tokens == case.cut
            assert found.total_s == pytest.approx(found.ttft_s + sum(found.decode_step_s))


@pytest.mark.parametrize("settings", [{}, {"prune_generated": True}, {"revive": False}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_lazy_revives_for_the_question(settings: dict[str, bool], seed: int) -> None:
    rng, model = random.Random(f"{settings} {seed}"), random_model("qwen2", seed, num_layers=4)
    schedule = {layer: rng.choice([0.2, 0.5, 0.8]) for layer in rng.sample([1, 2, 3, 4], rng.randint(1, 3))}
    case, steps = drawn_case(rng), rng.randint(1, 4)
    ids, cut = list(case.prompt.token_ids), case.cut
    assert cut is not None
    reference = LazyTurns(model, schedule, **settings)
    first = reference.answer(ids[:cut], 1, forced=ids[cut : cut + 1])
    expected = reference.answer(ids[cut + 1 :], steps)
    assert min(first.margin, expected.margin) > TOLERANCE, "something is decided by rounding"
    context, found = answered(model, case, Lazy(schedule, **settings), steps)
    assert (found.token_ids, found.selected) == (expected.token_ids, expected.selected)
    assert np.abs(found.first_logits.double().numpy() - expected.logits[0]).max() < TOLERANCE
    of_prompt = set(range(len(ids)))
    assert found.computed[-1].tolist() == [len(of_prompt & set(reference.after[layer])) for layer in reference.layers]
    assert (found.kv_bytes, found.aux_bytes) == (expected.kv_bytes, expected.aux_bytes)
    if not settings:
        new = entering(expected.selected[0], range(cut, len(ids)), 4)
        assert found.revived.tolist() == (found.computed[-1] - context.computed[-1] - new).tolist()


@pytest.mark.parametrize("name", DROPPING)
def test_methods_that_drop_for_good_answer_from_what_they_kept(name: str) -> None:
    rng, row, model = random.Random(name), LISTED[name], random_model("llama", 3, num_layers=4)
    for _ in range(3):
        case, steps = drawn_case(rng), rng.randint(1, 4)
        ids, cut = list(case.prompt.token_ids), case.cut
        assert cut is not None
        context, found = answered(model, case, row.pruning, steps)
        if row.first is None:
            first = on_the_rest(model, ids[:cut], context.selected[0][0], 1, renumber=True)
        else:
            first = row.first(model, ids[:cut], 1)
        assert first.margin > TOLERANCE, "something is decided by rounding"
        first.token_ids, scoring = ids[cut : cut + 1], len(first.passes) > 1
        first.passes = first.passes[-1:]
        expected = ContinuedTurns(model, first).answer(ids[cut + 1 :], steps)
        assert found.token_ids == expected.token_ids
        assert np.abs(found.first_logits.double().numpy() - expected.logits[0]).max() < TOLERANCE
        assert found.computed.tolist() == (expected.computed + 1).tolist()
        assert (found.kv_bytes, found.prompt_tokens) == (expected.kv_bytes, len(ids))
        assert bool(found.scoring_tokens) >= scoring
        scored = context.scoring_tokens + found.computed[-1].mean()
        assert found.pct_prompt_tokens_computed == pytest.approx(100 * scored / len(ids))


# --- A run ---


def run_of(out: Path | None, **changes: Any) -> Any:
    tiny_model = ModelConfig(name="tiny", dtype="float64", device="cpu")
    compare = {
        "lazy": {"name": "lazy", "schedule": {2: 0.5}},
        "static": {"name": "static_pruning", "layer": 2, "keep": 0.5},
    }
    settings: dict[str, Any] = dict(
        model=tiny_model, compare=compare, dataset=dict.fromkeys(TEMPLATES, True), limit=1, question="hidden"
    )
    return small_run(out, **(settings | {"max_new_tokens": 6, "fidelity": "answer"} | changes))


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("hidden")
    hidden, usual = (
        measure(run_of(folder / str(question), question=question), show=False) for question in ("hidden", None)
    )
    return hidden, usual


def test_visits_of_the_baseline_are_the_usual_ones(visits: tuple[Any, Any]) -> None:
    for hidden, usual in zip(*(run.visits for run in visits), strict=True):
        assert hidden.turns == usual.turns
        assert not hidden.failures
        own, theirs = (flat(visit.answers["baseline"][0]) for visit in (hidden, usual))
        assert (own.token_ids, own.score, own.tokens_computed) == (
            theirs.token_ids,
            theirs.score,
            theirs.tokens_computed,
        )
        vocabulary = tiny()[0].config
        assert own.prefill_flops - theirs.prefill_flops == 2 * vocabulary.hidden_size * vocabulary.vocab_size
        assert own.ttft_s < own.total_s


def test_forced_answers_follow_the_question(visits: tuple[Any, Any]) -> None:
    """The slow way: the baseline's answer, forced in a conversation of two turns of its own."""
    run = prepare(run_of(None))
    subject: Any = run.asked.subject
    model = subject.load()
    for case, visit in zip(run.cases, visits[0].visits, strict=True):
        ids, cut, answer = case.prompt.token_ids, case.cut, visit.answers["baseline"][0].token_ids
        assert cut is not None
        for arm in run.arms[1:]:
            logits = []
            for method in (Baseline(), arm.method(case.dataset.name)):
                forced = Forced(answer)
                with lazyllm.start(model, case.prompt.as_input(cut), method) as conversation:
                    conversation.answer_with(Forced(ids[cut : cut + 1]), None, 1)
                    conversation.answer_with(forced, ids[cut + 1 :], len(answer))
                logits.append(torch.stack(forced.logits))
            own = flat(visit.answers[arm.label][0])
            expected = compared(logits[0], logits[1], answer)
            assert (own.answer_kl, own.answer_log_likelihood) == pytest.approx(expected, abs=1e-9)


def test_cost_by_hand(visits: tuple[Any, Any]) -> None:
    """Static pruning after 2 of 8 layers: half of the context goes on, and all of the question."""
    run = prepare(run_of(None))
    config = tiny()[0].config
    shape = LayerShape.of(config)
    for case, visit in zip(run.cases, visits[0].visits, strict=True):
        assert case.cut is not None
        own, n = flat(visit.answers["static"][0]), len(case.prompt.token_ids)
        behind = n - case.cut
        kept = keep_count(0.5, case.cut)
        assert own.tokens_computed == own.tokens_computed_so_far == (2 * n + 6 * (kept + behind)) / 8
        assert own.pct_prompt_tokens_computed == pytest.approx(100 * own.tokens_computed / n)
        assert (own.revived_tokens, own.scoring_tokens) == (0, 0)
        layers = [n, n] + 6 * [kept + behind]
        flops = sum(m * shape.linear_flops + m * (m + 1) // 2 * shape.pair_flops for m in layers)
        assert own.prefill_flops == flops + 2 * 2 * config.hidden_size * config.vocab_size
        lazy = flat(visit.answers["lazy"][0])
        assert lazy.tokens_computed <= n
        assert lazy.kv_bytes > 0


def test_table_says_so(visits: tuple[Any, Any]) -> None:
    hidden, usual = ((run.folder / "summary.md").read_text() for run in visits)
    assert "Hidden question: the context ran before it was known." in hidden
    assert "Hidden question" not in usual


def test_identity_names_it_only_if_it_is_given() -> None:
    hidden, usual = (prepare(run_of(None, question=question)).identity for question in ("hidden", None))
    assert (hidden.pop("question"), hidden) == ("hidden", usual)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": 2, "dataset": {"lookup": True}}, "lookup, row .*: question=hidden asks one question .* turns=1"),
        ({"compare": {"s": {"name": "lazy", "schedule": {2: 0.5}, "turns": "recompute"}}}, "compare.s.turns=recompute"),
        ({"compare": None, "method": {"name": "gemfilter", "turns": "recompute"}}, "method.turns=recompute"),
    ],
)  # fmt: skip
def test_what_cannot_have_a_hidden_question_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(run_of(None, **changes))


def test_traces_are_refused() -> None:
    with pytest.raises(UserError, match="trace=1: expected 0, as traces show whole prompts"):
        written("model=tiny", "question=hidden", "trace=1")


def test_batches_leave_it_alone(tmp_path: Path, visits: tuple[Any, Any]) -> None:
    together = measure(run_of(tmp_path / "run", batch_size=4), show=False)
    for one, alone in zip(together.visits, visits[0].visits, strict=True):
        assert [flat(own[0]).token_ids for own in one.answers.values()] == [
            flat(own[0]).token_ids for own in alone.answers.values()
        ]
        assert all(own[0].times.total_s is not None for own in one.answers.values())
