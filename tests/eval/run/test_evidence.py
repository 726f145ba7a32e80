"""Computed evidence, against counts by hand and the counters of every kind of method."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import lazyllm
from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import Example
from eval.run.evidence import evidence_computed, evidence_positions
from lazyllm import Generation
from lazyllm.methods import (
    ASL,
    Baseline,
    FastKV,
    GemFilter,
    Lazy,
    Method,
    PyramidInfer,
    RandomDrop,
    StaticPruning,
    UniPrefill,
)
from tests.eval.benchmarks.test_prompts import Characters
from tests.reference import random_model
from tests.runs import arm, bench_of, case_of

MODEL = random_model("llama", seed=1)


def generation(selected: list[dict[int, list[int]]], computed: list[list[int]]) -> Generation:
    return Generation(
        token_ids=[1, 2, 3], first_logits=torch.zeros(3), ttft_s=0.5, scoring_s=0.0, total_s=0.75, decode_step_s=[],
        computed=np.array(computed), selected=selected, revived=computed[-1], kv_bytes=0, aux_bytes=0, prompt_tokens=10,
    )  # fmt: skip


def test_evidence_computed_by_hand() -> None:
    """Ten prompt tokens, four layers, pruned after layers 1 and 3; the evidence is tokens 2, 5, 6 and 9."""
    out = generation(
        [
            {1: [0, 2, 4, 5, 9], 3: [2, 9]},
            {1: [0, 5, 6, 9, 10], 3: [6, 10]},  # 6 is revived into layers 2 to 4; 5 was in layers 2 and 3 already
            {1: [0, 1, 5, 10, 11], 3: [5, 11]},  # 5 is revived into layer 4
        ],
        [[10, 5, 5, 2], [10, 6, 6, 3], [10, 7, 7, 4]],
    )
    in_prefill, revived = evidence_computed(out, np.array([2, 5, 6, 9]))
    assert in_prefill.tolist() == [1, 3 / 4, 3 / 4, 2 / 4]
    assert revived.tolist() == [0, 1 / 4, 1 / 4, 2 / 4]


def test_evidence_computed_by_hand_if_only_the_prefill_selects() -> None:
    pruned = generation([{2: [0, 2, 9]}, {}, {}], [[10, 10, 3, 3]] * 3)
    chosen_before = generation([{3: [5, 6, 9]}, {}, {}], [[3, 3, 3, 3]] * 3)  # by layer 3 of an earlier run
    for out, expected in ((pruned, [1, 1, 2 / 4, 2 / 4]), (chosen_before, [3 / 4] * 4)):
        in_prefill, revived = evidence_computed(out, np.array([2, 5, 6, 9]))
        assert in_prefill.tolist() == expected
        assert revived.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "method",
    [
        Baseline(), Lazy({1: 0.5, 2: 0.5}), Lazy({1: 0.4}, revive=False), StaticPruning(1, 0.5), RandomDrop(0.5),
        GemFilter(layer=2, keep=8), FastKV(layer=1, keep=0.5, window=2), PyramidInfer(recent=0.2, first=2),
        ASL(first=1, keep=8, window=2, layers=1), UniPrefill([1, 2], 0.5, 4, 2, 1, 1),
    ],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_evidence_of_all_tokens_equals_the_counters(method: Method) -> None:
    prompt = torch.tensor(np.random.default_rng(3).integers(0, 97, 24))
    out = lazyllm.generate(MODEL, prompt, method, 6, ())
    in_prefill, revived = evidence_computed(out, np.arange(24))
    assert (24 * in_prefill).tolist() == pytest.approx(out.computed[0].tolist())
    assert (24 * (in_prefill + revived)).tolist() == pytest.approx(out.computed[-1].tolist())


def test_tokens_that_hold_some_of_the_evidence() -> None:
    spans = np.array([[0, 0], [0, 3], [3, 7], [7, 8], [8, 12], [12, 12]], dtype=np.int32)
    assert evidence_positions(spans, ((2, 4), (8, 9))).tolist() == [1, 2, 4]
    assert evidence_positions(spans, ()).tolist() == evidence_positions(None, ((2, 4),)).tolist() == []


EXAMPLE = Example(
    "qasper", "1", "\nAnswer: why?", "abc NEEDLE def GOLD ghi", (), instruction="Read: ", evidence=((4, 10), (15, 19))
)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, ["NEEDLE", "GOLD"]), (40, ["NEEDLE", "OLD"]), (28, ["NEE"]), (18, [])],
)
@pytest.mark.parametrize("chat", ["llama2", "auto"])
def test_evidence_is_followed_through_template_truncation_and_wrap(
    limit: int | None, expected: list[str], chat: str
) -> None:
    tokenizer = Characters()
    tokenizer.chat_template = "given"
    example = replace(EXAMPLE, answer_prefix=" It is")
    prompt = build_prompt(example, DATASETS["qasper"], tokenizer, limit, CHAT_FORMATS[chat])  # type: ignore[arg-type]
    assert [prompt.text[start:end] for start, end in prompt.evidence] == expected


def test_visit_has_a_share_for_each_layer(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    case = case_of("lookup", tokenizer, 8)
    prompt = case.prompt
    arms = (arm("lazy", name="lazy", schedule={2: 0.3, 5: 0.3}),)
    (visit,) = bench_of(model, tokenizer, arms, None).visits([replace(case, arms=arms)])
    found = visit.answers["lazy"][0].evidence
    (needle,) = [prompt.text[start:end] for start, end in prompt.evidence]
    assert found.evidence_tokens == len(tokenizer.encode(f" {needle}", add_special_tokens=False))
    assert len(found.evidence_prefill) == len(found.evidence_revived) == 8
    assert found.evidence_prefill[:2] == [1, 1]
    assert 1 > found.evidence_prefill[2] >= found.evidence_prefill[5]
    assert found.evidence_prefill[7] == found.evidence_recall
    (visit,) = bench_of(model, tokenizer, arms, None, evidence=False).visits([replace(case, arms=arms)])
    (silent,) = visit.answers["lazy"]
    assert silent.evidence is None
