"""The command: the files it touches and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pandas as pd
import pytest
import yaml
from tests.eval.benchmarks.test_split import examples_of

import eval.run.measure
from eval.benchmarks.subsets import in_half
from eval.run.config import check_arguments, compose_config, register_schema
from eval.run.prepare import prepare
from eval.run.resolved import build_method
from eval.run.targets import at_depth
from eval.store.record import Record
from eval.tune.findings import difference, told_apart
from eval.tune.search import tune
from eval.tune.settings import TuneConfig, check_installed, to_tune_config
from eval.tune.space import Candidate
from eval.tune.study import Scored, Tried
from lazyllm.errors import UserError
from lazyllm.models.load import load_config
from lazyllm.spec import ModelSpec
from tests.eval.store.made import measurement
from tests.runs import run_of, small_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("search")]  # one worker makes what they share

QUICK = (
    "dataset=[lookup,shots]",
    "limit=6",
    "max_new_tokens=4",
    "timing.warmup=0",
    "threads=1",
    "trials=3",
    "layers=2",
)


def config_of(*overrides: str):
    register_schema(TuneConfig)
    try:
        check_arguments(overrides, TuneConfig)
        return to_tune_config(compose_config(overrides))
    finally:
        register_schema()


def ids_below(folder: Path) -> dict[str, list[tuple[str, str]]]:
    return {
        file.parent.name: [Record.from_json(line).key for line in file.read_text().splitlines()]
        for file in folder.glob("*/records.jsonl")
    }


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    return tune(config_of(*QUICK, "target_speedup=2.0", f"out={tmp_path_factory.mktemp('tune') / 'study'}"))


def test_what_is_held_out_is_never_touched_by_the_search(study: Path) -> None:
    run = small_run(study, limit=6)
    ids = {
        name: [case.example.id for case in prepare(run).cases if case.dataset.name == name]
        for name in ("lookup", "shots")
    }
    tuning = {(name, example.id) for name in ids for example in in_half(name, examples_of(ids[name]), "tuning")}
    everything = {(name, row_id) for name in ids for row_id in ids[name]}
    assert (len(everything), len(tuning)) == (12, 6)
    trials, finals = ids_below(study / "trials"), ids_below(study / "final")
    assert len(trials) == 3
    assert all(set(keys) == tuning and len(keys) == 6 for keys in trials.values())
    assert {json.loads((study / "final" / name / "run.json").read_text())["config"]["half"] for name in finals} == {
        "held-out"
    }
    assert 2 <= len(finals) <= 3  # the paper's, a uniform one, and the tuned one if it differs
    assert all(set(keys) == everything - tuning and len(keys) == 6 for keys in finals.values())


def test_the_output(study: Path) -> None:
    table = pd.read_csv(study / "front.csv")
    assert list(table["kind"]) == ["trial"] * 3 + ["paper", "uniform", "tuned"]
    trials, finalists = table[table["kind"] == "trial"], table[table["kind"] != "trial"].set_index("kind")
    assert (table["ideal_speedup"] >= 2.0).all()
    assert finalists.loc["tuned", "tuning_score"] == trials["tuning_score"].max()
    assert (finalists["held_out_examples"] == 6).all()
    assert (finalists["ttft_speedup_low"] <= finalists["ttft_speedup_high"]).all()
    text = (study / "front.md").read_text()
    assert "6 other examples" in text
    assert "of each two neighbours" in text
    assert re.search(r"tuned, .* scores (better than|worse than|the same within the interval as) paper, ideal", text)
    content = json.loads((study / "front.json").read_text())
    assert content["counts"]["measured"] == 3
    assert content["provenance"]["versions"]["torch"]
    assert content["identity"]["tuned_on"].startswith("6 examples, ")
    for suffix in ("svg", "pdf", "png"):
        assert (study / f"front.{suffix}").stat().st_size > 1000


def test_a_run_takes_what_was_found(study: Path) -> None:
    content = yaml.safe_load((study / "tuned.yaml").read_text())
    tuned = pd.read_csv(study / "front.csv").set_index("kind").loc["tuned", "schedule"]
    assert {str(layer): ratio for layer, ratio in content["schedule"].items()} == json.loads(str(tuned))
    assert (content["layers"], content["model"], content["target_speedup"]) == (8, "tiny", 2.0)
    plan = prepare(run_of(f"method.schedule=tuned/{study}", "dataset=lookup", "limit=1"))
    assert plan.identity["method"]["schedule"] == json.loads(str(tuned))


def test_the_same_command_measures_nothing_again_and_another_is_refused(study: Path, monkeypatch) -> None:
    monkeypatch.setattr(eval.run.measure, "generate", None)
    same = (*QUICK, "target_speedup=2.0", f"out={study}")
    assert tune(config_of(*same)) == study
    for changed, named in (
        ("seed=1", "seed: 0 there, 1 now"),
        ("limit=4", 'tuned_on: "6 examples'),
        ("target_speedup=1.9", "target_speedup: 2.0 there, 1.9 now"),
        ("dataset=lookup", "data: "),
        ("model.dtype=bfloat16", 'dtype: "float32" there'),
        ("method.revive=false", "method: "),
    ):
        with pytest.raises(UserError, match=re.escape(named)):
            tune(config_of(*same, changed))
    monkeypatch.setattr("eval.run.prepare.provenance.code_sha256", lambda *_: "other code" * 4)
    with pytest.raises(UserError, match="code: "):
        tune(config_of(*same))


def test_a_broken_off_trial_goes_on_with_its_next_example(tmp_path: Path, monkeypatch) -> None:
    calls, generate = [], eval.run.measure.generate

    def counted(*arguments, **settings):
        calls.append(1)
        if len(calls) == 9:  # the third example of the second trial
            raise KeyboardInterrupt
        return generate(*arguments, **settings)

    monkeypatch.setattr(eval.run.measure, "generate", counted)
    config = config_of(*QUICK, "trials=2", f"out={tmp_path / 'study'}", "finalists=1")
    with pytest.raises(KeyboardInterrupt):
        tune(config)
    assert sorted(map(len, ids_below(tmp_path / "study" / "trials").values())) == [2, 6]
    calls[:] = [1] * 9
    tune(config)
    assert sorted(map(len, ids_below(tmp_path / "study" / "trials").values())) == [6, 6]
    finals = len(list((tmp_path / "study" / "final").iterdir()))
    assert len(calls) - 9 == 4 + finals * 6 * 2
    counts = json.loads((tmp_path / "study" / "front.json").read_text())["counts"]
    assert (counts["measured"], counts["failed"], counts["running"]) == (2, 1, 0)
    front = list((tmp_path / "study").glob("tuned-*x.yaml"))  # no target: the front's points
    assert len(front) == 1
    assert yaml.safe_load(front[0].read_text())["target_speedup"] is None


def test_a_device_that_fails_ends_the_search_and_no_trial_is_blamed(tmp_path: Path, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("eval.run.measure.generate", "eval.run.loop.release_memory"):
        monkeypatch.setattr(name, broken)
    with pytest.raises(UserError, match="cpu does not recover from the last failure"):
        tune(config_of(*QUICK, f"out={tmp_path / 'study'}"))


def test_nothing_is_reported_while_held_out_examples_failed(tmp_path: Path, monkeypatch) -> None:
    generate, pairs = eval.run.measure.generate, []

    def generate_or_fail(*arguments, **settings):
        if (tmp_path / "study" / "final").exists():
            pairs.append(1)
            if len(pairs) == 1:
                raise RuntimeError("out of memory")
        return generate(*arguments, **settings)

    monkeypatch.setattr(eval.run.measure, "generate", generate_or_fail)
    config = config_of(*QUICK, "trials=1", "finalists=1", f"out={tmp_path / 'study'}")
    with pytest.raises(UserError, match=r"1 held-out examples failed .* the first: lookup, .*: out of memory"):
        tune(config)
    assert not (tmp_path / "study" / "front.csv").exists()
    (tmp_path / "study" / "tuned-9.99x.yaml").write_text("of an earlier front")
    tune(config)  # tries it again
    finals = ids_below(tmp_path / "study" / "final")
    assert all(len(keys) == 6 for keys in finals.values())
    files = [file.stem for file in (tmp_path / "study").glob("tuned*.yaml")]
    table = pd.read_csv(tmp_path / "study" / "front.csv")
    assert files == [kind for kind in table["kind"] if kind.startswith("tuned")]


def test_points_of_one_name_do_not_take_each_others_place() -> None:
    speeds = (1.2, 1.301, 1.304, 1.306, 1.9)
    points = [Tried(Candidate(()), speed, Scored(90 - number, {}, 1)) for number, speed in enumerate(speeds)]
    assert [point.ideal_speedup for point in told_apart(points)] == [1.2, 1.301, 1.306, 1.9]


def test_the_difference_is_of_the_same_examples() -> None:
    def records(scores: dict[str, list[float]]) -> list[Record]:
        return [
            Record(name, str(number), "", 1, 1, measurement(score=score), None)
            for name, values in scores.items()
            for number, score in enumerate(values)
        ]

    better, worse = (
        records({"lookup": [1, 1], "hops": [0.5, 1, 1, 1]}),
        records({"lookup": [1, 0], "hops": [0, 1, 1, 1]}),
    )
    mean, low, high = difference(better, worse)
    assert mean == pytest.approx((50 + 12.5) / 2)
    assert 0 <= low < mean < high
    assert difference(worse, better)[0] == -mean
    assert difference(better, better) == (0, 0, 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=baseline"], "method=baseline: has no schedule to search; give method=lazy"),
        (["method.schedule={2: 0.3}"], "method.schedule is what the search finds"),
        (["target_speedup=1"], "target_speedup=1.0: expected more than 1"),
        (["trials=0"], "trials=0: expected 1 or more"),
        (["timeout_s=0"], "timeout_s=0"),
        (["half=tuning"], "half=tuning: has no meaning in a search"),
        (["timing.paired=false"], "timing.paired=false: has no meaning in a search"),
        (["shard=1/2"], "shard=1/2: has no meaning"),
        (["experiment=demo"], "compare="),
    ],
)
def test_refusals(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        config_of(*overrides)


def test_what_only_the_prompts_tell_is_refused_before_a_model_loads(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("eval.tune.search.load_model", None)
    out = f"out={tmp_path / 'study'}"
    with pytest.raises(UserError, match=r"out of reach. The best ideal speedup .* is 7\.7\d "):
        tune(config_of(*QUICK, out, "target_speedup=40"))
    with pytest.raises(UserError, match="layers=8: expected less than the model's 8"):
        tune(config_of(*QUICK, out, "layers=8"))
    assert not (tmp_path / "study").exists()


def test_a_missing_optuna_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("eval.tune.settings.version", no_package)
    with pytest.raises(UserError, match=re.escape("pip install --editable '.[tune]'")):
        check_installed()


def test_the_experiment_compares_at_the_same_ideal_speedup() -> None:
    experiment = run_of("experiment=tuned")
    assert experiment.config.half == "held-out"
    methods = {label: build_method(at_depth(method, 8)) for label, method in experiment.config.compare.items()}
    for tokens in (512, 1024, 2048):
        speedups = {
            label: method.ideal_speedup(load_config(ModelSpec("tiny")), tokens) for label, method in methods.items()
        }
        for target in ("1.8x", "4.2x"):
            of_target = [speedup for label, speedup in speedups.items() if label.endswith(target)]
            assert len(of_target) == 3
            assert max(of_target) / min(of_target) < 1.05
