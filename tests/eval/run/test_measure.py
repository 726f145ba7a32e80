"""Which measurements are made, in which order, and what a record holds; with a stub for the generation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.prompts import BuiltPrompt
from eval.benchmarks.suite import Example
from eval.run import measure
from eval.run.measure import WARMUP_TOKENS, Bench, Case
from lazyllm import Generation
from lazyllm.methods import Baseline, GemFilter, Lazy, PromptCompression

METHOD = Lazy({1: 0.5})
CONFIG = SimpleNamespace(
    model_type="llama", num_hidden_layers=3, num_attention_heads=2, hidden_size=8, intermediate_size=16, vocab_size=10
)
TEXTS = {5: "Assistant: Emilia is angry.\nWilliam is not.", 6: "someone else"}


def generation(token_id: int) -> Generation:
    return Generation(
        token_ids=[token_id], first_logits=torch.zeros(3), ttft_s=0.5, scoring_s=0.0, total_s=0.75,
        decode_step_s=[0.25],
        computed=np.array([[4, 4, 2], [4, 4, 3]]), selected=[{}, {}], revived=np.array([0, 0, 1]),
        kv_bytes=10, aux_bytes=2, prompt_tokens=4,
    )  # fmt: skip


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """All calls of `generate` and of the peak's reset, in order; the method answers token 5, the baseline 6."""
    seen: list[tuple] = []

    def generate(model, prompt, method, **settings):
        seen.append((method, prompt, settings))
        return generation(6 if isinstance(method, Baseline) else 5)

    monkeypatch.setattr(measure, "generate", generate)
    monkeypatch.setattr(measure, "reset_peak", lambda *devices: seen.append(("reset",)))
    monkeypatch.setattr(measure, "read_peak", lambda *devices: 123)
    return seen


def bench(paired: bool | str = True, chat: str = "none") -> Bench:
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, config=CONFIG)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: TEXTS[ids[0]])
    return Bench(model, tokenizer, CHAT_FORMATS[chat], paired)  # type: ignore[arg-type]


def case(name: str, text: str = "text") -> Case:
    example = Example(name, "row", "", "context", ("Emilia is angry.",), (), 5, "en")
    return Case(DATASETS[name], example, BuiltPrompt(text, (1, 2, 3, 4), 9, True, "abc"), METHOD, 40, (2,))


@pytest.mark.parametrize("baseline_first", [True, False])
def test_sides_are_measured_in_the_given_order_with_their_own_peaks(calls, baseline_first: bool) -> None:
    record = bench().record(case("qasper"), baseline_first)
    order = [Baseline(), METHOD] if baseline_first else [METHOD, Baseline()]
    assert [call[0] for call in calls] == ["reset", order[0], "reset", order[1]]
    assert record.baseline is not None
    assert (record.method.token_ids, record.baseline.token_ids) == ([5], [6])
    assert (record.method.score, record.baseline.score) == (pytest.approx(2 * 3 / (3 + 7)), 0)  # F1 by hand
    assert record.method.peak_memory_bytes == 123
    assert (record.method.group_starts, record.method.computed) == ([1, 3], [[4, 2], [4, 3]])
    assert (record.prompt_tokens, record.prompt_tokens_before_truncation, record.prompt_sha256) == (4, 9, "abc")


def test_flops_are_of_what_was_computed_in_prefill_and_of_scoring(calls) -> None:
    token, pair = 2 * (4 * 8 * 8 + 3 * 8 * 16), 4 * 8  # a layer's linear maps; a query with a key and a value
    prefill = 10 * token + (10 + 10 + 3) * pair + 2 * 8 * 10  # 4, 4 and 2 tokens in its layers; one row of logits
    assert bench().record(case("qasper"), True).method.prefill_flops == prefill
    scored = replace(case("qasper"), method=GemFilter(2, keep=2))
    assert bench(paired=False).record(scored, True).method.prefill_flops == (
        prefill + 4 * token + 10 * pair + 4 * 2 * 3 * 8 * 8  # layer 1, and q, k and v of layer 2
    )


