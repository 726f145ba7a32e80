"""`model.penalties=true`: answers follow the model's generation config as transformers' own greedy `generate` does."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

import lazyllm
from eval.run.run import prepare
from eval.run.settings import ModelConfig
from lazyllm.errors import UserError
from lazyllm.integrations.transformers_generate import greedy_with_penalties
from lazyllm.methods import Baseline, Lazy
from tests.helpers import VOCABULARY
from tests.reference import LazyTurns, random_model
from tests.runs import measure, run_of, small_run

SAMPLED = {"do_sample": True, "temperature": 2.0, "top_k": 9, "num_beams": 3}  # none of which is followed
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 3.0},
    {"encoder_repetition_penalty": 5.0, "encoder_no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 1},
    {"suppress_tokens": list(range(0, VOCABULARY, 2)), "begin_suppress_tokens": list(range(1, VOCABULARY, 4))},
    {"bad_words_ids": [[number] for number in range(40)]},
    {"sequence_bias": [[[5], 50.0]], "forced_eos_token_id": 7},
    {"min_new_tokens": 4},
    {"min_length": 14, "repetition_penalty": 1.5},
    {"exponential_decay_length_penalty": (2, 9.0)},
]


@pytest.mark.parametrize("asked", PENALTIES, ids=lambda asked: "+".join(asked))
def test_baseline_chooses_as_transformers_own_generate(asked: dict[str, Any]) -> None:
    """Over all cases, each of these settings changes an answer."""
    rng, model, changed = random.Random(str(asked)), random_model("llama", 5, num_layers=4), 0
    for number in range(12):
        ids, end = rng.choices(range(1, VOCABULARY), k=rng.randint(10, 30)), rng.sample(range(VOCABULARY), 15)
        options: dict[str, Any] = {"max_new_tokens": rng.randint(5, 12)}
        model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=end)
        plain: Any = model.generate(torch.tensor([ids]), do_sample=False, **options)  # type: ignore[operator]
        model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=end, **SAMPLED, **asked)
        expected: Any = model.generate(torch.tensor([ids]), do_sample=False, num_beams=1, **options)  # type: ignore[operator]
        changed += not torch.equal(plain, expected)
        for method in (Baseline(), Lazy({1: 1.0, 3: 1.0})):
            sampler = greedy_with_penalties(model, ids, options["max_new_tokens"], end)
            with lazyllm.start(model, ids, method) as conversation:
                conversation.answer_with(sampler, None, options["max_new_tokens"])
            assert conversation.token_ids == expected[0].tolist(), number
    assert changed, "the setting changes no answer"


def test_lazy_is_penalised_as_its_own_logits_are() -> None:
    """The slow way: each step's logits by the reference, through the processors themselves."""
    schedule, model = {1: 0.5, 3: 0.6}, random_model("llama", 5, num_layers=4)
    config = {"repetition_penalty": 2.0, "no_repeat_ngram_size": 2, "suppress_tokens": list(range(30))}
    model.generation_config = GenerationConfig(pad_token_id=0, **config)
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(2.0),
            NoRepeatNGramLogitsProcessor(2),
            SuppressTokensLogitsProcessor(list(range(30))),
        ]
    )
    rng = random.Random(0)
    for _ in range(4):
        ids, answer = rng.choices(range(1, VOCABULARY), k=rng.randint(8, 20)), list[int]()
        while len(answer) < 5:
            out = LazyTurns(model, schedule).answer(ids, len(answer) + 1, forced=answer)
            scores: Any = torch.tensor(np.array(out.logits[-1]))[None].float()
            answer.append(int(processors(torch.tensor([[*ids, *answer]]), scores).argmax()))  # type: ignore[arg-type]
        with lazyllm.start(model, ids, Lazy(schedule)) as conversation:
            found = conversation.answer_with(greedy_with_penalties(model, ids, 5), None, 5)
        assert found.token_ids == answer
        plain = lazyllm.generate(model, ids, Lazy(schedule), 5, ())
        assert torch.equal(found.first_logits, plain.first_logits)  # which are the model's own


