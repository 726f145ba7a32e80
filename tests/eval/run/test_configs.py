"""Every shipped config composes, begins with its command, and agrees with the code; wrong ones are refused."""

import json
import logging
import re
import shutil
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from eval.benchmarks import SUITES
from eval.benchmarks.datasets import DATASETS
from eval.run.arms import MethodAsked
from eval.run.asked import ask, read_rows
from eval.run.config import (
    CONF,
    LAUNCHERS,
    compose_config,
    model_nodes,
    prepared,
    prompt_limit,
    run_config,
    to_run_config,
)
from eval.run.job import jobs_of
from eval.run.run import prepare
from eval.run.settings import ModelConfig, RunConfig, documented
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, Baseline, Lazy, RandomDrop, StaticPruning, settings_of
from lazyllm.methods.support.schedule import Schedule
from lazyllm.models.load import load_config
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec
from tests.conftest import ROOT
from tests.runs import registered, run_of

FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))


@pytest.mark.filterwarnings(r"ignore:\s*'hydra/launcher:UserWarning")  # as eval.run.config does outside pytest
@pytest.mark.parametrize("file", FILES, ids=str)
def test_config_file_opens_with_its_command_and_composes(file: Path) -> None:
    lines = [line for line in (CONF / file).read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# python run.py")
    group, name = file.parent.as_posix(), file.stem
    if len(file.parts) == 1:
        run_of()
    elif group == "tuned":  # not a group to choose from: files that a schedule may refer to
        assert f"method.schedule=tuned/{name}" in lines[0]
        run_of(f"method.schedule=tuned/{name}")
    else:
        assert f"{group}={name}" in lines[0]
        registered()
        needed = ["model.name=tiny"] if name == "custom" else []
        to_run_config(compose_config([f"{group}={name}", *needed]))


@pytest.mark.parametrize("name", [*METHODS, "selective_context"])
def test_method_has_the_settings_of_its_class(name: str) -> None:
    registered()
    config = to_run_config(compose_config([f"method={name}"]))
    kind = METHODS["prompt_compression" if name == "selective_context" else name]
    assert isinstance(MethodAsked.of(config.method).make(), kind)
    own = settings_of(kind)
    assert config.method.keys() == {"name", "turns", *own, *(["seeds"] if "seed" in own else [])}


def test_names_of_datasets_and_tasks_choose_them() -> None:
    assert {file.stem for file in FILES if file.parent.as_posix() == "hydra/launcher"} == set(LAUNCHERS)
    tiny, llama2 = run_of("dataset=hops"), run_of("model=llama2", "dataset=hotpotqa")
    for name in (name for name, dataset in DATASETS.items() if dataset.suite in ("longbench", "longbench_e", "needle")):
        assert [dataset.name for dataset in tiny.changed(dataset={name: True}).datasets] == [name]
    for task in SUITES["longbench"].all_tasks:
        chosen = {one for one in DATASETS.values() if (one.task, one.suite) == (task, "longbench")}
        assert {*llama2.changed(dataset={task: True}).datasets} == chosen
    for name, suite in {"all": "longbench", "embedded": "embedded"}.items():
        chosen = {one for one in DATASETS.values() if one.suite == suite}
        assert {*tiny.changed(dataset={name: True}).datasets} == chosen


def test_config_has_the_defaults() -> None:
    run = run_of()
    assert run.config.model.name == "tiny"
    assert {dataset.suite for dataset in run.datasets} == {"embedded"}
    chosen = {"dataset=[trec,qasper]": ["trec", "qasper"], "dataset=multi_doc_qa": ["hops"]}
    for given, names in chosen.items():
        assert [dataset.name for dataset in run_of(*given.split()).datasets] == names
    assert len(run_of("dataset=all", "dataset.trec=false").datasets) == 15
    for name, limit in (("llama2", 3500), ("xgen", 7500)):
        run = run_of(f"model={name}")
        assert (run.config.model.max_prompt_tokens, run.config.model.chat) == (limit, name)
        assert {dataset.suite for dataset in run.datasets} == {"longbench"}
        assert len(run.datasets) == 16


def test_docs_list_every_setting_and_experiment() -> None:
    """tests/test_docs.py compares the rows' text."""
    text = "".join(page.read_text(encoding="utf-8") for page in (CONF.resolve().parent / "docs").glob("*.md"))
    assert [key for key, _, _ in documented(RunConfig()) if f"| `{key}` |" not in text] == []
    (listed,) = re.findall(r"^`experiment` is (.+?)\.$", text, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))


