"""Which measurements are made, in which order, and what a visit holds; with a stub for the generation."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.prompts import BuiltPrompt
from eval.benchmarks.suite import Example
from eval.run import decode, memory
from eval.run.answers import Visits
from eval.run.arms import Arm
from eval.run.case import Case
from eval.run.subject import WARMUP_TOKENS, in_turn
from eval.store.visit import Visit
from lazyllm import Generation
from lazyllm.methods import Baseline, Lazy
from lazyllm.spec import ModelSpec
from tests.eval.store.visits import flat
from tests.runs import arm, bench_of

METHOD = Lazy({1: 0.5})
ARMS = (arm("baseline", name="baseline"), arm("lazy", name="lazy", schedule={1: 0.5}))
CONFIG = SimpleNamespace(
    model_type="llama", num_hidden_layers=3, num_attention_heads=2, hidden_size=8, intermediate_size=16, vocab_size=10,
    _attn_implementation="sdpa",
)  # fmt: skip
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
    """All calls of `generate` and of the peak's reset, in order; methods answer token 5, the baseline 6."""
    seen: list[tuple] = []

    def generate(model, prompt, method, after_prefill=None, **settings):
        seen.append((method, prompt, settings))
        return generation(6 if isinstance(method, Baseline) else 5)

    monkeypatch.setattr(decode, "generate", generate)
    monkeypatch.setattr(memory, "reset_peak", lambda *devices: seen.append(("reset",)))
    monkeypatch.setattr(memory, "read_peak", lambda *devices: 123)
    monkeypatch.setattr("lazyllm.methods.support.other_models.HELPERS.loaded", {})  # none that an earlier test left
    return seen


def bench(*arms: Arm, baseline: str | None = "baseline", chat: str = "none") -> Visits:
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, config=CONFIG)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: TEXTS[ids[0]])
    return bench_of(model, tokenizer, arms or ARMS, baseline, CHAT_FORMATS[chat])


def case(name: str, text: str = "text") -> Case:
    example = Example(name, "row", "", "context", ("Emilia is angry.",), (), 5)
    prompt = BuiltPrompt(text, (1, 2, 3, 4), tokens_before_truncation=9, truncated=True)
    return Case(DATASETS[name], example, prompt, 40, (2,))


def visit(on: Visits, of: Case | None = None, number: int = 0) -> Visit:
    (made,) = on.visits([replace(of or case("qasper"), arms=in_turn(on.arms, number))])
    return made


def own(visit: Visit, label: str = "lazy") -> Any:
    (first,) = visit.answers[label]
    return flat(first)


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
def test_arms_are_measured_in_the_given_order_with_their_own_peaks(calls, number: int) -> None:
    found = visit(bench(), number=number)
    order = [METHOD, Baseline()] if number else [Baseline(), METHOD]
    assert [call[0] for call in calls] == ["reset", order[0], "reset", order[1]]
    assert found.order == (["lazy", "baseline"] if number else ["baseline", "lazy"])
    assert list(found.answers) == ["baseline", "lazy"]  # in the order of tables
    method, baseline = own(found), own(found, "baseline")
    assert (method.token_ids, baseline.token_ids) == ([5], [6])
    assert (method.score, baseline.score) == (pytest.approx(2 * 3 / (3 + 7)), 0)  # F1 by hand
    assert (method.same_answer, method.kl, baseline.same_answer, baseline.kl) == (0, 0, None, None)
    assert method.peak_memory_bytes == 123
    assert (method.group_starts, method.computed) == ([1, 3], [[4, 2], [4, 3]])
    (turn,) = found.turns
    sha256 = hashlib.sha256(b"1,2,3,4").hexdigest()
    assert (turn.tokens, turn.tokens_before_truncation, turn.sha256) == (4, 9, sha256)


def test_flops_are_of_what_was_computed_in_prefill_and_of_scoring(calls) -> None:
    token, pair = 2 * (4 * 8 * 8 + 3 * 8 * 16), 4 * 8  # a layer's linear maps; a query with a key and a value
    prefill = 10 * token + (10 + 10 + 3) * pair + 2 * 8 * 10  # 4, 4 and 2 tokens in its layers; one row of logits
    assert own(visit(bench())).prefill_flops == prefill
    assert own(visit(bench(arm("gem", name="gemfilter", layer=2, keep=2), baseline=None)), "gem").prefill_flops == (
        prefill + 4 * token + 10 * pair + 4 * 2 * 3 * 8 * 8  # layer 1, and q, k and v of layer 2
    )
    keeps_all = arm("gem", name="gemfilter", layer=2, keep=4)  # nothing is scored
    assert own(visit(bench(keeps_all, baseline=None)), "gem").prefill_flops == prefill


def test_visit_keeps_the_prompts_end_and_the_gold_answers(calls) -> None:
    for text, end in (("short", "short"), ("x" * 50 + "é" * 599 + "?", "é" * 599 + "?")):
        (turn,) = visit(bench(), case("qasper", text)).turns
        assert (turn.end, turn.answers) == (end, ["Emilia is angry."])


