"""RULER as a suite: from a command line to rows, prompts and records, and refused settings."""

import hashlib
import importlib.resources
import json
from pathlib import Path
from typing import Any, cast

import pytest

from eval import cli
from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.ruler import SUITE, TASKS, RulerConfig, sources
from eval.benchmarks.suite import DataSettings, Example
from eval.run.run import prepare
from lazyllm.errors import UserError
from lazyllm.spec import ModelSpec
from tests.eval.benchmarks.test_prompts import Characters, prompt_of
from tests.eval.benchmarks.test_ruler import NEEDS_SHARED, OFFICIAL_ROWS, SHARED, SQUAD, write_templates
from tests.runs import run_of

pytest.importorskip("wonderwords", reason="the package wonderwords ([ruler]) is not installed")

ESSAYS = {"niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"}
QUESTIONS = {"qa_1", "qa_2"}


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """`data.dir` with templates of our own, as RULER's must not enter the repository."""
    folder = write_templates(tmp_path / "templates")
    hashes = {name: ("", hashlib.sha256((folder / name).read_bytes()).hexdigest()) for name in sources.OFFICIAL}
    monkeypatch.setattr(sources, "OFFICIAL", hashes)
    return folder


def settings_of(folder: Path, options: RulerConfig, **settings) -> DataSettings:
    return DataSettings(dir=folder, options=options, **{"limit": 1, "model": ModelSpec("tiny"), **settings})


@NEEDS_SHARED
@pytest.mark.parametrize("length", [2048, 4096])
def test_rows_command_writes_the_official_rows(length, tmp_path, caplog, capsys, monkeypatch):
    rows = 1 + (length == 2048)
    shared = [f"model.tokenizer={SHARED / 'tokenizers' / 'llama2'}", f"data.dir={SHARED / 'ruler' / 'official'}"]
    model = ["model=llama2-base", "model.load_format=dummy"]
    command = ["rows", *model, "dataset=ruler", f"limit={rows}", f"ruler.length={length}", "out=made", *shared]
    assert cli.main(command) == 0
    expected = {file.name: file.read_text() for file in OFFICIAL_ROWS if file.parent.name == str(length)}
    assert {file.name: file.read_text() for file in (tmp_path / "made").iterdir()} == expected
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert all(name in said for name in ESSAYS | QUESTIONS)
    assert "ruler.haystack=FILE" in said
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_data_hash_depends_on_every_setting_but_not_on_the_number_of_rows(folder):
    def data(*options, name="niah_single_1", **settings):
        loaded = SUITE.load(DATASETS[name], settings_of(folder, RulerConfig(*options), **settings))
        assert (loaded.max_new_tokens, loaded.total) == (128, 500)
        return loaded.data_sha256

    assert data(1024) == data(1024, limit=3)
    assert len({data(1024), data(1000), data(1024, 7), data(1024, chat=CHAT_FORMATS["llama2"])}) == 4
    hashes = set()
    for last in ("The end.", "The end of it."):
        Path("text.txt").write_text("The wolves of Oslo ran. " * 2000 + last)
        hashes.add(data(6000, 42, "text.txt", name="niah_single_2"))
    assert len(hashes) == 2


def test_examples_equal_their_rows_and_their_contexts_can_be_shortened(folder):
    settings, tokenizer = settings_of(folder, RulerConfig(3000), limit=2), cast(Any, Characters())
    for dataset in (DATASETS[name] for name in ("niah_single_1", "niah_multikey_2", "cwe", "fwe")):
        loaded = SUITE.load(dataset, settings)
        for example in loaded.examples:
            row = example.official
            prompt = build_prompt(example, dataset, tokenizer)
            assert prompt.text == row["input"] + row["answer_prefix"]
            assert [prompt.text[start:end] for start, end in prompt.context] == [example.context]
            assert list(example.answers) == row["outputs"]
            assert all(output in example.context for output in row["outputs"])
            assert example.context not in example.instruction + example.input


