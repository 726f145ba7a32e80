"""Methods that each break one rule, found by the check of that rule; and the command that reports it."""

import re
from collections.abc import Callable
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
from tests.helpers import example_of
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
class Scored(Halves):
    """Its scores are `made` of the positions."""

    made: Callable[[Tensor], Any] = Tensor.double

    def score(self, at: Boundary, recorded: list[Tensor]) -> Any:
        return self.made(at.positions)


@dataclass(frozen=True)
class Stored(Halves):
    """Each key head keeps these of 30 tokens."""

    indices: Any = ()
    forget = False

    def store(self, at: Boundary, scores: Tensor) -> Tensor:
        return torch.tensor(self.indices)


class StoredForgotten(Stored):
    forget = True


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


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (Chosen(indices=(5, 3, 29)), "halves: selected 5 before 3: expected ascending indices, each once"),
        (Chosen(indices=(3, 3, 29)), "halves: selected 3 before 3: expected ascending indices, each once"),
        (Chosen(indices=(3, 30)), "halves: selected 3 to 30: expected indices of 30 tokens"),  # torch: IndexError
        (Chosen(indices=(3, 28)), "halves: dropped the newest of 30 tokens: expected it to be kept"),
        (Chosen(indices=()), "halves: selected 0 of 30 tokens: expected at least one"),
        (Scored(made=list), "halves: scored [] of list: expected a tensor of 30 floating-point numbers"),
        (Scored(made=Tensor.long), "halves: scored [30] of torch.int64: expected a tensor of 30 floating-point"),
        (Scored(made=lambda at: at[None].double()), "halves: scored [1, 30] of torch.float64: expected a tensor of 30"),
        (Stored(indices=[[3, 1], [0, 2]]), "halves: selected 3 before 1: expected ascending indices, each once"),
        (Stored(indices=[[1, 2], [0, 30]]), "halves: selected 0 to 30: expected indices of 30 tokens"),
        (Stored(indices=[[1, 2]] * 3), "halves: selected [3, 2] of torch.int64: expected indices [2, k]"),
        (
            StoredForgotten(indices=[[1, 2]] * 2),
            "halves: store keeps other tokens in each key head: write forget = Fal",
        ),
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
    kind = example_of(base)
    monkeypatch.setattr(command, "MODELS", {"llama": command.MODELS["llama"]})
    monkeypatch.setitem(METHODS, "example", kind)
    assert command.main(["example", *settings]) == 0, capsys.readouterr().out
    monkeypatch.setattr(kind, "target_parameter", None)
    assert command.main(["example", *settings]) == 1
    told, count = capsys.readouterr().out.splitlines()[-6::5]
    assert re.match("failed  llama: keeping every token .* declare what keeps all: target_parameter = KEY", told)
    assert count == "1 failed"


def test_command_says_what_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "MODELS", {"llama": command.MODELS["llama"]})
    monkeypatch.setitem(METHODS, "halves", Halves)
    assert command.main(["halves", "keep=0.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Halves(keep=0.25): tokens computed in each layer, of 40: 40, 40, 10, 10"
    assert [line[:3] for line in lines[1:]] == ["ok "] * 5 + ["all"]


_FAULTS = """
from dataclasses import dataclass
from lazyllm.engine.decoder import run_layers
from lazyllm.engine.inputs import Group
from lazyllm.methods import Method, Prune, ScoreSpec, Select

@dataclass(frozen=True)
class Faulty({base}):
    label, target_parameter = "faulty", "keep"
    keep: float = 0.5
    def {hook}:
        return {value}
"""


@pytest.mark.parametrize(
    ("base", "hook", "value", "message"),
    [
        (
            "Prune",
            "kept(self, layers, n)",
            "{2: self.keep * n}",
            r"declares \[40, 40, 20.0, 20.0\] .*: expected 4 whole",
        ),
        ("Prune", "kept(self, layers, n)", "{2: n + 3}", r"declares \[40, 40, 43, 43\] .* none above the one before"),
        ("Prune", "kept(self, layers, n)", "{0: 3}", "faulty prunes after layer 0, but layers count from 1"),
        ("Prune", "kept(self, layers, n)", "[2, 3]", r"AttributeError: 'list' .*\.py:\d+"),
        ("Prune", "kept(self, n)", "{2: 3}", r"TypeError: .*kept\(\) takes 2"),
        ("Prune", "__post_init__(self)", "nowhere", r"NameError: .*'nowhere' .*\(faulty\.py:12\)"),
        ("Method", "groups(self, layers, n)", "[]", r"declares \[\] tokens in the layers: expected 4"),
        ("Method", "groups(self, layers, n)", "[Group(range(2), n)]", r"declares \[40, 40\]"),
        (
            "Method",
            "groups(self, layers, n)",
            "[Group(range(layers), n, ScoreSpec([4]))]",
            r"names the layers \[4\]: exp",
        ),
    ],
)
def test_command_refuses_a_declaration_that_cannot_be(base: str, hook: str, value: str, message: str, tmp_path) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(_FAULTS.format(base=base, hook=hook, value=value))
    with pytest.raises(UserError, match=f"^method.*{message}"):
        command.main([str(file)])


def test_layers_that_run_before_the_prefill_must_cost_something() -> None:
    kind = type("CostsNothing", (example_of(Select),), {"scoring_flops": Select.scoring_flops})
    with pytest.raises(AssertionError, match=r"scoring_flops\(config, n\) is 0: declare what it costs"):
        invariants.counts_what_it_computes(MODEL, kind(2), PROMPT)


@pytest.mark.parametrize("name", command.MODELS)
def test_models_of_the_command_decide_selections(name: str) -> None:
    """A correct method passes every check; its selection is not accidental, as another order selects other tokens."""
    model = command.random_model(name, "float64")
    invariants.is_the_model(model, invariants.keeping_everything(Halves()), PROMPT)
    there, back = (lazyllm.generate(model, prompt, Halves(0.1), 1, ()) for prompt in (PROMPT, PROMPT[::-1]))
    assert there.selected != back.selected