def test_preset_has_longbench_prompt_limit() -> None:
    chats = {name: ModelConfig(**node) for name, node in model_nodes().items()}
    assert {model.chat for model in chats.values()} == {"auto"}
    # LongBench's model2maxlen has 3500 for 4k, 7500 for 8k and 31500 for 32k
    assert [prompt_limit(positions) for positions in (4096, 8192, 32_768)] == [3500, 7500, 31_500]
    limits = {"smollm2-135m": 7500, "qwen3-8b": 40_000, "llama3.1-8b": 130_000}
    assert {name: chats[name].max_prompt_tokens for name in limits} == limits
    for name, model in chats.items():
        positions = load_config(ModelSpec(name, "dummy")).max_position_embeddings
        assert 512 + 64 <= positions - (model.max_prompt_tokens or 0) < 1400  # the longest answer, and the chat's wrap


@pytest.mark.parametrize("chosen", [[], ["dataset=embedded"], ["dataset=[lookup,hops]"], ["dataset=lookup"]])
def test_embedded_suite_has_its_limit_however_it_is_chosen(chosen: list[str]) -> None:
    assert run_of(*chosen).limit == 12
    assert {len(data.examples) for data in read_rows(run_of(*chosen))} == {12}
    assert run_of(*chosen, "limit=3").limit == 3
    assert run_of("dataset=all").limit is None


def test_name_of_a_runs_folder_makes_no_folder_in_it() -> None:
    assert prepare(run_of("dataset=lookup", "label=a/b")).folder.parent == Path("runs")


@pytest.mark.parametrize(
    ("overrides", "methods"),
    [
        (["method=random_drop", "seed=3"], {"random_drop": RandomDrop(0.8, 3)}),  # a method's seed is the run's
        (["method=random_drop", "seed=3", "method.seed=5"], {"random_drop": RandomDrop(0.8, 5)}),
        (["compare={mine: {name: random_drop, keep: 0.5}}", "seed=3"], {"mine": RandomDrop(0.5, 3)}),
        ([], {"lazy": Lazy("paper")}),
        (["method.schedule={2: 0.4, 5: 0.5}"], {"lazy": Lazy({2: 0.4, 5: 0.5})}),
        (
            ["compare=[random_drop,static_pruning]"],
            {"random_drop": RandomDrop(0.8), "static_pruning": StaticPruning(keep=0.3)},
        ),
        (["method=baseline"], {}),
        (
            [
                "experiment=table2",
                "~compare.lazy",
                "+compare.mine={name: lazy}",
                "+compare.drop={name: static_pruning}",
            ],
            {"mine": Lazy("paper"), "drop": StaticPruning(keep=0.3)},
        ),
        (
            ["method=random_drop", "method.seeds=2", "method.keep=[0.3,0.6]"],
            {f"random_drop keep={keep} seed {seed}": RandomDrop(keep, seed) for keep in (0.3, 0.6) for seed in (0, 1)},
        ),
        (
            ["compare={drop: {name: static_pruning, keep: 0.5, layer: [1,2]}}"],
            {"drop layer=1": StaticPruning(1, 0.5), "drop layer=2": StaticPruning(2, 0.5)},
        ),
        (
            ["method.schedule=[{2: 0.4},paper]"],
            {"lazy schedule={2: 0.4}": Lazy({2: 0.4}), "lazy schedule=paper": Lazy("paper")},
        ),
    ],
)
def test_settings_make_arms_behind_the_baseline(overrides: list[str], methods: dict[str, object]) -> None:
    run = run_of(*overrides)
    found = [(label, MethodAsked.of(settings).make()) for label, settings in run.arms.items()]
    assert found == [("baseline", Baseline()), *methods.items()]
    assert run.baseline == "baseline"


