"""The command `tune`: the schedules that it draws, by hand; its search of made-up KLs; and a
study of real runs.
"""

import shlex
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import yaml

import eval.run.bench
from eval.compose import read, register
from eval.store.folder import read_visits
from eval.tune import Schedule, TuneConfig, draw, search, tune
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from lazyllm.methods import Lazy
from tests.runs import prepared

SHAPE = SimpleNamespace(
    num_hidden_layers=8, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    intermediate_size=32, vocab_size=64,
)  # fmt: skip
TOKENS = 512
QUICK = (
    "dataset=[lookup,shots]",
    "limit=2",
    "max_new_tokens=2",
    "threads=1",
    "trials=2",
    "target_speedup=2.0",
    "out=study",
    "method=lazy",
    "method.prune_generated=true",
)


def config_of(*overrides: str) -> TuneConfig:
    try:
        return read(overrides, TuneConfig)
    finally:
        register([])


# ---------------------------------------------------------------------------------------- drawing


def flops(counts: list[int]) -> int:
    """q and o 16 x 16, k and v 16 x 8, three times 16 x 32; 4 * 16 a causal pair; a row of
    logits.
    """
    weights = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32
    return sum(2 * weights * n + 4 * 16 * n * (n + 1) // 2 for n in counts) + 2 * 16 * 64


def speedup_by_hand(schedule: Schedule) -> float:
    counts, n = list[int](), TOKENS
    for layer in range(1, 9):
        counts.append(n)
        n = -(-n * round(10_000 * schedule.get(layer, 1)) // 10_000)
    return flops([TOKENS] * 8) / flops(counts)


def ideal(schedule: Schedule) -> float:
    return Lazy(schedule).ideal_speedup(SHAPE, TOKENS)


def drawn(target: float, **chosen: float) -> Schedule | None:
    return draw(ideal, target, Depth(8), optuna.trial.FixedTrial(chosen))


@pytest.mark.parametrize("target", [1.3, 2.0])
@pytest.mark.parametrize(
    ("chosen", "layers"),
    [
        ({"cuts": 3, "first": 2, "last": 6, "slope": 0.0}, [2, 4, 6]),
        ({"cuts": 3, "first": 5, "last": 1, "slope": 1.5}, [1, 3, 5]),
        ({"cuts": 9, "first": 1, "last": 7, "slope": -2.0}, [1, 2, 3, 4, 5, 6, 7]),
        ({"cuts": 1, "first": 2, "last": 7, "slope": 1.0}, [2]),
        ({"cuts": 4, "first": 3, "last": 3, "slope": 0.5}, [3]),
    ],
    ids=str,
)
def test_drawn_schedule_meets_the_target(
    target: float, chosen: dict[str, float], layers: list[int]
) -> None:
    schedule = drawn(target, **chosen)
    assert schedule is not None
    assert [*schedule] == layers
    assert speedup_by_hand(schedule) == pytest.approx(target, rel=0.01)


def test_powers_rise_or_fall_from_the_first_layer_to_the_last() -> None:
    for slope in (0.0, 0.5, -0.5):
        schedule = drawn(1.5, cuts=3, first=2, last=6, slope=slope)
        assert schedule is not None
        middle = schedule[4]
        assert schedule[2] == pytest.approx(middle ** (2**-slope), abs=1e-3)
        assert schedule[6] == pytest.approx(middle ** (2**slope), abs=1e-3)


def test_only_layers_that_see_the_whole_prompt_prune() -> None:
    depth = Depth(8, (64, 64, None) * 2 + (64, None))
    chosen = {"cuts": 4, "first": 2, "last": 7, "slope": 0.0}  # of 2, 4, 5 and 7
    schedule = draw(ideal, 1.3, depth, optuna.trial.FixedTrial(chosen))
    assert schedule is not None
    assert [*schedule] == [3, 6]


def test_layers_that_cannot_meet_the_target_draw_nothing() -> None:
    assert drawn(3.0, cuts=2, first=6, last=7, slope=0.0) is None


# ----------------------------------------------------------------------------------------- search

DEFAULT = {2: 0.5, 4: 0.5, 7: 0.5}


def found_by(study: Any, kls: Any, trials: int, default: Schedule = DEFAULT) -> Schedule:
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials), multivariate=True)
    return search(study, partial(draw, ideal, 1.2, Depth(8)), kls, default, trials)


def recorded(value: Any) -> tuple[list[Schedule], Any]:
    """What is measured, and what measures it."""
    measured: list[Schedule] = []

    def kls(schedule: Schedule) -> tuple[float, float]:
        measured.append(schedule)
        return value(schedule)

    return measured, kls


