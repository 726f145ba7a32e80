"""The command `tune`: its space by hand, its search against an exhaustive one, and a study of real runs."""

import json
import math
import re
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import optuna
import pandas as pd
import pytest
import yaml

import eval.run.decode
from eval.run.config import compose_config, prepared, register_schema
from eval.run.run import prepare
from eval.store.folder import read_visits
from eval.tune import Cuts, Space, TuneConfig, open_study, ranked, search, to_tune_config, tried_in, tune
from lazyllm.errors import UserError
from lazyllm.methods import Lazy
from tests.runs import run_of

SHAPE = SimpleNamespace(
    num_hidden_layers=8, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    intermediate_size=32, vocab_size=64,
)  # fmt: skip
QUICK = (
    "dataset=[lookup,shots]",
    "limit=4",
    "max_new_tokens=2",
    "warmup=0",
    "threads=1",
    "trials=2",
    "layers=2",
    "target_speedup=2.0",
    "out=study",
)


def space_of(target: float, layers: int = 8, cuts: int = 3, lengths: dict | None = None, **settings) -> Space:
    shape = SimpleNamespace(**{**vars(SHAPE), "num_hidden_layers": layers})
    return Space(shape, Lazy(), lengths or {"lookup": {512: 1}}, cuts, target, **settings)


def config_of(*overrides: str) -> TuneConfig:
    try:
        return to_tune_config(compose_config(prepared(overrides, TuneConfig)))
    finally:
        register_schema()


# --------------------------------------------------------------------------------------------------------------- space


