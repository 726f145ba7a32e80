"""Methods that each break one rule, found by the check of that rule; and the command that reports it."""

import doctest
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import lazyllm
import lazyllm.check.__main__ as command
from lazyllm.check import invariants
from lazyllm.engine.inputs import Boundary
from lazyllm.errors import UserError
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
    target_parameter = "keep"

    def kept(self, num_layers: int, n: int) -> dict[int, int]:
        return {2: keep_count(self.keep, n)}


@dataclass(frozen=True)
class KeepsOneFewer(Halves):
    """Declares one token more than it keeps."""

    def select(self, at: Boundary, scores: Tensor) -> Tensor:
        kept = super().select(at, scores)
        assert kept is not None
        return kept[-(len(kept) - 1 or 1) :]


@dataclass(frozen=True)
class Remembers(Halves):
    """Chooses other tokens each time."""

    calls: ClassVar[list[int]] = []

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        self.calls.append(1)
        return recorded[0].roll(len(self.calls))


@dataclass(frozen=True)
class Stores(Halves):
    """Each key head keeps these of 30 tokens."""

    indices: tuple[int, ...] = ()
    heads: int = 2
    forget = False

    def store(self, at: Boundary, scores: Tensor) -> Tensor:
        return torch.tensor([self.indices] * self.heads)


@dataclass(frozen=True)
class Moves(Halves):
    """Changes the positions that it was given."""

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        at.positions.sub_(1)
        return recorded[0]


@dataclass(frozen=True)
class NeverAll(Select):
    """Drops the first token whatever its `keep` says."""

    keep: float = 1.0
    label = "never all"
    target_parameter = "keep"

    def kept(self, n: int) -> int:
        return max(1, n - 1)

    def select(self, decoder: Any, prompt: Any) -> list[int]:
        return list(range(len(prompt)))[-self.kept(len(prompt)) :]


@dataclass(frozen=True)
class Chosen(Halves):
    """Keeps these of 30 tokens."""

    indices: tuple[int, ...] = ()
    adaptive = True

    def select(self, at: Boundary, scores: Tensor) -> Tensor:
        return torch.tensor(self.indices)


@dataclass(frozen=True)
class Selected(Select):
    """Selects these of 30 tokens."""

    indices: tuple[int, ...] = ()
    label = "selected"

    def kept(self, n: int) -> int:
        return 3

    def select(self, decoder: Any, prompt: Any) -> tuple[int, ...]:
        return self.indices