@pytest.mark.parametrize("default", [DEFAULT, {3: 0.5}, {2: 0.5, 6: 0.5}], ids=str)
def test_default_comes_first_and_is_the_result_if_none_is_better(default: Schedule) -> None:
    measured, kls = recorded(lambda schedule: (float(schedule != default), 0.0))
    assert found_by(optuna.create_study(), kls, 8, default) == default
    assert measured[0] == default
    assert len(measured) == 8
    measured, kls = recorded(lambda schedule: (0.25, 0.5))
    assert found_by(optuna.create_study(), kls, 8, default) == default  # as good as the others


def test_best_is_the_one_of_the_least_kl_of_the_answer_then_of_the_gold_one() -> None:
    measured, kls = recorded(lambda schedule: (abs(min(schedule) - 5), schedule[min(schedule)]))
    best = found_by(optuna.create_study(), kls, 40)
    values = [(abs(min(schedule) - 5), schedule[min(schedule)]) for schedule in measured]
    assert values[measured.index(best)] == min(values) < values[0]
    # some are equal but for the gold answer
    assert len({value for value, _ in values}) < len({*values})


def test_stopped_search_goes_on_and_begins_with_the_default(tmp_path: Path) -> None:
    def stopped(schedule: Schedule) -> tuple[float, float]:
        raise KeyboardInterrupt

    storage = f"sqlite:///{tmp_path}/study.db"
    load = partial(optuna.create_study, storage=storage, study_name="s", load_if_exists=True)
    with pytest.raises(KeyboardInterrupt):
        found_by(load(), stopped, 4)
    measured, kls = recorded(lambda schedule: (min(schedule), 0.0))
    found_by(load(), kls, 2)
    assert measured[0] == DEFAULT
    with pytest.raises(KeyboardInterrupt):
        found_by(load(), stopped, 4)
    best = found_by(load(), kls, 4)
    assert len(measured) == 4
    assert min(best) == min(map(min, measured))
    assert found_by(load(), stopped, 4) == best  # nothing is left to do


# ---------------------------------------------------------------------------------------- command


@pytest.mark.slow
def test_study_of_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert tune(config_of(*QUICK)) == Path("study")
    content = yaml.safe_load(Path("study/tuned.yaml").read_text())
    keys = [" ".join(prompt.key) for prompt in prepared(*QUICK[:2]).prompts]
    assert content["rows"] + content["other_rows"] == [keys[0], keys[2], keys[1], keys[3]]
    assert (content["model"], content["target_speedup"]) == ("tiny", 2.0)
    out = capsys.readouterr().out
    assert all(key in out for key in keys)
    kls = dict[str, dict[str, list[float]]]()
    for part in ("rows", "other_rows"):
        for folder in Path("study", part).iterdir():
            visits = read_visits(folder)
            assert {" ".join(visit.key) for visit in visits} == {*content[part]}
            answers: list[Any] = [visit.answers["tuned"] for visit in visits]
            found = [
                mean(answer.answer_kl for answer in answers),
                mean(answer.gold_kl for answer in answers),
            ]
            kls.setdefault(part, {})[folder.name] = found
    assert len(kls["rows"]) == 2
    best = min(kls["rows"], key=lambda name: kls["rows"][name])
    assert best == "-".join(f"{layer}_{ratio}" for layer, ratio in content["schedule"].items())
    is_default = content["tuned on rows"] == content["default on rows"]
    assert len(kls["other_rows"]) == (1 if is_default else 2)
    for part, measured in kls.items():
        assert content[f"tuned on {part}"] == measured[best]
        assert content[f"default on {part}"] in measured.values()
    # the file begins with the command that runs the schedule
    command = Path("study/tuned.yaml").read_text().splitlines()[0]
    _, _, _, *words = shlex.split(command)
    arm = prepared(*words, "dataset=lookup", "limit=1").identity["arms"]["lazy"]
    schedule = {str(layer): ratio for layer, ratio in content["schedule"].items()}
    expected = {"name": "lazy", "schedule": schedule, "prune_generated": True}
    assert arm["method"] == expected
    monkeypatch.setattr(eval.run.bench, "generate", None)  # nothing is measured again
    tune(config_of(*QUICK))
    assert yaml.safe_load(Path("study/tuned.yaml").read_text()) == content
    for changed, named in (
        (["seed=1"], "seed: 0 there"),
        (["limit=1"], "rows: "),
        (["method.prune_generated=false"], "arms."),
    ):
        with pytest.raises(UserError, match=named):
            tune(config_of(*QUICK, *changed))
