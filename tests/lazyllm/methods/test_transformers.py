"""The arm `transformers`: its own generate gives the baseline's answers, and does no more than that."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lazyllm
from eval.run.run import prepare
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, Baseline, by_name, known
from lazyllm.methods.transformers import Transformers
from tests.reference import attention_of, random_variant
from tests.runs import measure, run_of


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma2", "mistral, window"])
@pytest.mark.parametrize(("ends", "least"), [(0, 0), (4, 0), (4, 3)])
def test_answers_are_the_baselines(variant: str, ends: int, least: int) -> None:
    model = random_variant(variant, 3, attention_of(variant)).double()
    prompt = torch.randint(3, 97, (41,), generator=torch.Generator().manual_seed(5))
    whole = lazyllm.generate(model, prompt, Baseline(), 8, ())
    end_ids = whole.token_ids[ends - 1 : ends] if ends else []  # ends it there, if not before
    expected = lazyllm.generate(model, prompt, Baseline(), 8, end_ids, least)
    found = lazyllm.generate(model, prompt, Transformers(), 8, end_ids, least)
    assert found.token_ids == expected.token_ids
    torch.testing.assert_close(found.first_logits.double(), expected.first_logits, rtol=0, atol=1e-5)
    assert (found.computed == expected.computed).all()
    assert len(found.decode_step_s) == len(expected.decode_step_s) == len(found.token_ids) - 1
    assert found.ttft_s + sum(found.decode_step_s) == pytest.approx(found.total_s)


def test_any_run_may_hold_it_beside_the_baseline(tmp_path: Path) -> None:
    arms = "compare=[transformers,lazy]"
    run = run_of(arms, "dataset=[lookup,digest]", "limit=2", "warmup=0", f"out={tmp_path / 'run'}")
    for visit in measure(run, show=False).visits:
        [own], [baseline] = visit.answers["transformers"], visit.answers["baseline"]
        assert (own.token_ids, own.text, own.score) == (baseline.token_ids, baseline.text, baseline.score)
        assert own.fidelity is not None
        assert (own.fidelity.same_answer, own.fidelity.kl) == (1, pytest.approx(0, abs=1e-6))
        assert own.cost is not None
        assert baseline.cost is not None
        assert own.cost.kv_bytes == baseline.cost.kv_bytes
        assert replace(own.cost, peak_memory_bytes=None).prefill_flops == baseline.cost.prefill_flops


def test_it_is_no_method_and_refuses_what_it_cannot_do(tiny: tuple) -> None:
    assert "transformers" not in METHODS
    assert "transformers" in known()
    assert by_name("transformers") is Transformers
    model, _ = tiny
    with (
        lazyllm.start(model, [1, 2, 3], Transformers()) as conversation,
        pytest.raises(UserError, match="leave out turns"),
    ):
        conversation.answer()
    with pytest.raises(UserError, match="batch_size=4: transformers decodes in a way of its own"):
        prepare(run_of("compare=[transformers]", "dataset=lookup", "limit=2", "batch_size=4"))
    with pytest.raises(UserError, match="leave out fidelity=answer"):
        measure(run_of("compare=[transformers]", "dataset=lookup", "limit=1", "warmup=0", "fidelity=answer"))
