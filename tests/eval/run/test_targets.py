"""Parameters solved for speedups, checked by arithmetic; separate for each task, model and method."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from transformers import AutoConfig

from eval.analysis.paper_tables import PUBLISHED
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.suite import Dataset
from eval.run import targets
from eval.run.arms import MethodAsked
from eval.run.run import prepare
from eval.run.targets import as_yaml, is_tuned, read_tuned, with_layers
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from lazyllm.methods import StaticPruning
from lazyllm.models.load import load_config
from lazyllm.spec import ModelSpec
from tests.runs import run_of, small_run

LLAMA2 = load_config(ModelSpec("llama2", "dummy"))
_SLIDING = ["sliding_attention"] * 5
GEMMA3 = AutoConfig.for_model(  # the 270M model's: of 18 layers, 6, 12 and 18 have full attention
    "gemma3_text", num_hidden_layers=18, hidden_size=640, intermediate_size=2048, num_attention_heads=4,
    num_key_value_heads=1, head_dim=256, vocab_size=262144, max_position_embeddings=32768, sliding_window=512,
    layer_types=[*_SLIDING, "full_attention"] * 3,
)  # fmt: skip
LAZY = {"name": "lazy", "schedule": "table1"}
STATIC = {"name": "static_pruning", "layer": 2, "keep": "table1"}
DROP = {"name": "random_drop", "keep": "table1", "seed": 3}


def solved(settings: dict, dataset: Dataset, shape: Any, column: str | None, **options: int) -> dict[str, Any]:
    """The settings for a dataset and a model, with numbers for targets."""
    arm = MethodAsked.of(settings, Depth.of(shape)).arm("arm", [dataset], shape, column, **options)
    return (arm.solved or {dataset.name: settings})[dataset.name]


def flops(counts: list[int]) -> float:
    """A prefill of Llama 2 7B by hand: 2 FLOPs per weight and token, 4 * width per causal pair, one row of logits."""
    weights = 4 * 4096**2 + 3 * 4096 * 11008
    return sum(2 * weights * n + 4 * 4096 * n * (n + 1) / 2 for n in counts) + 2 * 4096 * 32000


def kept(ratio: float, n: int) -> int:
    return -((-round(ratio * 10_000) * n) // 10_000)  # a ceiling in whole numbers


def test_parameters_reach_the_papers_speedup_by_hand() -> None:
    table = pd.read_csv(PUBLISHED / "table1.csv").set_index(["task", "method"])
    for dataset in (dataset for dataset in DATASETS.values() if dataset.suite == "longbench"):
        n, speedup = 3376, table["llama2_ttft_speedup"][dataset.task]
        schedule = solved(LAZY, dataset, LLAMA2, "llama2")["schedule"]
        assert len(set(schedule.values())) == 1
        counts, left = [], n
        for layer in range(1, 33):
            counts.append(left)
            left = kept(schedule[layer], left) if layer in schedule else left
        assert flops([n] * 32) / flops(counts) == pytest.approx(speedup["lazy"], abs=0.005)
        keep = solved(STATIC, dataset, LLAMA2, "llama2")["keep"]
        counts = [n] * 2 + [kept(keep, n)] * 30
        assert flops([n] * 32) / flops(counts) == pytest.approx(speedup["static_pruning"], abs=0.005)
        drop = solved(DROP, dataset, LLAMA2, "llama2")
        counts = [kept(drop["keep"], n)] * 32
        assert flops([n] * 32) / flops(counts) == pytest.approx(speedup["random_drop"], abs=0.005)
        assert drop["seed"] == 3


def test_committed_table_is_the_codes() -> None:
    committed = pd.read_csv(PUBLISHED / "table1_parameters.csv")
    assert len(committed.drop_duplicates(["task", "model", "method"])) == len(committed) == 6 * 2 * 3
    datasets = {dataset.task: dataset for dataset in DATASETS.values() if dataset.suite == "longbench"}
    models = {name: load_config(ModelSpec(name, "dummy")) for name in targets.REFERENCE_TOKENS}
    for row in committed.itertuples():
        [settings] = [each for each in (LAZY, STATIC, DROP) if each["name"] == row.method]
        found, given = solved(settings, datasets[row.task], models[row.model], row.model), json.loads(row.parameters)
        assert json.loads(json.dumps(found)) == given | {key: found[key] for key in found.keys() & {"name", "seed"}}
        ideal = MethodAsked.of(found).make().ideal_speedup(models[row.model], targets.REFERENCE_TOKENS[row.model])
        assert (row.ideal_ttft_speedup, row.prompt_tokens) == (round(ideal, 3), targets.REFERENCE_TOKENS[row.model])
        assert row.paper_ttft_speedup == targets.table1_speedup(row.task, row.method, row.model)
        assert row.paper_ttft_speedup == pytest.approx(ideal, abs=0.005)


def test_tasks_models_and_suites_differ() -> None:
    qa, code = DATASETS["hotpotqa"], DATASETS["lcc"]
    assert solved(LAZY, qa, LLAMA2, "llama2") != solved(LAZY, code, LLAMA2, "llama2")
    assert solved(LAZY, qa, LLAMA2, "llama2") != solved(LAZY, qa, LLAMA2, "xgen")
    assert solved(LAZY, qa, LLAMA2, "llama2") == solved(LAZY, DATASETS["musique"], LLAMA2, None)
    assert solved(LAZY, DATASETS["hops"], load_config(ModelSpec("tiny")), None)["schedule"].keys() == {2, 4, 7}


def test_speedup_is_a_preset_and_numbers_are_left_alone() -> None:
    qa = DATASETS["hotpotqa"]
    found = solved({"name": "random_drop", "keep": "2.0x"}, qa, LLAMA2, "llama2")["keep"]
    assert flops([3376] * 32) / flops([kept(found, 3376)] * 32) == pytest.approx(2.0, abs=0.005)
    for settings in ({"name": "lazy", "schedule": "paper"}, {"name": "static_pruning", "layer": 2, "keep": 0.3}):
        assert solved(settings, qa, LLAMA2, None) is settings


def test_early_depths_serve_speedups_beyond_late_ones() -> None:
    by_task = {task: solved(LAZY, DATASETS[name], LLAMA2, "xgen")["schedule"] for task, name in
               (("code", "lcc"), ("synthetic", "passage_count"))}  # fmt: skip
    assert list(by_task["code"]) == [6, 12, 19]  # 3.47 is beyond 0.3 at 30, 60 and 90 % (2.48) and at 20, 50, 80 %
    assert list(by_task["synthetic"]) == [3, 9, 16]  # 4.77
    assert all(ratio >= 0.3 for schedule in by_task.values() for ratio in schedule.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "baseline", "keep": "table1"}, "keep=table1"),
        ({"name": "static_pruning", "layer": "table1", "keep": 0.5}, "layer=table1"),
        ({"name": "prompt_compression", "keep": "2.0x"}, "cannot be solved"),
        ({"name": "uniprefill", "p": "1.5x"}, "solved for p=1.5x, .*depends on the prompt: give a number; .*p=0.99$"),
        ({"name": "asl", "keep": "2x"}, "solved for keep=2x, .*depends on the prompt: give a number; .*keep=2048$"),
        ({"name": "uniprefill", "window": "1.5x"}, "no preset as window=1.5x"),
    ],
)
def test_presets_of_other_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        MethodAsked.of(settings)
    assert "\n" not in str(refused.value)


def test_field_sets_every_speed_but_those_that_depend_on_the_prompt() -> None:
    arms = run_of("experiment=field", "speedup=3x", "draft=tiny").arms
    measured = {name: settings for name, settings in arms.items() if "3x" not in settings.values()}
    assert measured == {name: {"name": name} for name in ("baseline", "asl", "uniprefill")}
    p = MethodAsked.of(arms["uniprefill"]).canonical()["p"]  # a table's row says at which settings they ran
    assert (p, MethodAsked.of(arms["asl"]).canonical()["keep"]) == (0.99, 2048)  # of their papers


@pytest.mark.parametrize(("target", "instead"), [("40x", "give less"), ("0.5x", "give 1x")])
def test_speedup_out_of_reach_is_refused(target: str, instead: str) -> None:
    for settings in ({"name": "lazy", "schedule": target}, STATIC | {"keep": target}):
        with pytest.raises(UserError, match=f"cannot reach .* speedup of {float(target[:-1])} on .*; {instead}$"):
            solved(settings, DATASETS["lcc"], LLAMA2, None)


@pytest.mark.parametrize("target", ["table1", "2.16x"])  # Table 1's, by its name and as a number
def test_a_target_is_solved_for_no_more_tokens_than_prompts_may_have(target: str) -> None:
    qa, shorter = DATASETS["hotpotqa"], DATASETS["hops"]
    for limit, n in ((1000, 1000), (3376, 3376), (9999, 3376), (None, 3376)):
        keep = solved(STATIC | {"keep": target}, qa, LLAMA2, "llama2", limit=limit)["keep"]
        counts = [n] * 2 + [kept(keep, n)] * 30
        assert flops([n] * 32) / flops(counts) == pytest.approx(2.16, abs=0.005)
    settings = STATIC | {"keep": target}
    by_limit = [solved(settings, shorter, LLAMA2, "llama2", limit=limit) for limit in (None, 1024, 4000)]
    assert by_limit == by_limit[:1] * 3  # its own 1,024 tokens


def test_shares_of_the_depth_become_layers() -> None:
    assert with_layers({"12.5%": 0.5, "50%": 0.7}, Depth(32)) == {4: 0.5, 16: 0.7}
    assert with_layers("paper", Depth(32)) == "paper"
    assert with_layers({"40%": 0.5, "90%": 0.7}, Depth.of(GEMMA3)) == {6: 0.5, 12: 0.7}  # 7 and 16 have windows


@pytest.mark.parametrize(("shape", "layer"), [(LLAMA2, 2), (GEMMA3, 6)], ids=["llama2", "gemma3"])
def test_layer_of_static_pruning_is_a_number_in_records(shape: Any, layer: int) -> None:
    asked = MethodAsked.of({"name": "static_pruning", "keep": "1.5x"}, Depth.of(shape))
    assert asked.canonical() == {"name": "static_pruning", "layer": layer, "keep": "1.5x"}
    dataset = DATASETS["hotpotqa"]
    arm = asked.arm("static_pruning", [dataset], shape)
    assert arm.solved is not None
    assert arm.solved[dataset.name]["layer"] == layer
    assert arm.method(dataset.name) == StaticPruning(layer, arm.solved[dataset.name]["keep"])
    by_number = MethodAsked.of({"name": "static_pruning", "layer": 2, "keep": "1.5x"}, Depth.of(shape))
    assert by_number.canonical()["layer"] == 2


def test_compression_takes_its_authors_share() -> None:
    settings = {"name": "prompt_compression", "keep": "table1", "unit": "sentence"}
    assert solved(settings, DATASETS["lcc"], LLAMA2, None)["keep"] == 0.5


def written(folder: Path, schedule: dict[int, float], layers: int) -> str:
    (folder / "tuned.yaml").write_text(as_yaml("NAME", schedule, layers, {"model": "a: b # c", "score": [99.5, None]}))
    return f"tuned/{folder}"


def test_tuned_schedule_is_read_from_a_folder_and_a_file(tmp_path: Path) -> None:
    reference = written(tmp_path, {2: 0.3, 5: 0.55}, 8)
    content = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert content == {"schedule": {2: 0.3, 5: 0.55}, "layers": 8, "model": "a: b # c", "score": [99.5, None]}
    for name in (reference, f"{reference}/tuned.yaml"):
        assert is_tuned(name)
        assert with_layers(name, Depth(8)) == {2: 0.3, 5: 0.55}
    assert not is_tuned("paper")
    assert not is_tuned({2: 0.3})


def test_run_with_a_tuned_schedule_is_one_with_its_numbers(tmp_path: Path) -> None:
    reference = written(tmp_path, {2: 0.3, 5: 0.55}, 8)
    schedules = (reference, {2: 0.3, 5: 0.55}, {2: 0.3, 5: 0.5})
    runs = [small_run(None, method={"name": "lazy", "schedule": schedule}) for schedule in schedules]
    assert prepare(runs[0]).identity == prepare(runs[1]).identity
    assert prepare(runs[0]).identity["arms"]["lazy"]["method"]["schedule"] == {"2": 0.3, "5": 0.55}
    assert prepare(runs[0]).identity != prepare(runs[2]).identity
    assert prepare(runs[0]).arms[1].method("lookup") == prepare(runs[1]).arms[1].method("lookup")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no tuned schedule"),
        ("layers: 8", "KeyError: 'schedule'"),
        ("schedule: [", "cannot be read as a tuned schedule"),
        ("schedule: {2: 1.5}\nlayers: 8", "lies in"),
        ("just words", "cannot be read as a tuned schedule"),
        ("schedule: {8: 0.3, 16: 0.5}\nlayers: 32", r"of 32 layers, but this one has 8: .*\{25%: 0.3, 50%: 0.5\}"),
    ],
)
def test_unusable_tuned_schedules_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "tuned.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_tuned(f"tuned/{tmp_path}", 8)
    with pytest.raises(UserError, match=message):  # before a model loads
        _ = prepare(small_run(tmp_path / "run", method={"name": "lazy", "schedule": f"tuned/{tmp_path}"})).arms
