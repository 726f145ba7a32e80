"""Every shipped config composes, begins with its command, and agrees with the code; wrong ones are refused."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from eval.benchmarks import SUITES
from eval.benchmarks.datasets import DATASETS
from eval.run.config import (
    CONF,
    LAUNCHERS,
    ModelConfig,
    RunConfig,
    compose_config,
    documented,
    model_nodes,
    to_run_config,
)
from eval.run.prepare import prepare
from eval.run.resolved import build_method, check_early, data_identity, rows_of
from eval.store.folder import fingerprint
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, Baseline, Lazy, RandomDrop, settings_of
from lazyllm.models.load import load_config
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec
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
        needed = ["model.name=tiny"] if name in ("custom", "server") else []
        config = to_run_config(compose_config([f"{group}={name}", *needed]))
        if group == "method":  # what its class says, or the paper: no third place
            kind = METHODS["prompt_compression" if name == "selective_context" else name]
            assert isinstance(build_method(config.method), kind)
            assert config.method.keys() == {"name", "turns", *settings_of(kind)}


def test_names_of_datasets_and_tasks_choose_them() -> None:
    assert {file.stem for file in FILES if file.parts[0] == "method"} == {*METHODS, "selective_context"}
    assert {file.stem for file in FILES if file.parent.as_posix() == "hydra/launcher"} == set(LAUNCHERS)
    tiny, llama2 = run_of("dataset=hops"), run_of("model=llama2", "dataset=hotpotqa")
    for name in (name for name, dataset in DATASETS.items() if SUITES[dataset.suite].missing is None):
        assert [dataset.name for dataset in tiny.changed(dataset={name: True}).datasets] == [name]
    for task in SUITES["longbench"].tasks:
        names = {dataset.name for dataset in llama2.changed(dataset={task: True}).datasets}
        assert names == {
            name for name, dataset in DATASETS.items() if (dataset.task, dataset.suite) == (task, "longbench")
        }
    for name, suite in {"all": "longbench", "embedded": "embedded"}.items():
        names = {dataset.name for dataset in tiny.changed(dataset={name: True}).datasets}
        assert names == {dataset.name for dataset in DATASETS.values() if dataset.suite == suite}


def test_config_has_the_defaults() -> None:
    run = run_of()
    assert (run.config.model.name, build_method(run.method)) == ("tiny", Lazy("paper"))
    assert {dataset.suite for dataset in run.datasets} == {"embedded"}
    assert {dataset.name for dataset in run_of("model=coder").datasets} == {"next_line", "cross_file"}
    assert [dataset.name for dataset in run_of("model=coder", "dataset=lookup").datasets] == ["lookup"]
    assert (run.config.timing.paired, run.config.timing.warmup) == (True, 5)
    for name, limit in (("llama2", 3500), ("xgen", 7500)):
        run = run_of(f"model={name}")
        assert (run.config.model.max_prompt_tokens, run.config.model.chat) == (limit, name)
        assert {dataset.suite for dataset in run.datasets} == {"longbench"}
        assert len(run.datasets) == 16


def test_docs_list_every_setting_and_experiment() -> None:
    text = (CONF.resolve().parent / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = [
        f"| `{key}` | {meaning} | {f'`{default}`' if default else ''} |"
        for key, default, meaning in documented(RunConfig())
    ]
    assert [row for row in rows if row not in text] == []  # each line that is missing, as it should be
    (listed,) = re.findall(r"^`experiment` is (.+?)\.$", text, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))


def test_preset_has_longbench_prompt_limit() -> None:
    chats = {name: ModelConfig(**node) for name, node in model_nodes().items()}
    assert {model.chat for model in chats.values()} == {"auto"}
    # LongBench's model2maxlen has 3500 for 4k, 7500 for 8k and 31500 for 32k
    limits = {"olmo2-7b": 3500, "gemma2-9b": 7500, "mistral-7b": 31_500, "qwen3-8b": 40_000, "llama3.1-8b": 130_000}
    assert {name: chats[name].max_prompt_tokens for name in limits} == limits
    for name, model in chats.items():
        positions = load_config(ModelSpec(name, "dummy")).max_position_embeddings
        assert 512 + 64 <= positions - (model.max_prompt_tokens or 0) < 1400  # the longest answer, and the chat's wrap
    assert chats["gemma2-9b"].attn_implementation == "eager"  # SDPA cannot cap attention logits


def test_embedded_suite_has_default_limit() -> None:
    assert (run_of("dataset=embedded").config.limit, run_of("dataset=embedded", "limit=3").config.limit) == (12, 3)
    assert run_of("dataset=lookup").config.limit is run_of("dataset=all").config.limit is None


def test_dataset_list_and_exclusion() -> None:
    assert [dataset.name for dataset in run_of("dataset=[trec,qasper]").datasets] == ["trec", "qasper"]
    assert [dataset.name for dataset in run_of("model=tiny", "dataset=multi_doc_qa").datasets] == ["hops"]
    assert len(run_of("dataset=all", "dataset.trec=false").datasets) == 15


@pytest.mark.parametrize(
    ("overrides", "method"),
    [
        (["method=random_drop", "seed=3"], RandomDrop(0.8, 3)),  # a method's seed is the run's unless set
        (["method=random_drop", "seed=3", "method.seed=5"], RandomDrop(0.8, 5)),
        (["method.schedule={2: 0.4, 5: 0.5}"], Lazy({2: 0.4, 5: 0.5})),
        (["method=baseline"], Baseline()),
        (["experiment=demo", "+compare.mine={name: lazy, schedule: {3: 0.5}}", "only=mine"], Lazy({3: 0.5})),
    ],
)
def test_overrides_make_method(overrides: list[str], method: object) -> None:
    (run,) = run_of(*overrides).runs.values()
    assert build_method(run.method) == method


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # unknown keys and choices, with the nearest known one; more of them in tests/eval/test_cli.py
        (["++limits=1"], "unknown key limits: did you mean limit?"),
        (["~limt"], "unknown key limt: did you mean limit?"),
        (["model.nam=tiny"], "unknown key model.nam: did you mean model.name?"),
        (["method.keep=0.5"], "unknown key keep of method lazy: known are schedule, prune_generated"),
        (["method=random_drop", "method.kep=0.5"], "unknown key kep of method random_drop: did you mean keep?"),
        (["method=nosuch", "method.x=1"], "method=nosuch: expected one of asl, baseline"),
        (["hydra.launcher.n_jobs=2"], "configures the jobs of a sweep: give -m too"),
        (["--limit", "4"], "--limit: expected KEY=VALUE"),
        (["method.schedule={2:"], "method.schedule={2:: no viable alternative at input '{2:'"),
        # values
        (["timing.warmup=many"], "timing.warmup=many: expected a whole number"),
        (["method.name=nosuch"], "unknown method 'nosuch'; known are asl, baseline"),
        (["model.load_format=fast"], "unknown load_format 'fast': give one of auto, dummy"),
        (["model.quantise=int9"], "int9"),
        (["model=custom", "model.name=nosuch"], "not one of the presets"),
        (["model=custom"], "model.name=FOLDER_OR_HUB_ID"),
        (["model=org/x"], "model=org/x: expected a preset's name, or model=custom model.name=org/x"),
        (["model.system=Be brief"], "model.system is for the tokenizer's chat template: give model.chat=auto too"),
        (["model.today=now"], "model.today=now: expected a date, YYYY-MM-DD"),
        (["needle.lengths=300"], "needle.lengths=300: expected a list"),
        (["model.paper=llama3"], "model.paper=llama3: expected null or llama2 or xgen"),
        (["timing.paired=first"], "timing.paired=first: expected true or ttft or false"),
        (["timing.paired=1"], "timing.paired=1: expected true"),
        (["timing.paired=ttft", "fidelity=answer"], "fidelity=answer: expected timing.paired=true"),
        (["data.on_error=ignore"], "data.on_error=ignore: expected raise or skip"),
        (["load.concurrency=0"], "load.concurrency=0: expected 1 or more"),
        (["+compare={a: lazy}"], "expected a mapping in it, such as {mine: {name: lazy}}"),
        (["model.max_prompt_tokens=0"], "model.max_prompt_tokens=0: expected 1 or more, or null"),
        (["experiment=demo", "only=nosuch"], "only=nosuch: expected null or lazy or static_pruning"),
        (["only=lazy"], "only=lazy: expected an experiment"),
        (["experiment=demo", "out=run"], "each run has its own"),
        (["method=random_drop", "method.keep=fast"], "is a number"),
        (["seed=-1"], "seed=-1: expected 0 or more"),
        (["method=static_pruning", "method.layer=2.0x"], "layer=2.0x"),
        (["dataset=trec", "dataset.trec=false"], "no dataset is left"),
        (["+dataset.nosuch=true"], "unknown dataset 'nosuch'"),
        (["dataset=[qasper,lookup]"], "share no table"),
        (["shard=2"], "shard=2: expected the i-th of n shards, written i/n"),
        (["experiment=demo", "shard=1/4"], "shard=1/4: expected only=LABEL"),
        # known keys that would have no effect
        (["speedup=3x"], "speedup=3x: expected experiment=field with it, or a method with ${speedup}"),
        (["experiment=turns", "draft=tiny"], "draft=tiny: expected experiment=field with it, or a method with"),
        (["dataset=hops", "ruler.length=99"], "ruler.length=99: expected dataset=ruler with it: hops is of embedded"),
        (["dataset=hops", "needle.seed=3"], "needle.seed=3: expected dataset=needle with it"),
        # adding is not overriding
        (["compare={mine: {name: lazy}}"], "{mine: {name: lazy}}: expected +compare={mine: {name: lazy}}"),
        (["dataset.trec=false"], "dataset.trec=false: expected dataset=all dataset.trec=false"),
    ],
)
def test_config_refuses(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        run_of(*overrides)
    assert "\n" not in str(caught.value)


def test_config_accepts_method_and_dataset_keys() -> None:
    assert run_of("experiment=field", "speedup=3x", "draft=tiny").config.compare["specprefill"]["draft"] == "tiny"
    assert run_of("experiment=compression", "draft=tiny").config.compare["keep_0.5"]["scorer"] == "tiny"
    own = run_of("+compare={mine: {name: random_drop, keep: ${speedup}}}", "speedup=3x")
    assert own.config.compare["mine"]["keep"] == "3x"
    assert run_of("method=random_drop", "method.keep=${speedup}", "speedup=3x").method["keep"] == "3x"
    assert run_of("dataset=needle", "needle.seed=3").config.needle.seed == 3


@pytest.mark.parametrize("experiment", ["demo", "claim"])
@pytest.mark.parametrize("tokens", [512, 1024, 2048])
def test_experiments_compare_at_the_same_ideal_speedup(experiment: str, tokens: int) -> None:
    compared = run_of(f"experiment={experiment}").config.compare.values()
    methods = [method for method in compared if method["name"] != "prompt_compression"]  # which scores in a prefill
    assert len(methods) == {"claim": 4, "demo": 3}[experiment]
    speedups = [build_method(method).ideal_speedup(load_config(ModelSpec("tiny")), tokens) for method in methods]
    assert max(speedups) / min(speedups) < 1.05


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
    bare = prepare(run_of(*custom(tmp_path, None), "model.thinking_tokens=7")).identity
    assert (bare["chat"], bare["max_prompt_tokens"], bare["thinking_tokens"]) == ("none", 3500, 7)
    assert "has 4096 positions, so prompts beyond 3500 tokens lose their middle; it has no chat template" in caplog.text
    template = "{{ strftime_now('%Y') }}{% if enable_thinking %}!{% endif %}{{ messages[0]['content'] }}"
    plan = prepare(run_of(*custom(tmp_path, template, max_position_embeddings=2048)))
    assert plan.cases[0].prompt.text.startswith("2024")
    assert plan.identity.items() >= {
        "chat": "auto", "chat_args": {"enable_thinking": False}, "today": "2024-07-26", "max_prompt_tokens": 1024
    }.items()  # fmt: skip
    assert "prompts have its own chat template" in caplog.text
    thinks = prepare(run_of(*custom(tmp_path, template), "model.thinking_tokens=100", "model.today=2025-01-01"))
    assert thinks.cases[0].prompt.text.startswith("2025!")
    assert thinks.cases[0].max_new_tokens == plan.cases[0].max_new_tokens + 100
    assert (thinks.identity["today"], thinks.identity["thinking_tokens"]) == ("2025-01-01", 100)


def test_early_check_takes_the_folder_of_the_same_run_only(tmp_path: Path) -> None:
    run = run_of("experiment=demo", "only=static_pruning", "model.quantise=int8", f"out={tmp_path}")
    (one,) = run.runs.values()
    identity = one.identity(8) | data_identity(one, rows_of(one))
    whole = identity | {"versions": identity["versions"] | {"torchao": "0.15"}, "device": "known with torch only"}
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"schema": 2, "identity": whole}))
    check_early(run)
    file.write_text(json.dumps({"schema": 2, "identity": whole | {"seed": 1}}))
    with pytest.raises(UserError, match=r"holds a run that differs \(seed: 1 there, 0 now\)"):
        check_early(run)


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
        prepare(run_of(*arguments, "model.max_prompt_tokens=390"))
    (fits,) = re.findall(r"set model.max_prompt_tokens=(\d+), or less", str(refused.value))
    (case,) = prepare(run_of(*arguments, f"model.max_prompt_tokens={fits}")).cases
    tokens = [len(message.token_ids) for message in (case.prompt, *case.prompt.turns)]
    assert len(tokens) == 1 + later
    assert 0 <= 400 - sum(tokens) - len(tokens) * case.max_new_tokens + 1 < 8  # the last new token is not run
    if later:
        assert (
            prepare(run_of(*arguments, f"model.max_prompt_tokens={fits}", "turns=2")).cases[0].prompt.turns
            == (case.prompt.turns[:1])
        )
    else:
        with pytest.raises(UserError, match="turns=2: the rows of qasper hold one question each"):
            prepare(run_of(*arguments, "turns=2"))


@pytest.mark.quantised
def test_identity_holds_quantisation_and_devices() -> None:
    identities = {
        setting: prepare(run_of("model=tiny", "dataset=lookup", "limit=1", *setting)).identity
        for setting in ((), ("model.quantise=int8",), ("model.device_map=auto",), ("+model.device_map.lm_head=cpu",))
    }
    assert len({fingerprint(identity) for identity in identities.values()}) == len(identities)
    assert "torchao" not in identities[()]["versions"]
    assert identities["model.quantise=int8",]["versions"]["torchao"] == version("torchao")