@pytest.mark.parametrize(
    ("chat", "around"), [("none", ("", "")), ("llama2", ("[INST]", "[/INST]")), ("auto", ("\x01<user>", "<model>"))]
)
def test_answer_prefix_follows_the_chat_template(chat, around):
    tokenizer = Characters()
    tokenizer.chat_template = "given"
    row = Example("vt", "one", " Who?", "0123456789", ("1",), instruction="In: ", answer_prefix=" Answer: it is")
    prompt = prompt_of(row, tokenizer, chat=CHAT_FORMATS[chat])
    assert prompt.text == f"{around[0]}In: 0123456789 Who?{around[1]} Answer: it is"
    characters = list(prompt.token_ids[chat != "auto" :])  # the template has written BOS out
    assert characters == [ord(letter) for letter in prompt.text]
    assert [prompt.text[start:end] for start, end in prompt.context] == ["0123456789"]
    assert prompt.spans is not None
    assert len(prompt.spans) == len(prompt.token_ids)


def test_prompts_are_never_truncated_but_refused_beyond_the_positions(folder):
    arguments = ["dataset=niah_single_1", "ruler.length=1024", f"data.dir={folder}", "limit=1"]

    cases = prepare(run_of(*arguments, "model.max_prompt_tokens=100")).cases
    assert [(case.prompt.truncated, len(case.prompt.token_ids) > 500) for case in cases] == [(False, True)]
    with pytest.raises(UserError, match=r"exceed the model's 4096 positions: lower ruler\.length"):
        _ = prepare(run_of(*arguments, "ruler.length=6000")).cases


def test_tasks_that_do_not_fit_are_named_together_with_what_leaves_them_out(folder):
    def refusal(*datasets):
        try:
            _ = prepare(
                run_of(f"dataset=[{','.join(datasets)}]", f"data.dir={folder}", "limit=1", "ruler.length=700")
            ).cases
        except UserError as error:
            return str(error)
        return ""

    fits, alone = "niah_single_1", {name: refusal(name) for name in ("vt", "cwe", "fwe")}
    assert refusal(fits) == ""
    refused = [name for name, message in alone.items() if message]
    assert len(refused) > 1
    without = " ".join(f"dataset.{name}=false" for name in refused)
    assert refusal(fits, *alone) == f"{'; '.join(alone[name] for name in refused)}, or leave out {without}"


def test_target_speedup_is_solved_for_the_length(folder):
    def keep(length):
        run = ["method=random_drop", "method.keep=2.0x", "dataset=niah_single_1", "limit=1", f"data.dir={folder}"]
        arms = prepare(run_of(*run, f"ruler.length={length}")).arms
        return arms[-1].solved["niah_single_1"]["keep"]

    # attention's share of the arithmetic grows with the length, and dropping a token saves more of it
    assert keep(4000) > keep(1024)


def test_task_without_corpus_is_left_out_of_the_suite_and_refused_by_name(folder):
    arguments = [f"data.dir={folder}", "dataset=ruler"]
    others = set(TASKS) - ESSAYS
    assert {dataset.name for dataset in run_of(*arguments).datasets} == others - QUESTIONS
    assert {dataset.name for dataset in run_of(*arguments, "dataset.vt=false").datasets} == others - QUESTIONS - {"vt"}
    (folder / "squad.json").write_text(json.dumps(SQUAD))
    assert {dataset.name for dataset in run_of(*arguments).datasets} == others - {"qa_2"}
    Path("text.txt").write_text("The wolves ran.")
    assert {dataset.name for dataset in run_of(*arguments, "ruler.haystack=text.txt").datasets} == set(TASKS) - {"qa_2"}
    for names, message in {
        "niah_single_2": r"niah_single_2: no text to hide needles in; give ruler\.haystack=FILE",
        "qa_2": r"qa_2: hotpotqa/hotpot_qa is not cached and cannot be downloaded: give data\.dir=FOLDER .* network",
        "[ruler,lookup]": "share no table",
    }.items():
        with pytest.raises(UserError, match=message):
            run_of(f"data.dir={folder}", f"dataset={names}")


def test_missing_package_is_refused_before_the_run(folder, monkeypatch):
    files = importlib.resources.files

    def missing(package):
        if package == "wonderwords":
            raise ModuleNotFoundError(package)
        return files(package)

    monkeypatch.setattr(importlib.resources, "files", missing)
    for name in ("niah_single_1", "cwe"):
        with pytest.raises(UserError, match=r"wonderwords, which is missing; .*lazyllm-bench\[ruler\]"):
            run_of(f"dataset={name}", f"data.dir={folder}")
    run_of("dataset=vt", f"data.dir={folder}")  # needs no words