def test_each_rule_finds_the_method_that_breaks_it() -> None:
    with pytest.raises(AssertionError, match="after another prompt"):
        invariants.has_no_state(MODEL, Remembers(), PROMPT)
    with pytest.raises(AssertionError, match="declares 29 of 30 tokens: declare what keeps all"):
        invariants.is_the_model(MODEL, invariants.keeping_everything(NeverAll()), PROMPT)
    with pytest.raises(AssertionError, match=r"in a batch|in model\.generate"):
        invariants.runs_batches_row_by_row(MODEL, Remembers(), PROMPT, max_new_tokens=8)
    invariants.counts_what_it_computes(MODEL, Stores(indices=(3, 29)), PROMPT)
    for indices, heads in (((5, 3), 2), ((3, 3), 2), ((3, 30), 2), ((-1, 3), 2), ((3, 29), 3)):
        with pytest.raises(AssertionError, match=r"`store` gave .*: expected ascending indices of 30 tokens"):
            invariants.counts_what_it_computes(MODEL, Stores(indices=indices, heads=heads), PROMPT)
    with pytest.raises(AssertionError, match=r"changed `at\.positions`"):
        invariants.counts_what_it_computes(MODEL, Moves(), PROMPT)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (Chosen(indices=(5, 3, 29)), "halves: selected 5 before 3: expected ascending indices, each once"),
        (Chosen(indices=(3, 3, 29)), "halves: selected 3 before 3: expected ascending indices, each once"),
        (Chosen(indices=(3, 30)), "halves: selected 3 to 30: expected indices of 30 tokens"),  # torch: IndexError
        (Chosen(indices=(3, 28)), "halves: dropped the newest of 30 tokens: expected it to be kept"),
        (Chosen(indices=()), "halves: selected 0 of 30 tokens: expected at least one"),
        (KeepsOneFewer(), "halves: selected 14 of 30 tokens: expected 15, as it declares"),
        (Selected((2.0, 4.0, 9.0)), "selected: selected [3] of torch.float32: expected indices [k]"),
        (Selected((9, 4, 2)), "selected: selected 9 before 4: expected ascending indices, each once"),
        (Selected((4, 4, 9)), "selected: selected 4 before 4: expected ascending indices, each once"),
        (Selected((-1, 4, 9)), "selected: selected -1 to 9: expected indices of 30 tokens"),
        (Selected((2, 4, 40)), "selected: selected 2 to 40: expected indices of 30 tokens"),
        (Selected((2, 4, 9, 11)), "selected: selected 4 of 30 tokens: expected 3, as it declares (adaptive = "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_generate_refuses_selection_that_breaks_rule(method: Any, rule: str) -> None:
    message = f"^{re.escape(rule)}"
    with pytest.raises(UserError, match=message):
        lazyllm.generate(MODEL, PROMPT, method, 3, ())
    with pytest.raises(UserError, match=message):
        list(lazyllm.generate_many(MODEL, [PROMPT], method, 3, ()))


def test_generate_takes_selections_within_the_rules() -> None:
    for method, kept in ((Chosen(indices=(3, 29)), {2: [3, 29]}), (Selected((2, 4, 9)), {0: [2, 4, 9]})):
        assert lazyllm.generate(MODEL, PROMPT, method, 1, ()).selected == [kept]


@pytest.mark.parametrize(("base", "settings"), [(Prune, ["layer=2"]), (Select, ["layers=2"])])
def test_docstring_examples_pass_the_command(base: type, settings: list[str], monkeypatch, capsys) -> None:
    lines = [part.source for part in doctest.DocTestParser().get_examples(base.__doc__ or "")]
    names: dict[str, Any] = {"__name__": __name__}
    exec("".join(lines[: next(number for number, line in enumerate(lines) if "load_model" in line)]), names)
    kind = names["KeepLast" if base is Prune else "AskFirst"]
    monkeypatch.setattr(command, "MODELS", {"llama": command.MODELS["llama"]})
    monkeypatch.setitem(METHODS, "example", kind)
    assert command.main(["example", *settings]) == 0, capsys.readouterr().out
    monkeypatch.setattr(kind, "target_parameter", None)
    assert command.main(["example", *settings]) == 1
    told, count = capsys.readouterr().out.splitlines()[-6::5]
    assert "declare what keeps all: target_parameter = KEY" in told
    assert count == "1 failed"


def test_command_says_what_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "MODELS", {"llama": command.MODELS["llama"]})
    for name, kind in (("halves", Halves), ("never_all", NeverAll)):
        monkeypatch.setitem(METHODS, name, kind)
    assert command.main(["halves", "keep=0.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Halves(keep=0.25): tokens computed in each layer, of 40: 40, 40, 10, 10"
    assert [line[:3] for line in lines[1:]] == ["ok "] * 5 + ["all"]
    assert command.main(["never_all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("failed  llama: keeping every token gives the model's own output: ")
    assert lines[-1] == "1 failed"


@pytest.mark.parametrize("name", command.MODELS)
def test_models_of_the_command_decide_selections(name: str) -> None:
    """A correct method passes every check; its selection is not accidental, as another order selects other tokens."""
    model = command.random_model(name, "float64")
    invariants.is_the_model(model, invariants.keeping_everything(Halves()), PROMPT)
    there, back = (lazyllm.generate(model, prompt, Halves(0.1), 1, ()) for prompt in (PROMPT, PROMPT[::-1]))
    assert there.selected != back.selected
