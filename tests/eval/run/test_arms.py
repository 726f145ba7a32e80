"""Arms: labels, grids, seeds, and hyperparameters that are solved for speedups, by arithmetic."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import AutoConfig

from eval.analysis.paper_tables import PUBLISHED
from eval.arms import REFERENCE_TOKENS, expand, table1_speedup
from eval.benchmarks.datasets import DATASETS
from eval.compose import read
from eval.run.check import choose_data, spec_of, suite_of
from eval.run.prepare import limit_of_prompts, prepare, resolve_arms
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from lazyllm.methods import Baseline, Lazy, Method, RandomDrop, StaticPruning
from lazyllm.methods.support.schedule import Schedule
from lazyllm.models.config import load_config, shape_of
from lazyllm.spec import ModelSpec
from tests.conftest import ROOT
from tests.runs import TINY, arm, prepared, small_config

LLAMA2 = load_config(ModelSpec("llama2", "dummy"))
QA, CODE = DATASETS["hotpotqa"], DATASETS["lcc"]


def flops(config: Any, counts: list[int]) -> float:
    """Count a prefill's FLOPs by hand.

    2 per weight and token, 4 per head, width of a head and causal pair, and one row of logits.
    """
    width, heads, groups = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    head = getattr(config, "head_dim", None) or width // heads
    weights = 2 * width * head * (heads + groups) + 3 * width * config.intermediate_size
    pairs = sum(n * (n + 1) / 2 for n in counts)
    return sum(counts) * 2 * weights + 4 * heads * head * pairs + 2 * width * config.vocab_size


def kept(ratio: float, n: int) -> int:
    return -((-round(ratio * 10_000) * n) // 10_000)  # a ceiling in whole numbers


def counts_of(method: Method, n: int, layers: int) -> list[int]:
    """Count the tokens that enter each layer, as the paper describes three of its methods."""
    if isinstance(method, RandomDrop):
        return [kept(method.keep, n)] * layers
    if isinstance(method, StaticPruning):
        assert method.layer is not None
        return [n] * method.layer + [kept(method.keep, n)] * (layers - method.layer)
    assert isinstance(method, Lazy)
    counts, schedule = [], Schedule.parse(method.schedule, Depth(layers)).keep
    for layer in range(1, layers + 1):
        counts.append(n)
        n = kept(schedule.get(layer, 1), n)
    return counts


def test_committed_parameters_are_solved_and_reach_the_papers_speedups() -> None:
    committed = pd.read_csv(PUBLISHED / "table1_parameters.csv")
    paper = pd.read_csv(PUBLISHED / "table1.csv").set_index(["task", "method"])
    assert (
        len(committed.drop_duplicates(["task", "model", "method"])) == len(committed) == 6 * 2 * 3
    )
    datasets = {
        dataset.task: dataset for dataset in DATASETS.values() if dataset.suite == "longbench"
    }
    for row in committed.itertuples():
        config, n = load_config(ModelSpec(row.model, "dummy")), REFERENCE_TOKENS[row.model]
        settings = [f"model={row.model}", "experiment=table1", f"dataset={datasets[row.task].name}"]
        unsolved = next(entry for entry in expand(read(settings)) if entry.name == row.method)
        solved = unsolved.at(Depth.of(config))
        method = solved.method(datasets[row.task], config, row.model, None, None)
        expected = json.loads(row.parameters)
        if row.method == "lazy":
            expected["schedule"] = Schedule(expected["schedule"])
        assert {key: getattr(method, key) for key in expected} == expected
        speedup = flops(config, [n] * 32) / flops(config, counts_of(method, n, 32))
        assert (row.prompt_tokens, row.ideal_ttft_speedup) == (n, round(speedup, 3))
        published = paper[f"{row.model}_ttft_speedup"][row.task, row.method]
        assert (
            row.paper_ttft_speedup == table1_speedup(row.task, row.method, row.model) == published
        )
        assert speedup == pytest.approx(published, abs=0.005)


EXPERIMENTS = {
    "demo": 5, "table1": 9, "figure5": 39, "figure6": 36, "table2": 2, "revival": 9, "field": 13,
    "speed": 22,
}  # fmt: skip


@pytest.mark.parametrize("model", ["llama2", "xgen", "smollm2"])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_arms_of_an_experiment_reach_their_speedups(experiment: str, model: str) -> None:
    """One baseline, and every speedup by the arithmetic above."""
    rows = [] if experiment in ("demo", "speed") else ["dataset=[hotpotqa,lcc]"]
    config = read([f"experiment={experiment}", f"model={model}", *rows])
    datasets, data = choose_data(config, check_rows=False)
    length, shape = suite_of(datasets).length(data), shape_of(spec_of(config))
    limit = limit_of_prompts(config, suite_of(datasets), data, shape.max_position_embeddings)
    column, layers = config.model.paper or "llama2", shape.num_hidden_layers
    assert len(expand(config)) == EXPERIMENTS[experiment]
    arms, methods, _ = resolve_arms(config, datasets, length, limit)
    n = min(limit, length or REFERENCE_TOKENS[column])
    checked = 0
    for entry in arms:
        for dataset in datasets:
            if not entry.solves or entry.name not in ("lazy", "static_pruning", "random_drop"):
                continue
            aim = entry.speedup
            if aim == "table1":
                aim = table1_speedup(dataset.task, entry.name, column)
            counts = counts_of(methods[entry.label, dataset.name], n, layers)
            found = flops(shape, [n] * layers) / flops(shape, counts)
            assert found == pytest.approx(aim, abs=0.005), entry.label
            checked += 1
    assert checked or experiment == "figure6"


GRID = {
    f"random_drop keep={keep} seed {seed}": RandomDrop(keep, seed)
    for keep in (0.3, 0.6)
    for seed in (0, 1)
}


@pytest.mark.parametrize(
    ("overrides", "methods"),
    [
        ([], {"lazy": Lazy("paper")}),
        (["method=baseline"], {}),
        (["method=lazy", "method.schedule={2: 0.4, 5: 0.5}"], {"lazy": Lazy({2: 0.4, 5: 0.5})}),
        # a method's seed is the run's, unless it has its own
        (["method=random_drop", "seed=3"], {"random_drop": RandomDrop(0.8, 3)}),
        (["method=random_drop", "seed=3", "method.seed=5"], {"random_drop": RandomDrop(0.8, 5)}),
        (["arms=[{name: random_drop, keep: 0.5}]", "seed=3"], {"random_drop": RandomDrop(0.5, 3)}),
        (["arms=random_drop"], {"random_drop": RandomDrop(0.8)}),
        (
            ["arms=[random_drop,{name: static_pruning, label: mine}]"],
            {"random_drop": RandomDrop(0.8), "mine": StaticPruning(keep=0.3)},
        ),
        (["method=random_drop", "method.seeds=2", "method.keep=[0.3,0.6]"], GRID),
        (
            ["arms=[{name: static_pruning, label: drop, keep: 0.5, layer: [1,2]}]"],
            {"drop layer=1": StaticPruning(1, 0.5), "drop layer=2": StaticPruning(2, 0.5)},
        ),
        (
            ["method=lazy", "method.schedule=[{2: 0.4},paper]"],
            {"lazy schedule={2: 0.4}": Lazy({2: 0.4}), "lazy schedule=paper": Lazy("paper")},
        ),
        # an experiment's list is replaced as a whole, or changed in one place
        (["experiment=table2", "arms=[random_drop]"], {"random_drop": RandomDrop(0.8)}),
        (["experiment=table2", "arms=null", "method=lazy"], {"lazy": Lazy("paper")}),
        (
            ["experiment=figure7", "+arms.0.schedule=2:0.5"],
            {"lazy": Lazy("2:0.5")},
        ),
    ],
)  # fmt: skip
def test_settings_make_arms_behind_the_baseline(
    overrides: list[str], methods: dict[str, object]
) -> None:
    arms = expand(read(overrides))
    found = [(entry.label, entry.sample()) for entry in arms]
    assert found == [("baseline", Baseline()), *methods.items()]


def test_baseline_may_be_an_arm_with_a_label_or_none() -> None:
    named = expand(read(["arms=[lazy,{name: baseline, label: standard}]"]))
    assert [entry.label for entry in named] == ["standard", "lazy"]
    assert [entry.label for entry in expand(read(["baseline=false"]))] == ["lazy"]


def test_a_runs_speedup_is_for_arms_without_a_speed_of_their_own() -> None:
    def speeds(*overrides: str) -> dict[str, Any]:
        return {entry.label: entry.speedup for entry in expand(read(overrides))}

    arms = "arms=[lazy,{name: random_drop, keep: 0.5},{name: fastkv, speedup: [1.5, 2x]},asl]"
    assert speeds(arms, "speedup=3x") == {
        "baseline": None, "lazy": 3, "random_drop": None, "fastkv speedup=1.5x": 1.5,
        "fastkv speedup=2x": 2, "asl": None,
    }  # fmt: skip
    # a method's default is no speed of its own
    assert speeds("method=random_drop", "speedup=2")["random_drop"] == 2
    assert speeds("method=lazy", "method.speedup=table1")["lazy"] == "table1"
    field = speeds("experiment=field", "speedup=3x")
    assert {label for label, speed in field.items() if speed != 3} == {
        "baseline",
        "asl",
        "uniprefill",
    }
    # a table's row says at which settings these two ran, those of their papers
    adaptive = {entry.label: entry.canonical() for entry in expand(read(["experiment=field"]))}
    assert (adaptive["uniprefill"]["p"], adaptive["asl"]["keep"]) == (0.99, 2048)


def test_arms_out_of_reach_are_left_out_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    arms = [
        {"name": "random_drop", "speedup": 6},
        {"name": "fastkv", "speedup": 2},  # a cut half-way leaves half of the layers whole
        {"name": "specprefill", "draft": None, "speedup": 2},
    ]
    run = prepare(small_config(None, arms=arms))
    assert [entry.label for entry in run.arms] == ["baseline", "random_drop"]
    out_of_reach = (
        "left out: fastkv cannot reach an ideal TTFT speedup of 2 on 8 layers: give a lower one"
    )
    assert out_of_reach in caplog.text
    assert "left out: specprefill cannot" in caplog.text
    assert "name a draft" in caplog.text
    first, second = run.about["cautions"]  # which the run's table repeats
    assert (first, "specprefill cannot" in second) == (out_of_reach, True)
    caplog.clear()
    with pytest.raises(UserError, match="no method reaches its speedup on this model: fastkv"):
        prepare(small_config(None, arms=arms[1:2]))
    assert "left out" not in caplog.text  # it is said once


def test_a_run_notes_what_its_table_must_say_of_its_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Repeated and invalid rows, and prompts of another length than speedups are solved for."""
    about = {
        "file": "rows.jsonl", "template": "{report}", "context": "report", "answers": "answer",
        "metric": "f1", "max_new_tokens": 2, "prompt_tokens": 400,
    }  # fmt: skip
    report = " ".join(["copper river"] * 1000)  # is cut to the limit
    rows = [{"report": report, "answer": answer} for answer in ("river", "river", "copper", "")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.yaml").write_text(json.dumps({"mine": about}))
    data = {"dataset": str(tmp_path / "mine.yaml"), "limit": None, "data": {"on_error": "skip"}}

    def note(tokens: int, **arm: Any) -> list[str]:
        caplog.clear()
        model = TINY | {"max_prompt_tokens": tokens}
        run = prepare(small_config(None, model=model, arms=[{"name": "lazy"} | arm], **data))
        assert [line for line in run.about["cautions"] if line not in caplog.messages] == []
        return run.about["cautions"]

    repeated, skipped, *others = note(600, speedup=1.5)
    assert repeated == "mine: 1 of 3 rows repeat others, but count as independent"
    assert re.match(
        r"skipped 1 row \(data.on_error=skip\), the first: .*rows.jsonl:4: field", skipped
    )
    (length,) = others
    assert "solved for prompts of 400 tokens (prompt_tokens), but these have 600" in length
    for quiet in (note(600), note(450, speedup=1.5), note(300, speedup=1.5)):
        assert quiet == [repeated, skipped]


def test_a_speedup_is_solved_for_no_more_tokens_than_prompts_may_have() -> None:
    for limit, n in ((1000, 1000), (3376, 3376), (9999, 3376), (None, 3376)):
        method = arm("a", "static_pruning", layer=2, speedup=2.16).method(
            QA, LLAMA2, "llama2", None, limit
        )
        reached = flops(LLAMA2, [n] * 32) / flops(LLAMA2, counts_of(method, n, 32))
        assert reached == pytest.approx(2.16, abs=0.005)
    pruning = arm("a", "static_pruning", layer=2, speedup=2.0)
    short = [
        pruning.method(DATASETS["hops"], LLAMA2, None, None, limit) for limit in (None, 1024, 4000)
    ]
    assert short == short[:1] * 3  # its own 1,024 tokens


def test_shares_of_the_depth_become_layers_in_records() -> None:
    sliding = ["sliding_attention"] * 5
    gemma3 = AutoConfig.for_model(  # the 270M model: layers 6, 12 and 18 see the whole prompt
        "gemma3_text", num_hidden_layers=18, hidden_size=640, intermediate_size=2048,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, vocab_size=262144,
        max_position_embeddings=32768, sliding_window=512,
        layer_types=[*sliding, "full_attention"] * 3,
    )  # fmt: skip
    shares = arm("a", "lazy", schedule={"40%": 0.5, "90%": 0.7})
    for config, layers in ((LLAMA2, {12: 0.5, 28: 0.7}), (gemma3, {6: 0.5, 12: 0.7})):
        assert shares.at(Depth.of(config)).canonical() == {"name": "lazy", "schedule": layers}
    for config, layer in ((LLAMA2, 2), (gemma3, 6)):
        solved = arm("a", "static_pruning", speedup=1.5).at(Depth.of(config))
        # the speedup gives keep
        assert solved.canonical() == {"name": "static_pruning", "layer": layer}
        method: Any = solved.method(QA, config, None, None, None)
        assert method == StaticPruning(layer, method.keep)


def test_prompt_compression_takes_its_authors_share_for_the_papers_speedup() -> None:
    compression = arm("a", "prompt_compression", unit="sentence", speedup="table1")
    method: Any = compression.method(CODE, LLAMA2, None, None, None)
    assert (method.keep, method.unit) == (0.5, "sentence")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("name: lazy, schedule: {2: 0.3}", "name: lazy, schedule: {25%: 0.3}"),
        ("name: random_drop, keep: 0.5, seed: 1", "name: random_drop, keep: 0.5, seed: 2"),
        ("name: lazy, speedup: 2", "name: lazy, speedup: 2x"),
        ("name: baseline", "name: baseline"),
    ],
)
def test_two_arms_of_one_setting_are_refused(a: str, b: str) -> None:
    with pytest.raises(
        UserError, match="arms: b has the settings of a: change one, or leave it out"
    ):
        prepared(f"arms=[{{label: a, {a}}},{{label: b, {b}}}]", "dataset=lookup", "limit=1")


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    text = (ROOT / "lazyllm" / "methods" / "static_pruning.py").read_text(encoding="utf-8")
    for which in ("old", "new"):
        (tmp_path / which).mkdir()
        (tmp_path / which / "mine.py").write_text(f"{text}# {which}\n", encoding="utf-8")
    arms = [
        f"{{label: {name}, name: {tmp_path}/{name}/mine.py, keep: 0.5}}" for name in ("old", "new")
    ]
    with pytest.raises(UserError, match="another version of a file takes another name"):
        prepared(f"arms=[{','.join(arms)}]", "dataset=lookup", "limit=1")