def fail(monkeypatch, fails: Callable[[Any], bool]) -> None:
    """From now on, generations of such methods lack memory."""
    original = decode.generate

    def failing(model, prompt, method, **settings):
        if fails(method):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, prompt, method, **settings)

    monkeypatch.setattr(decode, "generate", failing)


def test_without_the_baselines_answer_the_others_count_and_are_not_compared(calls, monkeypatch) -> None:
    fail(monkeypatch, lambda method: isinstance(method, Baseline))
    found = visit(bench())
    assert "out of memory at 4 prompt tokens: lower model.max_prompt_tokens" in found.failures["baseline"].reason
    assert own(found).score > 0
    assert own(found).kl is None


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


def test_methods_get_the_tokens_and_what_they_stand_for(calls) -> None:
    spans = np.array([[0, 0], [0, 1], [1, 3], [3, 4]], dtype=np.int32)
    given = replace(case("qasper"), prompt=replace(case("qasper").prompt, context=((1, 3),), spans=spans))
    visit(bench(), given)
    bench().warm_up([given], 1)
    prompts = [call[1] for call in calls if len(call) == 3]
    assert len(prompts) == 5
    for prompt in prompts:
        assert prompt.token_ids.tolist() == [1, 2, 3, 4]
        assert (prompt.text, prompt.context) == ("text", ((1, 3),))
        assert prompt.spans == ((0, 0), (0, 1), (1, 3), (3, 4))


@pytest.mark.parametrize(("name", "least"), [("samsum", 1), ("qasper", 0), ("triviaqa", 0)])
def test_answers_get_the_lengths_and_end_tokens_of_their_dataset(calls, name: str, least: int) -> None:
    visit(bench(), case(name))
    assert [call[2] for call in calls if len(call) == 3] == 2 * [
        {"max_new_tokens": 40, "eos_token_ids": (2,), "min_new_tokens": least}
    ]


def test_warm_up_runs_each_arm_as_often_as_asked_and_briefly(calls) -> None:
    bench().warm_up([case("qasper")], 3)
    assert [call[0] for call in calls] == [Baseline(), *[Baseline(), METHOD] * 3]
    assert [call[2]["max_new_tokens"] for call in calls] == [1, *[WARMUP_TOKENS] * 6]  # the first tells the kernel


def test_xgen_answers_are_cleaned(calls) -> None:
    assert own(visit(bench(chat="xgen"))).text == " Emilia is angry.\nWilliam is not."
    assert own(visit(bench())).text == TEXTS[5]


def test_rouge_l_is_of_what_is_scored(calls, monkeypatch) -> None:
    monkeypatch.setitem(TEXTS, 5, "\nEmilia is angry.\nand much else besides")
    found = own(visit(bench(), case("samsum")))
    assert found.rouge_l == 1  # the first line only
    assert found.score == pytest.approx(1, abs=1e-4)
    assert own(visit(bench())).rouge_l is None


DRAFT = ModelSpec("tiny")
DRAFTED = arm("drafted", name="prompt_compression", keep=0.5, scorer="tiny")


class Draft:
    """Another model of 1,000 float32 numbers; tells where it is moved."""

    config = CONFIG

    def __init__(self, calls: list[Any]) -> None:
        self.device, self.calls = torch.device("cuda"), calls

    def to(self, place: Any) -> None:
        self.device = torch.device(place)
        self.calls.append(("to", place))

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(numel=lambda: 1000, element_size=lambda: 4, device=self.device)]

    def buffers(self) -> list[Any]:
        return []


@pytest.fixture
def draft(calls, monkeypatch) -> Draft:
    """A draft that lies beside the model, on its device, where there is memory for all."""
    made = Draft(calls)
    monkeypatch.setattr("lazyllm.methods.support.other_models.HELPERS.loaded", {(DRAFT, True): made})
    return made


def test_other_models_stay_and_do_not_count_in_other_arms_peaks(calls, draft: Draft) -> None:
    on = bench(*ARMS, DRAFTED)
    draft.device = torch.device("cpu")  # the stub model's
    found = visit(on)
    assert ("to", "cpu") not in calls
    peaks = {label: own(found, label).peak_memory_bytes for label in found.answers}
    assert peaks == {"baseline": 123 - 4000, "lazy": 123 - 4000, "drafted": 123}


def test_other_models_move_to_the_host_if_memory_does_not_hold_all(calls, draft: Draft, monkeypatch, caplog) -> None:
    fail(monkeypatch, lambda method: isinstance(method, Baseline) and draft.device.type == "cuda")
    on = bench(*ARMS, DRAFTED)
    assert not visit(on).failures
    assert calls.count(("to", "cpu")) == 1
    assert "memory does not hold the other models of all arms" in caplog.text
    draft.device = torch.device("cuda")  # as its own arm has moved it
    assert not visit(on).failures
    assert calls.count(("to", "cpu")) == 2
    assert caplog.text.count("memory does not hold") == 1
