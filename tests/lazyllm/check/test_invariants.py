"""Methods that each break one rule, found by the check of that rule; and the command that
reports it.
"""

import re
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import lazyllm
import lazyllm.check.__main__ as command
from lazyllm.check import invariants
from lazyllm.engine.depth import Depth
from lazyllm.engine.inputs import Boundary
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, Prune, Select
from lazyllm.methods.support.hyperparameters import keep_count
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

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        return {2: keep_count(self.keep, n)}


class Remembers(Halves):
    """Chooses other tokens each time."""

    calls = count()

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        return recorded[0].roll(next(self.calls))


def given(base: type, **body: Any) -> Any:
    """A method whose hooks return these values, whatever they get."""
    hooks = {
        name: (lambda *_, value=value: value)
        for name, value in body.items()
        if callable(getattr(base, name))
    }
    return type("Given", (base,), body | hooks)()


def choosing(*indices: int) -> Any:
    return given(Halves, adaptive=True, select=torch.tensor(indices))


@dataclass(frozen=True)
class Moves(Halves):
    """Changes the positions that it was given."""

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        at.positions.sub_(1)
        return recorded[0]


def storing(indices: list[list[int]], forget: bool = False) -> Any:
    return given(Halves, forget=forget, store=torch.tensor(indices))


def selecting(*indices: float) -> Any:
    return given(Select, label="selected", kept=3, select=indices)


def test_each_rule_finds_the_method_that_breaks_it() -> None:
    with pytest.raises(AssertionError, match="after another prompt"):
        invariants.has_no_state(MODEL, Remembers(), PROMPT)
    with pytest.raises(AssertionError, match="declares 29 of 30 tokens: declare what keeps all"):
        invariants.can_keep_everything(MODEL, given(Halves, kept={2: 29}), PROMPT)
    with pytest.raises(AssertionError, match=r"in a batch|in model\.generate"):
        invariants.runs_batches_row_by_row(MODEL, Remembers(), PROMPT)
    with pytest.raises(AssertionError, match=r"changed `at\.positions`"):
        invariants.counts_what_it_computes(MODEL, Moves(), PROMPT)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (choosing(5, 3, 29), "halves: selected 5 before 3: expected ascending indices, each once"),
        # torch: IndexError
        (choosing(3, 30), "halves: selected 3 to 30: expected indices of 30 tokens"),
        (choosing(3, 28), "halves: dropped the newest of 30 tokens: expected it to be kept"),
        (choosing(), "halves: selected 0 of 30 tokens: expected at least one"),
        (
            given(Halves, score=[0.5] * 30),
            "halves: scored [] of list: expected a tensor of 30 floating-point numbers",
        ),
        (
            given(Halves, score=torch.arange(30)),
            "halves: scored [30] of torch.int64: expected a tensor of 30 floating-point",
        ),
        (
            given(Halves, score=torch.ones(1, 30)),
            "halves: scored [1, 30] of torch.float32: expected a tensor of 30",
        ),
        (
            storing([[3, 1], [0, 2]]),
            "halves: selected 3 before 1: expected ascending indices, each once",
        ),
        (storing([[1, 2], [0, 30]]), "halves: selected 0 to 30: expected indices of 30 tokens"),
        (storing([[1, 2]] * 3), "halves: selected [3, 2] of torch.int64: expected indices [2, k]"),
        (
            storing([[1, 2]] * 2, True),
            "halves: store keeps other tokens in each key head: write forget = Fal",
        ),
        (
            given(Halves, select=torch.arange(16, 30)),
            "halves: selected 14 of 30 tokens: expected 15, as it declares",
        ),
        (selecting(2.0, 4.0, 9.0), "selected: selected [3] of torch.float32: expected indices [k]"),
        (
            selecting(4, 4, 9),
            "selected: selected 4 before 4: expected ascending indices, each once",
        ),
        (selecting(-1, 4, 9), "selected: selected -1 to 9: expected indices of 30 tokens"),
        (
            selecting(2, 4, 9, 11),
            "selected: selected 4 of 30 tokens: expected 3, as it declares (adaptive = ",
        ),
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
    for method, kept in ((choosing(3, 29), {2: [3, 29]}), (selecting(2, 4, 9), {0: [2, 4, 9]})):
        assert lazyllm.generate(MODEL, PROMPT, method, 1, ()).selected == [kept]


