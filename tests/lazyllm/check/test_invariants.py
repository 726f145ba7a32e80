"""Methods that each break one rule, found by the check of that rule; and the verb that reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

import lazyllm
import lazyllm.check.__main__ as verb
from lazyllm.check import invariants
from lazyllm.methods import METHODS, Prune, Select
from lazyllm.methods.support.schedule import keep_count
from tests.reference import random_model

MODEL = random_model("llama", 2, num_layers=4)
PROMPT = list(range(3, 33))


@dataclass(frozen=True)
class Halves(Prune):
    """Right: keeps a share after layer 2."""

    keep: float = 0.5
    label = "halves"
    dial = "keep"

    def kept(self, num_layers: int, n: int) -> dict[int, int]:
        return {2: keep_count(self.keep, n)}


@dataclass(frozen=True)
class KeepsOneFewer(Halves):
    """Declares one token more than it keeps."""

    def choose(self, scores: Tensor, keep: int) -> Tensor:
        return super().choose(scores, keep)[-(keep - 1 or 1) :]


@dataclass(frozen=True)
class Remembers(Halves):
    """Chooses other tokens each time."""

    calls: ClassVar[list[int]] = []

    def score(self, seen: list[Tensor], batch: Any) -> Tensor:
        self.calls.append(1)
        return seen[0].roll(len(self.calls))


@dataclass(frozen=True)
class NeverAll(Select):
    """Drops the first token whatever its dial says."""

    keep: float = 1.0
    label = "never all"
    dial = "keep"

    def kept(self, n: int) -> int:
        return max(1, n - 1)

    def select(self, decoder: Any, prompt: Any) -> list[int]:
        return list(range(len(prompt)))[-self.kept(len(prompt)) :]


def test_right_method_passes_all() -> None:
    invariants.is_the_model(MODEL, invariants.keeping_everything(Halves()), PROMPT)
    for check in (invariants.has_no_state, invariants.runs_batches_row_by_row, invariants.gives_finite_logits):
        check(MODEL, Halves(), PROMPT)
    assert invariants.counts_what_it_computes(MODEL, Halves(), PROMPT).computed[0].tolist() == [30, 30, 15, 15]


def test_each_rule_finds_the_method_that_breaks_it() -> None:
    with pytest.raises(AssertionError, match=r"in each layer: \[30, 30, 14, 14\], expected \[30, 30, 15, 15\]"):
        invariants.counts_what_it_computes(MODEL, KeepsOneFewer(), PROMPT)
    with pytest.raises(AssertionError, match="after another prompt"):
        invariants.has_no_state(MODEL, Remembers(), PROMPT)
    with pytest.raises(AssertionError, match=r"% of tokens computed: 96\.6.*, expected 100|tokens: "):
        invariants.is_the_model(MODEL, invariants.keeping_everything(NeverAll()), PROMPT)
    with pytest.raises(AssertionError, match=r"in a batch|in model\.generate"):
        invariants.runs_batches_row_by_row(MODEL, Remembers(), PROMPT, max_new_tokens=8)


def test_verb_says_what_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verb, "MODELS", {"llama": verb.MODELS["llama"]})
    for name, kind in (("halves", Halves), ("never_all", NeverAll)):
        monkeypatch.setitem(METHODS, name, kind)
    assert verb.main(["halves", "keep=0.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Halves(keep=0.25): tokens computed in each layer, of 40: 40, 40, 10, 10"
    assert [line[:3] for line in lines[1:]] == ["ok "] * 5 + ["all"]
    assert verb.main(["never_all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("failed  llama: keeping every token gives the model's own output: ")
    assert lines[-1] == "1 failed"


@pytest.mark.parametrize("name", verb.MODELS)
def test_models_of_the_verb_decide_selections(name: str) -> None:
    """A correct method passes every check; its selection is not accidental, as another order selects other tokens."""
    model = verb.random_model(name, "float64")
    invariants.is_the_model(model, invariants.keeping_everything(Halves()), PROMPT)
    there, back = (lazyllm.generate(model, prompt, Halves(0.1), 1, ()) for prompt in (PROMPT, PROMPT[::-1]))
    assert there.selected != back.selected