def flops(counts: list[int]) -> int:
    """q and o 16 x 16, k and v 16 x 8, the MLP three times 16 x 32; 4 * 16 a causal pair; one row of logits."""
    weights = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32
    return sum(2 * weights * n + 4 * 16 * n * (n + 1) // 2 for n in counts) + 2 * 16 * 64


def test_speedup_is_aggregated_as_measured_ones_are() -> None:
    counts = {n: [n] * 2 + [n // 2] * 4 + [-(-n // 2 * 3 // 10)] * 2 for n in (100, 200, 40)}
    whole, pruned = {n: flops([n] * 8) for n in counts}, {n: flops(layers) for n, layers in counts.items()}
    lookup = (2 * whole[100] + whole[200]) / (2 * pruned[100] + pruned[200])
    space = space_of(2.0, lengths={"lookup": {100: 2, 200: 1}, "hops": {40: 1}})  # of two tasks
    assert space.speedup(((2, 50), (6, 30))) == pytest.approx((lookup + whole[40] / pruned[40]) / 2)
    both = space_of(2.0, lengths={"qasper": {100: 1}, "narrativeqa": {40: 1}})  # of one task
    assert both.speedup(((2, 50), (6, 30))) == pytest.approx((whole[100] / pruned[100] + whole[40] / pruned[40]) / 2)


def test_references_reach_the_target_and_no_more() -> None:
    space = space_of(2.0)
    paper = space.references()["paper"]
    assert [layer for layer, _ in paper] == [2, 4, 7]  # 30, 60, 90 % of 8
    assert space.reaches(paper)
    assert not space.reaches(tuple((layer, percent + 1) for layer, percent in paper))
    late = space.speedup(((2, 5), (4, 5), (7, 5)))
    earlier = space_of(late + 0.01).references()
    assert [layer for layer, _ in earlier["paper"]] == [1, 4, 6]  # 20, 50, 80 % of 8
    assert space_of(99.0).references() == {}


def test_layers_with_windows_are_no_places(tmp_path: Path) -> None:
    """A token is dropped only where it was seen: after layers 3 and 6 of 8; the last layer saves nothing."""
    space, study = space_of(1.3, cuts=3), in_memory(tmp_path)
    assert space.places == [1, 2, 3, 4, 5, 6, 7]
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention", "full_attention"]
    vars(space.model_config).update(sliding_window=64, layer_types=kinds)
    assert space.places == [3, 6]
    search(study, space, quality, 8)
    assert {layer for cuts in tried_in(study) for layer, _ in cuts} == {3, 6}
    paper = space.references()["paper"]
    assert [layer for layer, _ in paper] == [3, 6]  # 2, 4 and 7
    assert next(iter(tried_in(study))) == paper


@pytest.mark.parametrize("target", [1.3, 2.0])
@pytest.mark.parametrize("cuts", [((2, 50),), ((2, 5), (5, 95)), ((3, 95), (4, 90), (6, 70))], ids=str)
def test_fitted_schedule_prunes_as_little_as_reaches_the_target(cuts: Cuts, target: float) -> None:
    space = space_of(target)
    fitted = space.fitted(cuts)
    assert [layer for layer, _ in fitted] == [layer for layer, _ in cuts]
    assert target <= space.speedup(fitted) < 1.03 * target
    order = sorted(range(len(cuts)), key=lambda index: cuts[index][1])
    assert [fitted[index][1] for index in order] == sorted(percent for _, percent in fitted)  # the shape stays
    assert space_of(3.0).fitted(((6, 50), (7, 95))) == ((6, 5), (7, 5))  # out of reach: prunes most


# -------------------------------------------------------------------------------------------------------------- search

EVERY: list[Cuts] = [
    tuple(zip(layers, percents, strict=True))
    for number in (1, 2)
    for layers in combinations(range(1, 5), number)
    for percents in product(range(20, 81, 20), repeat=number)
]


def quality(cuts: Cuts) -> float:
    """Lower for more pruning, much lower for early pruning."""
    return 100 - sum((100 - percent) ** 1.2 / (3 * layer) for layer, percent in cuts)


def searched(folder: Path, space: Space, trials: int, score: Callable[[Cuts], float] = quality) -> dict[Cuts, float]:
    study = open_study(folder, {}, seed=0)
    search(study, space, score, trials)
    return tried_in(study)


def in_memory(folder: Path) -> optuna.Study:
    """A study with the sampler of a stored one, which commits every draw to the disk."""
    return optuna.create_study(direction="maximize", sampler=open_study(folder, {}, seed=0).sampler)


def test_best_schedule_is_that_of_an_exhaustive_search(tmp_path: Path) -> None:
    space, study = space_of(2.0, layers=5, cuts=2, ratios=range(20, 81, 20)), in_memory(tmp_path)
    feasible = [cuts for cuts in EVERY if space.reaches(cuts)]
    search(study, space, quality, 24)
    tried = tried_in(study)
    measured = [trial for trial in study.trials if trial.values]
    assert len(tried) == len(measured) <= 24 < len(feasible) / 2  # no schedule twice
    assert set(tried) <= set(feasible)
    assert quality(ranked(tried, space)[0]) == max(map(quality, feasible))


def test_schedules_are_ranked_by_score_and_equal_ones_by_speedup() -> None:
    scores: dict[Cuts, float] = {((2, 50),): 90, ((3, 50),): 95, ((4, 50),): 95, ((6, 50),): 10}
    assert ranked(scores, space_of(1.1)) == [((4, 50),), ((3, 50),), ((2, 50),), ((6, 50),)]


def test_study_begins_with_the_reference_and_resumes(tmp_path: Path) -> None:
    space = space_of(2.0)
    first = [*space.references().values()]
    assert [*searched(tmp_path, space, 1)] == first

    def stopped(cuts: Cuts) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path, space, 4, stopped)
    tried = searched(tmp_path, space, 4)
    assert (len(tried), [*tried][:1]) == (4, first)
    assert searched(tmp_path, space, 4, stopped) == tried  # nothing is left to do


def test_schedule_without_a_score_is_left_out_and_another_one_comes(tmp_path: Path) -> None:
    asked: list[Cuts] = []

    def score(cuts: Cuts) -> float:
        asked.append(cuts)
        return math.nan if len(asked) == 2 else quality(cuts)

    assert [*searched(tmp_path, space_of(1.2), 3, score)] == [asked[0], *asked[2:]]
    assert len(asked) == 4


def test_search_ends_when_a_small_space_holds_no_further_schedule(tmp_path: Path) -> None:
    study = in_memory(tmp_path)
    search(study, space_of(1.2, layers=2, cuts=1), quality, 3)  # after layer 1, the one ratio that just reaches it
    assert len(tried_in(study)) == 1


# ------------------------------------------------------------------------------------------------------------- command


@pytest.mark.usefixtures("two_have_an_interval")
@pytest.mark.slow
def test_study_of_real_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tune(config_of(*QUICK)) == Path("study")
    keys = {
        name: {visit.key for folder in Path(name).iterdir() for visit in read_visits(folder)}
        for name in ("study/trials", "runs")
    }
    assert len(list(Path("study/trials").iterdir())) == 2  # a run for each schedule
    both = {case.key for case in prepare(run_of("dataset=[lookup,shots]", "limit=4")).cases}
    assert len(keys["study/trials"]) == len(keys["runs"]) == 4
    assert keys["study/trials"] | keys["runs"] == both  # the search touches nothing of the other half
    table = pd.read_csv("study/schedules.csv")
    assert len(table) == 2
    content = yaml.safe_load(Path("study/tuned.yaml").read_text())
    schedule = {str(layer): ratio for layer, ratio in content["schedule"].items()}
    assert json.loads(table["schedule"].tolist()[0]) == schedule
    assert (content["layers"], content["model"]) == (8, "tiny")
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("tiny-tuned_")
    compared = pd.read_csv(folder / "summary.csv").query("kind == 'all'").set_index("method")
    ends = [compared.loc["tuned", f"score{end}"] for end in ("", "_low", "_high")]
    assert content["test_score"] == pytest.approx(ends, abs=0.02)
    assert re.search(r"on test \S+, [+-]\S+ \[\S+, \S+\] to paper's\nRun it: .* model=tiny ", capsys.readouterr().out)
    run = run_of("method.schedule=tuned/study", "dataset=lookup", "limit=1")
    assert prepare(run).identity["arms"]["lazy"]["method"]["schedule"] == schedule
    monkeypatch.setattr(eval.run.decode, "generate", None)  # nothing is measured again
    tune(config_of(*QUICK))
    for changed, named in (("seed=1", "seed: 0 there"), ("limit=2", "tuned_on: "), ("method.revive=false", "arms.")):
        with pytest.raises(UserError, match=named):
            tune(config_of(*QUICK, changed))


@pytest.mark.slow
def test_study_whose_best_schedule_is_the_reference_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tune(config_of(*QUICK, "trials=1", "layers=3"))  # the reference comes first
    assert [*yaml.safe_load(Path("study/tuned.yaml").read_text())["schedule"]] == [2, 4, 7]  # 30, 60, 90 % of 8
    assert "; it is the one like the paper's\nRun it: " in capsys.readouterr().out
    (folder,) = Path("runs").iterdir()
    assert set(pd.read_csv(folder / "summary.csv")["method"]) == {"baseline", "tuned"}