@pytest.mark.parametrize(
    ("base", "setting", "counts"),
    [(Prune, "layer=2", "40, 40, 20, 20"), (Select, "layers=2", "20, 20, 20, 20")],
)
def test_docstring_examples_pass_the_command(
    base: type, setting: str, counts: str, monkeypatch, capsys
) -> None:
    kind = example_of(base)
    monkeypatch.setattr(command, "MODELS", {"llama": command.MODELS["llama"]})
    monkeypatch.setitem(METHODS, "example", kind)
    assert command.main(["example", setting]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert (
        first
        == f"{kind.__name__}({setting}, keep=0.5): tokens computed in each layer, of 40: {counts}"
    )
    assert [line[:3] for line in others] == ["ok "] * 5 + ["all"]
    monkeypatch.setattr(kind, "target_parameter", None)
    assert command.main(["example", setting]) == 1
    reason, failed = capsys.readouterr().out.splitlines()[-6::5]
    assert re.match(
        "failed  llama: keeping every token .* declare what keeps all: target_parameter = KEY",
        reason,
    )
    assert failed == "1 failed"


def test_command_says_once_why_several_checks_fail(monkeypatch, capsys) -> None:
    kind = type(
        "Nowhere", (Halves,), {"score": lambda self, at, recorded: recorded[0] * float("nan")}
    )
    monkeypatch.setattr(command, "MODELS", dict.fromkeys("ab", command.MODELS["llama"]))
    monkeypatch.setitem(METHODS, "nowhere", kind)
    assert command.main(["nowhere"]) == 1
    _, *lines = capsys.readouterr().out.splitlines()
    kept = "keeping every token gives the model's own output"
    assert [line for line in lines if line.startswith("ok ")] == [
        f"ok      a: {kept}",
        f"ok      b: {kept}",
    ]
    first, second = (line for line in lines if line.startswith("failed "))
    assert first.endswith("scored NaN after layer 2")
    assert "halves: dropped the newest of 2 tokens" in second
    assert lines[-1] == "8 failed, 6 of them for a reason that stands above"
    assert len(lines) == 5


def test_one_score_of_nan_is_named() -> None:
    nan = {
        "score": lambda self, at, recorded: recorded[0].masked_fill(at.positions == 3, torch.nan)
    }
    method = type("OneNan", (Halves,), nan)()
    assert len(lazyllm.generate(MODEL, PROMPT, method, 3, ()).token_ids) == 3  # it is kept first
    with pytest.raises(AssertionError, match="scored NaN after layer 2"):
        invariants.counts_what_it_computes(MODEL, method, PROMPT)


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
            "kept(self, depth, n)",
            "{2: self.keep * n}",
            r"a group of layers has 20.0 prompt tokens: expected a whole number",
        ),
        (
            "Prune",
            "kept(self, depth, n)",
            "{2: n + 3}",
            r"declares \[40, 40, 43, 43\] .* none above the one before",
        ),
        (
            "Prune",
            "kept(self, depth, n)",
            "{0: 3}",
            "faulty prunes after layer 0, but layers count from 1",
        ),
        ("Prune", "kept(self, depth, n)", "[2, 3]", r"AttributeError: 'list' .*\.py:\d+"),
        ("Prune", "kept(self, n)", "{2: 3}", r"TypeError: .*kept\(\) takes 2"),
        ("Prune", "__post_init__(self)", "nowhere", r"NameError: .*'nowhere' .*\(faulty\.py:12\)"),
        (
            "Method",
            "groups(self, depth, n)",
            "[]",
            r"declares \[\] tokens in the layers: expected 4",
        ),
        ("Method", "groups(self, depth, n)", "[Group(range(2), n)]", r"declares \[40, 40\]"),
        (
            "Method",
            "groups(self, depth, n)",
            "[Group(range(depth.count), n, ScoreSpec([4]))]",
            r"names the layers \[4\]: exp",
        ),
    ],
)
def test_command_refuses_a_declaration_that_cannot_be(
    base: str, hook: str, value: str, message: str, tmp_path
) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(_FAULTS.format(base=base, hook=hook, value=value))
    with pytest.raises(UserError, match=f"^method.*{message}"):
        command.main([str(file)])


def test_layers_that_run_before_the_prefill_must_cost_something() -> None:
    kind = type("CostsNothing", (example_of(Select),), {"scoring_flops": Select.scoring_flops})
    with pytest.raises(
        AssertionError, match=r"scoring_flops\(config, n\) is 0: declare what it costs"
    ):
        invariants.counts_what_it_computes(MODEL, kind(2), PROMPT)


@pytest.mark.parametrize("name", command.MODELS)
def test_models_of_the_command_decide_selections(name: str) -> None:
    """A correct method passes every check; its selection is not accidental, as another order
    selects other tokens.
    """
    model = command.random_model(name, "float64")
    invariants.can_keep_everything(model, Halves(), PROMPT)
    there, back = (
        lazyllm.generate(model, prompt, Halves(0.1), 1, ()) for prompt in (PROMPT, PROMPT[::-1])
    )
    assert there.selected != back.selected
