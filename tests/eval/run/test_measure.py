"""What a visit holds of a real generation, in which order arms answer, and other models in memory."""

import hashlib
import json
import logging
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lazyllm
from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.prompts import BuiltPrompt
from eval.benchmarks.suite import Example
from eval.run import memory
from eval.run.case import Case, scored, visit_of
from eval.run.loop import in_turn
from eval.run.memory import Memory
from eval.run.settings import ModelConfig
from eval.run.work import WARMUP_TOKENS
from eval.store.visit import Visit
from lazyllm.methods import Baseline, Lazy, PromptCompression
from lazyllm.spec import ModelSpec
from tests.eval.store.visits import flat
from tests.helpers import tiny
from tests.runs import arm, bench_of, case_of, small_run

METHOD = Lazy({2: 0.5})
ARMS = (arm("baseline", name="baseline"), arm("lazy", name="lazy", schedule={2: 0.5}))


def case(name: str, text: str = "text") -> Case:
    """An example whose answers are scored, not generated."""
    example = Example(name, "row", "", "context", ("Emilia is angry.",), (), 5)
    prompt = BuiltPrompt(text, (1, 2, 3, 4), tokens_before_truncation=9, truncated=True)
    return Case(DATASETS[name], example, prompt, 40, (2,))


def measured(of: Case, number: int = 0) -> Visit:
    """The visit of the arms, as they come in the visit of this number."""
    (made,) = bench_of(*tiny(), ARMS).visits([replace(of, arms=in_turn(ARMS, number))])
    return made


@pytest.mark.parametrize("count", range(1, 8))
def test_each_arm_comes_before_and_after_each_other_and_has_each_place_equally_often(count: int) -> None:
    arms = [arm(str(number), name="baseline") for number in range(count)]
    orders = [[one.label for one in in_turn(arms, number)] for number in range(2 * count)]
    assert all(sorted(order) == [one.label for one in arms] for order in orders)
    for first, second in (orders[n : n + 2] for n in range(0, 2 * count, 2)):  # in each two visits already
        for one, other in combinations("".join(first), 2):
            assert (first.index(one) < first.index(other)) != (second.index(one) < second.index(other))
    places = Counter((label, place) for order in orders for place, label in enumerate(order))
    assert set(places.values()) == {2}
    assert len(places) == count**2


@pytest.mark.parametrize("number", [0, 1])
def test_visit_holds_the_generation_of_each_arm_beside_the_baselines(number: int) -> None:
    model, tokenizer = tiny()
    of = case_of("lookup", tokenizer, 6)
    found = measured(of, number)
    assert found.order == (["lazy", "baseline"] if number else ["baseline", "lazy"])
    assert list(found.answers) == ["baseline", "lazy"]  # in the order of tables
    for label, method in (("baseline", Baseline()), ("lazy", METHOD)):
        own = flat(found.answers[label][0])
        out = lazyllm.generate(model, of.prompt.as_input(), method, 6, of.end_ids)
        assert own.token_ids == out.token_ids
        assert own.text == tokenizer.decode(out.token_ids, skip_special_tokens=True)
        assert own.kv_bytes == out.kv_bytes
        assert (own.kl is None) == (own.same_answer is None) == (label == "baseline")
    (turn,) = found.turns
    sha256 = hashlib.sha256(",".join(map(str, of.prompt.token_ids)).encode()).hexdigest()
    assert (turn.tokens, turn.sha256) == (len(of.prompt.token_ids), sha256)


def test_visit_keeps_the_prompts_end_and_the_gold_answers() -> None:
    for text, end in (("short", "short"), ("x" * 50 + "é" * 599 + "?", "é" * 599 + "?")):
        (turn,) = visit_of(case("qasper", text), ARMS, {}).turns
        assert (turn.end, turn.answers, turn.tokens_before_truncation) == (end, ["Emilia is angry."], 9)


def test_only_an_answer_of_samsum_has_a_token_before_its_end() -> None:
    for name, least in (("samsum", 1), ("qasper", 0), ("triviaqa", 0)):
        assert case(name).options == {"max_new_tokens": 40, "eos_token_ids": (2,), "min_new_tokens": least}


def test_warm_up_runs_each_arm_as_often_as_asked_and_briefly() -> None:
    model, tokenizer = tiny()
    bench, of = bench_of(model, tokenizer, ARMS), case_of("lookup", tokenizer, 40)
    measured(of)  # the model is checked once
    ran = Counter[bool]()
    hook = model.lm_head.register_forward_hook(lambda *_: ran.update([True]))
    bench.warm_up([of], 3)
    hook.remove()
    assert bench.attention_kernel == "SDPA's flash for CPUs"
    assert ran[True] == 1 + 2 * 3 * WARMUP_TOKENS  # the first prefill tells the kernel


def test_score_and_rouge_l_are_of_the_cleaned_text() -> None:
    text = "Assistant: Emilia is angry.\nWilliam is not."
    own = scored(case("qasper"), text, CHAT_FORMATS["xgen"])
    assert own["text"] == " Emilia is angry.\nWilliam is not."
    assert own["score"] == pytest.approx(2 * 3 / (3 + 6))  # F1 by hand
    assert own["rouge_l"] is None
    assert scored(case("qasper"), text, CHAT_FORMATS["none"])["text"] == text
    summary = scored(case("samsum"), "\nEmilia is angry.\nand much else besides", CHAT_FORMATS["none"])
    assert (summary["rouge_l"], summary["score"]) == (1, pytest.approx(1, abs=1e-4))  # the first line only


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_out_of_memory_has_several_names(error: Exception, is_memory: bool) -> None:
    assert memory.is_out_of_memory(error) == is_memory


GPU = torch.device("cuda", 0)


class Draft:
    """Another model of 1,000 float32 numbers on the GPU."""

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(numel=lambda: 1000, element_size=lambda: 4, device=GPU)]

    def buffers(self) -> list[Any]:
        return []


def test_other_models_and_kept_prefills_count_in_no_others_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = PromptCompression(0.5, scorer="tiny")
    monkeypatch.setattr("lazyllm.methods.support.other_models.HELPERS.loaded", {(ModelSpec("tiny"), True): Draft()})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 10_000)
    here = Memory(GPU)
    assert (here.peak(METHOD), here.peak(drafted)) == (10_000 - 4000, 10_000)
    kept: Any = SimpleNamespace(nbytes=500)
    here.kept = [kept]
    assert (here.peak(METHOD), here.peak(drafted)) == (10_000 - 4000 - 500, 10_000 - 500)
    here.forget([None, kept])
    assert here.peak(drafted) == 10_000


def test_log_names_settings_of_the_generation_config_that_have_no_effect(tiny_copy: Path, caplog: Any) -> None:
    config = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "do_sample": True, "eos_token_id": 2}
    (tiny_copy / "generation_config.json").write_text(json.dumps(config))
    model = ModelConfig(name=str(tiny_copy), dtype="float32", device="cpu")
    with caplog.at_level(logging.INFO):
        small_run(None, model=model).subject.load()
    [line] = [record.getMessage() for record in caplog.records if "have no effect" in record.getMessage()]
    assert line.endswith("these have no effect: do_sample=True, repetition_penalty=1.7, no_repeat_ngram_size=2")
