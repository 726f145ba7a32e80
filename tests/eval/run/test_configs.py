"""Shipped configs compose and agree with the code; what a run takes from its model's files."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest

from eval.benchmarks import SUITES
from eval.compose import CONF, LAUNCHERS, read
from eval.run.check import choose_data, limit_of, read_rows, suite_of
from eval.run.job import jobs_of
from eval.run.prepare import prepare, prompt_limit
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, settings_of
from lazyllm.models.config import load_config
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec
from tests.conftest import ROOT
from tests.runs import checked, prepared

FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))


def chosen(*overrides: str) -> list[str]:
    """Name the datasets of a run, rows or not."""
    return [dataset.name for dataset in choose_data(read(overrides), check_rows=False)[0]]


@pytest.mark.filterwarnings(r"ignore:\s*'hydra/launcher:UserWarning")  # as eval.compose outside
@pytest.mark.parametrize("file", FILES, ids=str)
def test_config_file_opens_with_its_command_and_composes(file: Path) -> None:
    lines = [line for line in (CONF / file).read_text().splitlines() if "@package" not in line]
    group, name = file.parent.as_posix().replace("datasets", "dataset"), file.stem
    assert lines[0].startswith("# python run.py")
    if len(file.parts) == 1:
        assert chosen()
    elif group == "hydra/launcher":
        assert name in LAUNCHERS
        assert f"{group}={name}" in lines[0]
    else:
        assert f"{group}={name}" in lines[0]
        assert chosen(f"{group}={name}")


def test_a_method_has_the_settings_of_its_class() -> None:
    for name, kind in METHODS.items():
        [settings] = read([f"method={name}"]).arms
        assert (settings.model_extra or {}).keys() == settings_of(kind).keys()


def test_models_have_their_suite_and_longbenchs_limits() -> None:
    assert read([]).model.name == "tiny"
    suites = {"tiny": "embedded", "llama2": "longbench", "xgen": "longbench"}
    for model, suite in suites.items():
        assert chosen(f"model={model}") == [dataset.name for dataset in SUITES[suite].datasets]
    for name, limit in (("llama2", 3500), ("xgen", 7500)):
        model = read([f"model={name}"]).model
        assert (model.max_prompt_tokens, model.chat) == (limit, name)
    # LongBench's model2maxlen has 3500 for 4k, 7500 for 8k and 31500 for 32k
    assert [prompt_limit(positions) for positions in (4096, 8192, 32_768)] == [3500, 7500, 31_500]
    for name in PRESETS:
        positions = load_config(ModelSpec(name, "dummy")).max_position_embeddings
        # room for the longest answer, and for the chat's wrap
        assert 512 + 64 <= positions - prompt_limit(positions) < 1400


def test_the_name_of_a_task_means_the_model_s_suite() -> None:
    assert chosen("dataset=multi_doc_qa") == ["hops"]
    for task in SUITES["longbench"].all_tasks:
        names = [dataset.name for dataset in SUITES["longbench"].datasets if dataset.task == task]
        assert chosen("model=llama2", f"dataset={task}") == names


def test_embedded_suite_has_its_limit_however_it_is_chosen() -> None:
    given = {"dataset=embedded": 12, "dataset=lookup": 12, "warmup=1": 12, "limit=3": 3}
    for override, limit in given.items():
        config = read([override])
        rows = read_rows(config, *choose_data(config))
        assert {len(loaded.examples) for loaded in rows} == {limit}
    config = read(["dataset=all"])
    assert limit_of(config, suite_of(choose_data(config, check_rows=False)[0])) is None


def test_a_label_makes_no_folder_in_the_runs_folder() -> None:
    assert prepared("dataset=lookup", "limit=1", "label=a/b").folder.parent == Path("runs")


def checkpoint(folder: Path, template: str | None, **config: int) -> tuple[str, ...]:
    """Arguments of a run of a copy of `tiny`, with a chat template, on one row beside it."""
    shutil.copytree(PRESETS["tiny"].source, folder, dirs_exist_ok=True)
    changes = {"tokenizer_config.json": {"chat_template": template}, "config.json": config}
    for name, values in changes.items():
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    row = {"input": "Where?", "context": "the old house was quiet. " * 120, "answers": ["no"]}
    row |= {"length": 300, "dataset": "qasper", "language": "en", "_id": "one", "all_classes": None}
    (folder / "config").mkdir(exist_ok=True)
    (folder / "qasper.jsonl").write_text(json.dumps(row))
    (folder / "config" / "dataset2prompt.json").write_text('{"qasper": "{context} {input}"}')
    (folder / "config" / "dataset2maxlen.json").write_text('{"qasper": 20}')
    return (f"model={folder}", "dataset=qasper", f"data.dir={folder}")


def test_a_model_by_its_folder_takes_its_limit_and_template(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    bare = prepared(*checkpoint(tmp_path, None), "model.thinking_tokens=7").identity
    found = (bare["chat"], bare["max_prompt_tokens"], bare["thinking_tokens"])
    assert found == ("none", 3500, 7)
    said = "has 4096 positions, so prompts beyond 3500 tokens lose their middle; it has no chat"
    assert said in caplog.text
    year = "{{ strftime_now('%Y') }}"
    template = year + "{% if enable_thinking %}!{% endif %}{{ messages[0]['content'] }}"
    plain = prepared(*checkpoint(tmp_path, template, max_position_embeddings=2048))
    assert plain.prompts[0].text.startswith("2024")
    assert plain.identity.items() >= {
        "chat": "auto", "chat_args": {"enable_thinking": False}, "today": "2024-07-26",
        "max_prompt_tokens": 1024,
    }.items()  # fmt: skip
    assert "prompts have its own chat template" in caplog.text
    more = ("model.thinking_tokens=100", "model.today=2025-01-01")
    thinks = prepared(*checkpoint(tmp_path, template), *more)
    assert thinks.prompts[0].text.startswith("2025!")
    assert thinks.prompts[0].max_new_tokens == plain.prompts[0].max_new_tokens + 100
    found = (thinks.identity["today"], thinks.identity["thinking_tokens"])
    assert found == ("2025-01-01", 100)


def test_thoughts_that_the_template_does_not_know_are_refused(tmp_path: Path) -> None:
    template, thoughts = "{{ messages[0]['content'] }}", "model.thinking_tokens=50"
    given = checkpoint(tmp_path, template)
    refused = rf"thinking_tokens=50: expected 0, as the chat template of {tmp_path.name} knows no"
    with pytest.raises(UserError, match=refused):
        checked(*given, thoughts)
    for system in ("model.system='Think, then write </think>.'", "model.chat=none"):
        checked(*given, thoughts, system)
    for other in (f"{template}<think>", None):
        checked(*checkpoint(tmp_path, other), thoughts)


def test_answer_limit_beyond_every_dataset_is_the_same_run() -> None:
    limits = [
        prepared("dataset=[lookup,complete]", "limit=1", *limit).identity["max_new_tokens"]
        for limit in ((), ("max_new_tokens=99999",), ("max_new_tokens=2",))
    ]
    assert limits == [None, None, 2]


def test_too_long_prompt_is_refused_with_the_number_to_set(tmp_path: Path) -> None:
    template = "{% for message in messages %}<u>{{ message['content'] }}<m>{% endfor %}"
    given = checkpoint(tmp_path, template, max_position_embeddings=400)
    with pytest.raises(UserError, match="exceed the model's 400 positions") as refused:
        prepared(*given, "model.max_prompt_tokens=390")
    with pytest.raises(UserError, match="400 positions: give a lower max_new_tokens or"):
        prepare(read([*given, "model.max_prompt_tokens=390", "model.thinking_tokens=390"]))
    (fits,) = re.findall(r"set model.max_prompt_tokens=(\d+), or less", str(refused.value))
    (prompt,) = prepared(*given, f"model.max_prompt_tokens={fits}").prompts
    # the last new token is not run
    assert 0 <= 400 - len(prompt.token_ids) - prompt.max_new_tokens + 1 < 8


def test_a_model_that_no_config_names_has_no_settings_of_the_default_model(tmp_path: Path) -> None:
    """Not those of `tiny`: no chat template, float32, one thread."""
    (tmp_path / "mine").mkdir()
    for name in ("owner/model", str(tmp_path / "mine"), "qwen3-0.6b"):
        config = read([f"model={name}", "experiment=field"])
        assert (config.model.name, config.model.chat, config.model.dtype) == (name, None, "auto")
        assert config.threads is None
    tiny = read(["model=tiny"])
    assert (tiny.model.chat, tiny.model.dtype, tiny.threads) == ("none", "float32", 1)


def test_a_sweep_makes_a_job_of_each_choice(tmp_path: Path) -> None:
    jobs = jobs_of(["-m", f"model=llama2,{tmp_path}", "limit=1", "seed=0,1"])
    assert [(job.model.name, job.seed) for job in jobs] == [
        ("llama2", 0), ("llama2", 1), (str(tmp_path), 0), (str(tmp_path), 1)
    ]  # fmt: skip
    assert [job.model.chat for job in jobs] == ["llama2", "llama2", None, None]
    text = (ROOT / "lazyllm" / "methods" / "static_pruning.py").read_text(encoding="utf-8")
    files = [tmp_path / "old" / "mine.py", tmp_path / "new" / "mine.py"]
    for file in files:
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
    jobs = jobs_of(["-m", f"method=lazy,{files[0]},{files[1]}"])
    assert [job.arms[0].name for job in jobs] == ["lazy", *map(str, files)]
    speeds = [job.speedup for job in jobs_of(["experiment=field", "-m"])]
    assert speeds == [1.5, 2, 3, 4, 6]