def test_least_number_of_new_tokens_is_the_larger_one() -> None:
    """The dataset's own, or the generation config's."""
    ids, model = [7, 7, 12, 60], random_model("llama", 5, num_layers=4)
    for of_config, given in ((4, 1), (1, 4)):
        model.generation_config = GenerationConfig(min_new_tokens=of_config)
        sampler = greedy_with_penalties(model, ids, 6, range(VOCABULARY - 1), given)
        with lazyllm.start(model, ids, Baseline()) as conversation:
            found = conversation.answer_with(sampler, None, 6).token_ids
        assert found[:4] == [VOCABULARY - 1] * 4  # any other would end the answer


# --- A run ---

CONFIG = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "do_sample": True, "eos_token_id": 2}


@pytest.fixture
def checkpoint(tiny_copy: Path) -> Path:
    (tiny_copy / "generation_config.json").write_text(json.dumps(CONFIG))
    return tiny_copy


def penalised(checkpoint: Path, out: Path | None, penalties: bool = True, **changes: Any) -> Any:
    model = ModelConfig(name=str(checkpoint), dtype="float32", device="cpu", max_prompt_tokens=96, penalties=penalties)
    return small_run(out, **({"model": model, "max_new_tokens": 6} | changes))


@pytest.mark.parametrize("changes", [{}, {"batch_size": 3}, {"question": "hidden"}], ids=str)
def test_runs_answers_are_transformers_own(
    checkpoint: Path, tmp_path: Path, caplog: Any, changes: dict[str, Any]
) -> None:
    asked = penalised(
        checkpoint, tmp_path / "run", fidelity="answer", trace=0 if "question" in changes else 1, **changes
    )
    with caplog.at_level(logging.INFO):
        visits = measure(asked, show=False).visits
    [line] = [record.getMessage() for record in caplog.records if "have no effect" in record.getMessage()]
    assert line.endswith("these have no effect: do_sample=True")
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    plain = 0
    for case in prepare(asked).cases:
        (visit,) = [visit for visit in visits if visit.key == case.key]
        ids = torch.tensor([case.prompt.token_ids])
        least = int(case.dataset.newline_ends)
        out = model.generate(
            ids,
            do_sample=False,
            max_new_tokens=case.max_new_tokens,
            eos_token_id=list(case.end_ids),
            min_new_tokens=least,
        )
        answer = visit.answers["baseline"][0].token_ids
        assert answer == out[0, ids.shape[1] :].tolist()
        plain += answer == lazyllm.generate(model, ids, Baseline(), **case.options).token_ids
    assert plain < len(visits)
    summary = (tmp_path / "run" / "summary.md").read_text()
    assert "the model's own repetition_penalty=1.7, no_repeat_ngram_size=2. KL is of" in summary


def test_later_turns_are_penalised_for_all_of_the_text(checkpoint: Path, tmp_path: Path) -> None:
    asked = penalised(checkpoint, tmp_path / "run", dataset={"lookup": True}, turns=3, limit=1)
    (visit,), (case,) = measure(asked, show=False).visits, prepare(asked).cases
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = list(case.prompt.token_ids)
    for turn, answer in enumerate(visit.answers["baseline"]):
        end = list(case.end_ids)
        expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6, eos_token_id=end)[0].tolist()
        assert expected[len(ids) :] == answer.token_ids
        more = case.prompt.turns[turn].behind(expected[len(ids) :], case.end_ids) if turn < 2 else ()
        ids = [*expected, *more]


def test_line_at_start_names_the_setting(checkpoint: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        penalised(checkpoint, None, penalties=False).subject.load()
    assert (
        "do_sample=True, repetition_penalty=1.7, no_repeat_ngram_size=2 (model.penalties=true applies all"
        in caplog.text
    )


def test_identity_holds_what_is_applied(checkpoint: Path) -> None:
    with_them, without = (prepare(penalised(checkpoint, None, penalties)).identity for penalties in (True, False))
    applied = with_them.pop("penalties")
    assert (applied.pop("code") != "", applied) == (True, {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2})
    assert with_them == without


def test_what_cannot_apply_them_is_refused(checkpoint: Path) -> None:
    own_generate: tuple[dict[str, Any], ...] = (
        {"method": {"name": "transformers"}},
        {"compare": {"t": {"name": "transformers"}}},
    )
    for settings in own_generate:
        with pytest.raises(UserError, match=r"name=transformers: expected another method with model\.penalties=true"):
            penalised(checkpoint, None, **settings)
    with pytest.raises(UserError, match=r"model.penalties=true: expected false, as .* has none"):
        prepare(run_of("model=tiny", "model.penalties=true", "dataset=lookup", "limit=1"))
