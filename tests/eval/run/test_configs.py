"""Every shipped config composes, says how to use it, and agrees with the code it names."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from eval.benchmarks.datasets import DATASETS, TASKS
from eval.run.config import LAUNCHERS, build_method, datasets_of, register_schema, to_run_config
from eval.run.plan import prepare
from eval.store.folder import fingerprint
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, Baseline, Lazy, RandomDrop
from lazyllm.models.load import load_config
from lazyllm.models.spec import PRESETS, ModelSpec

CONF = Path(__file__).resolve().parents[3] / "eval" / "conf"
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))


def config_of(*overrides: str):
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_run_config(compose("config", overrides=list(overrides)))


@pytest.mark.filterwarnings(r"ignore:\s*'hydra/launcher:UserWarning")  # as eval.run.config does outside of pytest
@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_opens_with_the_command_that_uses_it_and_composes(file: Path) -> None:
    lines = [line for line in (CONF / file).read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# python run.py")
    if len(file.parts) == 1:
        config_of()
        return
    group, name = file.parent.as_posix(), file.stem
    if group == "tuned":  # no group to choose from, but what a schedule may refer to
        assert f"method.schedule=tuned/{name}" in lines[0]
        config_of(f"method.schedule=tuned/{name}")
        return
    assert f"{group}={name}" in lines[0]
    overrides = [f"{group}={name}"] + (["model.name=tiny"] if name == "custom" else [])
    config_of(*overrides)


def test_a_name_means_the_same_in_the_library_and_in_the_configs() -> None:
    for name in PRESETS:
        assert config_of(f"model={name}").model.name == name
    for name, kind in METHODS.items():
        assert isinstance(build_method(config_of(f"method={name}").method), kind)
    assert {file.stem for file in FILES if file.parts[0] == "method"} == set(METHODS)
    for name in DATASETS:
        assert [one.name for one in datasets_of(config_of(f"dataset={name}"))] == [name]
    for task in TASKS:
        found = {one.name for one in datasets_of(config_of(f"dataset={task}"))}
        assert found == {name for name, one in DATASETS.items() if (one.task, one.suite) == (task, "longbench")}
    assert {file.stem for file in FILES if file.parent.as_posix() == "hydra/launcher"} == set(LAUNCHERS)
    for name, suite in {"all": "longbench", "embedded": "embedded"}.items():
        found = {one.name for one in datasets_of(config_of(f"dataset={name}"))}
        assert found == {one.name for one in DATASETS.values() if one.suite == suite}


def test_the_default() -> None:
    config = config_of()
    assert (config.model.name, build_method(config.method)) == ("tiny", Lazy("paper"))
    assert {one.suite for one in datasets_of(config)} == {"embedded"}
    assert {one.suite for one in datasets_of(config_of("model=llama2"))} == {"longbench"}
    assert len(datasets_of(config_of("model=llama2"))) == 16
    assert (config.timing.paired, config.timing.warmup) == (True, 5)


def test_longbench_limits() -> None:
    assert (config_of("model=llama2").model.max_prompt_tokens, config_of("model=llama2").model.chat) == (3500, "llama2")
    assert (config_of("model=xgen").model.max_prompt_tokens, config_of("model=xgen").model.chat) == (7500, "xgen")


def test_the_embedded_suite_is_a_first_look_unless_limit_says_otherwise() -> None:
    assert (config_of("dataset=embedded").limit, config_of("dataset=embedded", "limit=3").limit) == (12, 3)
    assert config_of("dataset=lookup").limit is config_of("dataset=all").limit is None


def test_several_datasets_and_one_left_out() -> None:
    assert [one.name for one in datasets_of(config_of("dataset=[trec,qasper]"))] == ["trec", "qasper"]
    assert len(datasets_of(config_of("dataset=all", "dataset.trec=false"))) == 15


def test_a_methods_seed_is_the_runs_unless_set() -> None:
    assert build_method(config_of("method=random_drop", "seed=3").method) == RandomDrop(0.8, 3)
    assert build_method(config_of("method=random_drop", "seed=3", "method.seed=5").method) == RandomDrop(0.8, 5)


def test_schedules_and_baseline() -> None:
    assert build_method(config_of("method.schedule={2: 0.4, 5: 0.5}").method) == Lazy({2: 0.4, 5: 0.5})
    assert build_method(config_of("method=baseline").method) == Baseline()


@pytest.mark.parametrize(
    "override",
    ["modl=tiny", "model.nam=tiny", "method.keep=0.5", "dataset=nosuch", "timing.warmup=many", "limit=x", "timing.x=1"],
)
def test_unknown_keys_and_wrong_types_are_refused_by_hydra(override: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's and OmegaConf's errors share no base of their own
        config_of(override)
    assert type(caught.value).__module__.split(".")[0] in ("hydra", "omegaconf")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+method.keep=0.5"], "method 'lazy' has no setting 'keep'; it has schedule, prune_generated"),
        (["method.name=nosuch"], "unknown method 'nosuch'; known are baseline, lazy"),
        (["model.load_format=fast"], "model.load_format=fast: expected auto or dummy"),
        (["data.on_error=ignore"], "data.on_error=ignore"),
        (["timing.warmup=-1"], "timing.warmup=-1"),
        (["limit=0"], "limit=0"),
        (["sample=0"], "sample=0"),
        (["trace=-1"], "trace=-1: expected 0 or more"),
        (["experiment=demo", "only=nosuch"], "only=nosuch: expected lazy, static_pruning"),
        (["only=lazy"], "only=lazy: expected null"),
        (["model.paper=llama3"], "model.paper=llama3: expected llama2, xgen or null"),
        (["experiment=demo", "out=run"], "each run has its own"),
        (["method=random_drop", "method.keep=2.0"], "in (0, 1]"),
        (["method=random_drop", "method.keep=fast"], "is a number"),
        (["method=static_pruning", "method.layer=2.0x"], "takes no preset as layer=2.0x"),
        (["dataset=trec", "dataset.trec=false"], "no dataset is left"),
        (["+dataset.nosuch=true"], "unknown dataset 'nosuch'"),
        (["dataset=[qasper,lookup]"], "share no table"),
        (["model=custom"], "model.name=FOLDER_OR_HUB_ID"),
        (["shard=2"], "shard=2: expected the i-th of n shards, written i/n"),
        (["shard=5/4"], "shard=5/4: expected the i-th of n shards"),
        (["experiment=demo", "shard=1/4"], "shard=1/4: expected only=LABEL"),
        (["method=random_drop", "seed=-1"], "seed is a whole number of 0 or more"),
    ],
)
def test_what_a_type_cannot_say_is_checked_too(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        config_of(*overrides)


@pytest.mark.parametrize("experiment", ["demo", "claim"])
@pytest.mark.parametrize("tokens", [512, 1024, 2048])
def test_experiments_compare_at_the_same_ideal_speedup(experiment: str, tokens: int) -> None:
    compared = config_of(f"experiment={experiment}").compare.values()
    methods = [method for method in compared if method["name"] != "prompt_compression"]  # which scores in a prefill
    assert len(methods) == {"claim": 4, "demo": 3}[experiment]
    speedups = [build_method(method).ideal_speedup(load_config(ModelSpec("tiny")), tokens) for method in methods]
    assert max(speedups) / min(speedups) < 1.05


@pytest.mark.quantised
def test_weights_and_devices_are_part_of_what_a_run_is() -> None:
    found = {
        setting: prepare(config_of("model=tiny", "dataset=lookup", "limit=1", *setting)).identity
        for setting in ((), ("model.quantise=int8",), ("model.device_map=auto",), ("+model.device_map.lm_head=cpu",))
    }
    assert len({fingerprint(one) for one in found.values()}) == len(found)
    assert "torchao" not in found[()]["versions"]
    assert found["model.quantise=int8",]["versions"]["torchao"] == version("torchao")


@pytest.mark.parametrize("setting", ["model.quantise=int9", "model.device_map=both", "model.attn_implementation=flash"])
def test_what_the_model_cannot_be_told_is_refused_with_the_config(setting: str) -> None:
    with pytest.raises(UserError, match=setting.partition("=")[2]):
        config_of(setting)