@pytest.mark.parametrize(("text", "end"), [("short", "short"), ("x" * 50 + "é" * 599 + "?", "é" * 599 + "?")])
def test_record_keeps_the_prompts_end_and_the_gold_answers(calls, text: str, end: str) -> None:
    record = bench().record(case("qasper", text), True)
    assert record.prompt_end == end
    assert record.answers == ["Emilia is angry."]


def test_unpaired_runs_the_method_only(calls) -> None:
    assert bench(paired=False).record(case("qasper"), baseline_first=True).baseline is None
    assert [call[0] for call in calls] == ["reset", METHOD]


@pytest.mark.parametrize("baseline_first", [True, False])
def test_baseline_that_is_paired_for_ttft_stops_after_its_first_token(calls, baseline_first: bool) -> None:
    record = bench(paired="ttft").record(case("qasper"), baseline_first)
    made = [(call[0], call[2]["max_new_tokens"]) for call in calls if len(call) == 3]
    order = [(Baseline(), 1), (METHOD, 40)]
    assert made == (order if baseline_first else order[::-1])
    assert (record.baseline, record.baseline_ttft_s) == (None, 0.5)
    assert (record.method.kl, record.method.top1_agrees, record.method.same_answer) == (0, 1, None)


def test_methods_get_the_tokens_and_what_they_stand_for(calls) -> None:
    spans = np.array([[0, 0], [0, 1], [1, 3], [3, 4]], dtype=np.int32)
    given = replace(case("qasper"), prompt=BuiltPrompt("text", (1, 2, 3, 4), 9, True, "abc", ((1, 3),), spans))
    bench().record(given, True)
    bench().warm_up([given], 1)
    prompts = [call[1] for call in calls if len(call) == 3]
    assert len(prompts) == 4
    for prompt in prompts:
        assert prompt.token_ids.tolist() == [1, 2, 3, 4]
        assert (prompt.text, prompt.context) == ("text", ((1, 3),))
        assert prompt.spans == ((0, 0), (0, 1), (1, 3), (3, 4))


@pytest.mark.parametrize(("name", "least"), [("samsum", 1), ("qasper", 0), ("triviaqa", 0)])
def test_generation_settings(calls, name: str, least: int) -> None:
    bench(paired=False).record(case(name), baseline_first=True)
    assert calls[-1][2] == {"max_new_tokens": 40, "eos_token_ids": (2,), "min_new_tokens": least}


def test_warm_up_runs_both_as_often_as_asked_and_briefly(calls) -> None:
    bench().warm_up([case("qasper")], 3)
    assert [call[0] for call in calls] == [Baseline(), METHOD] * 3
    assert {call[2]["max_new_tokens"] for call in calls} == {WARMUP_TOKENS}


def test_xgen_answers_are_cleaned(calls) -> None:
    assert bench(chat="xgen").record(case("qasper"), True).method.text == " Emilia is angry.\nWilliam is not."
    assert bench().record(case("qasper"), True).method.text == TEXTS[5]


def test_rouge_l_is_of_what_is_scored(calls, monkeypatch) -> None:
    monkeypatch.setitem(TEXTS, 5, "\nEmilia is angry.\nand much else besides")
    record = bench().record(case("samsum"), True)
    assert record.method.rouge_l == 1  # the first line only
    assert record.method.score == pytest.approx(1, abs=1e-4)
    assert bench().record(case("qasper"), True).method.rouge_l is None


def test_no_other_model_lies_in_memory_while_the_baseline_is_measured(calls: list[tuple], monkeypatch) -> None:
    """A draft is moved to the host before the baseline runs, but not before its own method."""

    class Draft:
        def to(self, place: str) -> None:
            calls.append(("to", place))

    draft = Draft()
    monkeypatch.setattr("lazyllm.methods.support.other_models._LOADED", [draft])
    scored = replace(case("qasper"), method=PromptCompression(0.5, scorer="tiny"))
    bench().record(scored, baseline_first=True)
    bench().record(scored, baseline_first=False)
    order = [call[1] if call[0] == "to" else type(call[0]).__name__ for call in calls if call != ("reset",)]
    assert order == ["cpu", "Baseline", "PromptCompression", "PromptCompression", "cpu", "Baseline"]