def test_baseline_may_be_an_arm_with_a_label_or_none() -> None:
    named = run_of("compare={mine: {name: lazy}, standard: {name: baseline}}")
    assert (list(named.arms), named.baseline) == (["standard", "mine"], "standard")
    alone = run_of("baseline=false")
    assert (list(alone.arms), alone.baseline) == (["lazy"], None)


def test_published_experiments_have_their_arms() -> None:
    """One baseline, and Table 1's eight others: nine prefills of each prompt."""
    counts = {"demo": 5, "table1": 9, "figure5": 39, "figure6": 36, "table2": 2}
    assert {name: len(run_of(f"experiment={name}").arms) for name in counts} == counts
    labels = list(run_of("experiment=table1").arms)
    assert labels[-5:] == [f"random_drop seed {number}" for number in range(5)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # unknown keys and choices, with the nearest known one; more of them in tests/eval/test_cli.py
        (["++limits=1"], "Key 'limits' not in 'RunConfig' (did you mean limit? --help lists all keys)"),
        (["~limt"], "Could not delete from config. 'limt' does not exist"),
        (["model.nam=tiny"], "Key 'nam' not in 'ModelConfig' (did you mean model.name?"),
        (["timing.warmup=0"], "Key 'timing' not in 'RunConfig' (did you mean warmup?"),
        (
            ["method.keep=0.5"],
            "Key 'keep' is not in struct (lazyllm-bench methods lists those of each method; a sweep ",
        ),
        (["+method.kep=0.5"], "method 'lazy' has no setting 'kep'"),
        (["hydra.launcher.n_jobs=2"], "configures the jobs of a sweep: give -m too"),
        (["method=[lazy,fastkv]"], "expected one method; compare=[lazy,fastkv] takes several"),
        (["model=[tiny,llama2]"], "expected one model; -m model=tiny,llama2 takes several"),
        (["--limit", "4"], "--limit: expected KEY=VALUE"),
        (["limit"], "Error parsing override 'limit': missing EQUAL at '<EOF>' (expected KEY=VALUE, such as limit=3)"),
        (["dataset=[lookup,shotz]"], "dataset=shotz: the nearest names are shots, "),
        (["draft=tiny", "method=specprefill"], "(of one method: method.draft=NAME)"),
        (["dataset=[1]"], "dataset=[1]: "),
        # values
        (
            ["dataset=hotpotqa,trec"],
            "'dataset=hotpotqa,trec': 1. To use it as a list, use key=[value1,value2]; 2. To use it",
        ),
        (["warmup=many"], "warmup=many: Value 'many' of type 'str' could not be converted to Integer"),
        (["method.name=nosuch"], "unknown method 'nosuch': the nearest names are "),
        (["model.load_format=fast"], "unknown load_format 'fast': give one of auto, dummy"),
        (["model=custom", "model.name=nosuch"], "no preset: the nearest names are"),
        (["model=custom"], "model.name=FOLDER_OR_HUB_ID"),
        (["model=org/x"], "model=org/x: expected a preset's name, or model.name=org/x"),
        (["model.system=Be brief"], "model.system is for the tokenizer's chat template: give model.chat=auto too"),
        (["model.today=now"], "model.today=now: expected a date, YYYY-MM-DD"),
        (["needle.lengths=300"], "needle.lengths=300: Invalid value assigned: int is not a ListConfig"),
        (["model.paper=llama3"], "model.paper=llama3: expected null or llama2 or xgen"),
        (["baseline=false", "fidelity=answer"], "fidelity=answer: expected baseline=true with it"),
        (["subset=some"], "subset=some: expected first or random or by_length or mini"),
        (["model=llama2", "dataset=trec", "subset=random"], "subset=random: expected limit=50 or so with it"),
        (["data.on_error=ignore"], "data.on_error=ignore: expected raise or skip"),
        (["compare={a: lazy}"], "expected [lazy, fastkv], or {label: {name: lazy, ...}, ...}"),
        (["compare=[]"], "compare=[]: expected [lazy, fastkv]"),
        (["compare=[lazy,fastkv,lazy]"], "compare=lazy: expected names that differ"),
        (["compare={a: {schedule: paper}}"], "compare.a.name=None: expected a method's name"),
        (["out="], "out=: expected a folder"),
        (["experiment=field", "speedup=2"], "speedup=2: expected a number and x, such as 2x"),
        (["compare={baseline: {name: lazy}}"], "compare=baseline: expected another label for it"),
        (["compare={a: {name: lazy, seeds: 5}}"], "a.seeds=5: expected no seeds, as method lazy has no seed"),
        (["compare={a: {name: random_drop, seeds: 0}}"], "a.seeds=0: expected a number of seeds"),
        (["compare={a: {name: random_drop, keep: []}}"], "a.keep=[]: expected at least one value"),
        (["method.schedule=[paper,paper]"], "compare=lazy: expected settings that differ in each arm of it"),
        (["model.max_prompt_tokens=0"], "model.max_prompt_tokens=0: expected 1 or more, or null"),
        (["method=random_drop", "method.keep=fast"], "is a number"),
        (["seed=-1"], "seed=-1: expected 0 or more"),
        (["seed=9223372036854775808"], "seed=9223372036854775808: expected less than 2^63"),
        (["dataset=trec", "dataset.trec=false"], "no dataset is left"),
        (["+dataset.nosuch=true"], "unknown dataset 'nosuch'"),
        (["dataset=[qasper,lookup]"], "share no table"),
        # known keys that would have no effect
        (["speedup=3x"], "speedup=3x: expected experiment=field with it, or an arm with ${speedup} (of one method: me"),
        (["dataset=hops", "random.seed=9"], "random.seed=9: expected dataset=random with it: hops is of embedded"),
        (["dataset=hops", "data.length=2048"], "data.length=2048: expected dataset=ruler, or other rows"),
        (["dataset.trec=false"], "Could not override 'dataset.trec'"),
        (["experiment=demo", "method=claa"], "'+compare.claa={name: claa}' adds an arm"),
        (["compare=[lazy,fastkv]", "method=claa"], "give compare=[lazy,fastkv,claa]"),
        (["compare={a: {name: lazy}}", "method=claa"], "'+compare.claa={name: claa}' adds an arm"),
        (["experiment=demo", "method.schedule=paper"], "'compare.LABEL.schedule=paper' changes one of its arms"),
        (["experiment=demo", "method=lazy"], "'+compare.lazy_2={name: lazy}' adds an arm"),
        (["compare={lazy: {name: lazy}}", "method=lazy"], "'+compare.lazy_2={name: lazy}' adds an arm"),
        (["++compare=[lazy]", "method=claa"], "give compare=[lazy,claa]"),
    ],
)
def test_config_refuses(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        _ = run_of(*overrides).data
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("name: lazy, schedule: {2: 0.3}", "name: lazy, schedule: {25%: 0.3}"),
        ("name: lazy", "name: lazy, prune_generated: false"),
        ("name: random_drop, keep: 0.5, seed: 1", "name: random_drop, keep: 0.5, seed: 2"),
        ("name: baseline", "name: baseline"),
    ],
)
def test_two_arms_of_one_setting_are_refused(a: str, b: str) -> None:
    run = run_of(f"compare={{a: {{{a}}}, b: {{{b}}}}}")
    with pytest.raises(UserError, match=r"^compare\.b=\w+: expected settings that differ from those of a "):
        _ = prepare(run).arms


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for which in ("old", "new"):
        (tmp_path / which).mkdir()
        text = (ROOT / "lazyllm" / "methods" / "static_pruning.py").read_text(encoding="utf-8")
        (tmp_path / which / "mine.py").write_text(f"{text}# {which}\n", encoding="utf-8")
    arms = [f"{which}: {{name: {tmp_path}/{which}/mine.py, layer: 2, keep: 0.5}}" for which in ("old", "new")]
    with pytest.raises(UserError, match="another version of a file takes another name"):
        _ = prepare(run_of(f"compare={{{', '.join(arms)}}}")).arms


def test_sweep_names_a_file_of_a_method_as_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConfigStore.instance(), "repo", deepcopy(ConfigStore.instance().repo))
    text = (ROOT / "lazyllm" / "methods" / "static_pruning.py").read_text(encoding="utf-8")
    for name in ("old/mine.py", "new/mine.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    old, new = tmp_path / "old" / "mine.py", tmp_path / "new" / "mine.py"
    words = prepared(["-m", f"method=lazy,{old}"])
    assert words == ["-m", 'method=lazy,"mine.py"']
    assert compose_config(['method="mine.py"']).method.name == str(old)
    with pytest.raises(UserError, match="another name than that of"):  # the last one would run twice
        prepared(["-m", f"method={old},{new}"])


@pytest.mark.parametrize(
    ("written", "schedule"),
    [
        ("compare.lazy.schedule={4: 0.5}", {4: 0.5}),
        ("++compare.lazy.schedule={4: 0.5}", {4: 0.5}),
        ("compare.lazy.schedule=4:0.5", {4: 0.5}),
        ("compare.lazy.schedule={50%: 0.5}", {4: 0.5}),
        ("compare.lazy.schedule='{4: 0.5}'", {4: 0.5}),
        ("compare.lazy.schedule={}", {}),
    ],
)
def test_schedule_of_an_experiments_arm_is_replaced(
    written: str, schedule: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra alone would merge a mapping into the experiment's {2: 0.3}."""
    monkeypatch.setattr(ConfigStore.instance(), "repo", deepcopy(ConfigStore.instance().repo))
    arms = {"lazy": {"name": "lazy", "schedule": {2: 0.3}}, "random_drop": {"name": "random_drop"}}
    ConfigStore.instance().store(group="experiment", name="mapping", node={"compare": arms}, package="_global_")
    run = ask(run_config(["experiment=mapping", written]))
    (method,) = [arm.method("lookup") for arm in prepare(run).arms if arm.label == "lazy"]
    assert isinstance(method, Lazy)
    assert Schedule.parse(method.schedule, Depth(8)) == Schedule(schedule)


OTHERS_OF_DEMO = ("static_pruning", "random_drop", "prompt_compression")


@pytest.mark.parametrize(
    ("written", "labels"),
    [
        ("compare=[lazy,fastkv]", ["lazy", "fastkv"]),
        ("++compare={mine: {name: lazy}}", ["mine"]),
        ("compare.lazy={name: fastkv}", ["lazy", *OTHERS_OF_DEMO]),
        ("+compare.mine={name: fastkv}", ["lazy", *OTHERS_OF_DEMO, "mine"]),
    ],
)
def test_arms_that_are_given_take_the_place_of_an_experiments(written: str, labels: list[str]) -> None:
    """Hydra alone refuses some of these, and merges the others."""
    asked = ask(run_config(["experiment=demo", "model=tiny", written]))
    assert list(asked.arms) == ["baseline", *labels]
    if written.startswith("compare.lazy="):
        assert asked.arms["lazy"] == {"name": "fastkv"}


def test_sweep_of_experiments_composes_each() -> None:
    assert prepared(["-m", "experiment=table1,figure5"]) == ["-m", "experiment=table1,figure5"]


def test_config_accepts_method_and_dataset_keys() -> None:
    assert run_of("experiment=field", "speedup=3x", "draft=tiny").arms["specprefill"]["draft"] == "tiny"
    own = run_of("compare={mine: {name: prompt_compression, keep: 0.5, scorer: ${draft}}}", "draft=tiny")
    assert own.arms["mine"]["scorer"] == "tiny"
    own = run_of("compare={mine: {name: random_drop, keep: ${speedup}}}", "speedup=3x")
    assert own.arms["mine"]["keep"] == "3x"
    drop = run_of("method=random_drop", "method.keep=${speedup}", "speedup=3x")
    assert drop.arms["random_drop"]["keep"] == "3x"
    assert run_of("dataset=needle", "needle.seed=3").config.needle.seed == 3
    assert "claa" in run_of("compare=null", "method=claa").arms
    read = run_of("compare={mine: {name: random_drop, keep: ${method.keep}}}", "method=claa", "method.keep=0.3")
    assert read.arms["mine"]["keep"] == 0.3


def custom(folder: Path, template: str | None, turns: Sequence[dict] = (), **config: int) -> tuple[str, ...]:
    """Arguments that load a copy of the tiny model as a custom model."""
    shutil.copytree(PRESETS["tiny"].source, folder, dirs_exist_ok=True)
    for name, changes in {"tokenizer_config.json": {"chat_template": template}, "config.json": config}.items():
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    row = {"input": "Where?", "context": "the old house was quiet. " * 120, "answers": ["no"], "all_classes": None}
    row |= {"length": 300, "dataset": "qasper", "language": "en", "_id": "one", "turns": list(turns)}
    (folder / "config").mkdir(exist_ok=True)
    (folder / "qasper.jsonl").write_text(json.dumps(row))
    (folder / "config" / "dataset2prompt.json").write_text('{"qasper": "{context} {input}"}')
    (folder / "config" / "dataset2maxlen.json").write_text('{"qasper": 20}')
    return ("model=custom", f"model.name={folder}", "dataset=qasper", f"data.dir={folder}")


def test_custom_model_takes_limit_and_template_of_checkpoint(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    run = run_of(*custom(tmp_path, None), "model.thinking_tokens=7")
    bare, _ = prepare(run).identity, prepare(run).cases
    assert (bare["chat"], bare["max_prompt_tokens"], bare["thinking_tokens"]) == ("none", 3500, 7)
    assert "has 4096 positions, so prompts beyond 3500 tokens lose their middle; it has no chat template" in caplog.text
    template = "{{ strftime_now('%Y') }}{% if enable_thinking %}!{% endif %}{{ messages[0]['content'] }}"
    plan = run_of(*custom(tmp_path, template, max_position_embeddings=2048))
    assert prepare(plan).cases[0].prompt.text.startswith("2024")
    assert prepare(plan).identity.items() >= {
        "chat": "auto", "chat_args": {"enable_thinking": False}, "today": "2024-07-26", "max_prompt_tokens": 1024
    }.items()  # fmt: skip
    assert "prompts have its own chat template" in caplog.text
    thinks = run_of(*custom(tmp_path, template), "model.thinking_tokens=100", "model.today=2025-01-01")
    assert prepare(thinks).cases[0].prompt.text.startswith("2025!")
    assert prepare(thinks).cases[0].max_new_tokens == prepare(plan).cases[0].max_new_tokens + 100
    assert (prepare(thinks).identity["today"], prepare(thinks).identity["thinking_tokens"]) == ("2025-01-01", 100)


def test_thoughts_that_the_template_does_not_know_are_refused(tmp_path: Path) -> None:
    asked = run_of(*custom(tmp_path, "{{ messages[0]['content'] }}"), "model.thinking_tokens=50")
    with pytest.raises(UserError, match=rf"thinking_tokens=50: expected 0, as the chat template of {tmp_path.name} kn"):
        asked.check()
    for system in ("model.system='Think, then write </think>.'", "model.chat=none"):
        run_of(*custom(tmp_path, "{{ messages[0]['content'] }}"), "model.thinking_tokens=50", system).check()
    for template in ("{{ messages[0]['content'] }}<think>", None):
        run_of(*custom(tmp_path, template), "model.thinking_tokens=50").check()


def test_answer_limit_beyond_every_dataset_is_the_same_run() -> None:
    plain, longer, shorter = (
        prepare(run_of("dataset=[lookup,complete]", "limit=1", *limit)).identity["max_new_tokens"]
        for limit in ((), ("max_new_tokens=99999",), ("max_new_tokens=2",))
    )
    assert (plain, longer, shorter) == (None, None, 2)


@pytest.mark.parametrize("later", [0, 2])
def test_too_long_prompt_is_refused_with_number_to_set(tmp_path: Path, later: int) -> None:
    template = "{% for message in messages %}<u>{{ message['content'] }}<m>{% endfor %}"
    turns = [{"input": "Why? " * 9, "answers": ["so"]}] * later
    arguments = custom(tmp_path, template, turns, max_position_embeddings=400)
    with pytest.raises(UserError, match="exceed the model's 400 positions") as refused:
        _ = prepare(run_of(*arguments, "model.max_prompt_tokens=390")).cases
    with pytest.raises(UserError, match="400 positions: give a lower max_new_tokens or"):
        _ = prepare(run_of(*arguments, "model.max_prompt_tokens=390", "model.thinking_tokens=390")).cases
    (fits,) = re.findall(r"set model.max_prompt_tokens=(\d+), or less", str(refused.value))
    (case,) = prepare(run_of(*arguments, f"model.max_prompt_tokens={fits}")).cases
    tokens = [len(message.token_ids) for message in (case.prompt, *case.prompt.turns)]
    assert len(tokens) == 1 + later
    assert 0 <= 400 - sum(tokens) - len(tokens) * case.max_new_tokens + 1 < 8  # the last new token is not run
    if later:
        fewer = prepare(run_of(*arguments, f"model.max_prompt_tokens={fits}", "turns=2")).cases[0]
        assert fewer.prompt.turns == case.prompt.turns[:1]
    else:
        with pytest.raises(UserError, match="turns=2: the rows of qasper hold one question each"):
            _ = prepare(run_of(*arguments, "turns=2")).cases


@pytest.mark.parametrize(
    ("arguments", "name", "chat"),
    [
        (["model.name=owner/model"], "owner/model", None),
        (["model.name=tiny"], "tiny", "none"),
        (["model=llama2", "model.name=owner/model"], "owner/model", "llama2"),
        (["model.name=owner/model", "experiment=field"], "owner/model", None),
    ],
)
def test_model_by_name_alone_has_the_settings_of_custom(arguments: list[str], name: str, chat: str | None) -> None:
    """Not those of the default model, `tiny`: no chat template, float32, one thread."""
    config = run_config(arguments)
    assert (config.model.name, config.model.chat) == (name, chat)
    assert (config.model.dtype, config.threads) == (("float32", 1) if name == "tiny" else ("auto", None))


@pytest.mark.parametrize("name", ["llama2", "xgen", "smollm2", "qwen3-0.6b", "tiny"])
def test_preset_by_name_alone_has_its_own_settings(name: str) -> None:
    settings = run_config([f"model={name}"])
    assert run_config([f"model.name={name}"]) == run_config([f"model.name='{name}'"]) == settings
    assert settings.model.name == name


def test_folder_without_a_tokenizer_is_refused_before_torch_is_imported(tiny_copy: Path) -> None:
    run = run_of(f"model.name={tiny_copy}", "dataset=lookup").check()
    (tiny_copy / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        run.check()


def test_presets_of_a_sweep_by_name_alone_have_their_own_settings() -> None:
    of_names = jobs_of(["-m", "model.name=llama2,tiny", "limit=1"])
    assert of_names == jobs_of(["-m", "model=llama2,tiny", "limit=1"])
    assert [config.model.chat for config in of_names] == ["llama2", "none"]
