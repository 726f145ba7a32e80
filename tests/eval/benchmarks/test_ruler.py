"""RULER as own rows: official rows, settings and scorers, rows in the hub's columns, and a run."""

import ast
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from eval.run.arms import MethodAsked
from eval.run.cases import prompts_of
from eval.run.config import run_config

from eval.benchmarks import own
from eval.benchmarks.datasets import DATASETS, add_own
from eval.benchmarks.metrics import dataset_score, score_example
from eval.benchmarks.own import OwnDataset
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import DataSettings, LoadedDataset
from eval.cli import main
from eval.store.results import Results
from eval.store.runs import stored_runs
from lazyllm.errors import UserError
from lazyllm.models.config import shape_of
from lazyllm.spec import ModelSpec
from tests.eval import official
from tests.helpers import tiny
from tests.runs import run_of

ROWS = official.RULER / "rows"
FILES = sorted(ROWS.glob("*/*.jsonl"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tasks(*overrides: str) -> dict[str, OwnDataset]:
    return {
        dataset.name: dataset for dataset in add_own(run_config(["model=tiny", "dataset=ruler", *overrides]).dataset)
    }


def official_module(name: str) -> dict[str, Any]:
    return runpy.run_path(str(official.RULER / "official" / name))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def loaded(file: Path) -> LoadedDataset:
    """An official file as the run loads it."""
    return own.load(tasks(f"data.length={file.parent.name}")[file.stem], DataSettings(dir=file.parents[1]))


@official.needs(official.RULER)
def test_tasks_have_rulers_own_scorer_and_answer_length() -> None:
    chosen = yaml.safe_load((official.RULER / "official" / "synthetic.yaml").read_text())
    text = (official.RULER / "official" / "constants.py").read_text()
    kinds = next(ast.literal_eval(part.value) for part in ast.parse(text).body if isinstance(part, ast.Assign))
    scored = official_module("eval_constants.py")["TASKS"]
    scorers = {kind: about["metric_fn"].__name__ for kind, about in scored.items()}
    found = tasks()
    assert found.keys() == chosen.keys()
    for name, dataset in found.items():
        kind = chosen[name]["task"]
        assert (dataset.metric, dataset.max_new_tokens) == (scorers[kind], kinds[kind]["tokens_to_generate"])
        assert (dataset.suite, dataset.where, dataset.truncate) == ("ruler", {"task": name}, False)


@official.needs(ROWS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.stem}-{file.parent.name}")
def test_a_prompt_is_the_official_rows_text(file: Path) -> None:
    data, rows = loaded(file), rows_of(file)
    for example, row in zip(data.examples, rows, strict=True):
        prompt = build_prompt(example, data.dataset, official.llama2())
        assert prompt.text == row["input"] + row["answer_prefix"]
        assert len(prompt.token_ids) - 1 + data.max_new_tokens == row["length"]  # RULER counts no BOS
        assert example.answers == tuple(row["outputs"])
        assert [prompt.text[start:end] for start, end in prompt.context] == [example.context]
        assert all(output in example.context for output in row["outputs"])
        assert example.input == row["input"].rpartition("\n")[2]  # the question is the last line


@official.needs(ROWS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.stem}-{file.parent.name}")
def test_scores_equal_the_official_scorers(file: Path) -> None:
    data = loaded(file)
    score = official_module("eval_constants.py")[data.dataset.metric]
    for answer_of in (
        ", ".join,
        lambda golds: golds[0],
        lambda golds: " and ".join(golds[1:]).upper(),
        lambda golds: f"1. {golds[-1]}\n2. none",
        lambda golds: "none",
    ):
        answers = [answer_of(example.answers) for example in data.examples]
        golds = [[*example.answers] for example in data.examples]
        ours = [score_example(data.dataset, *pair) for pair in zip(answers, golds, strict=True)]
        assert dataset_score(ours) == score(answers, golds)


# Rows in RULER's forms, in words of our own. `question` begins where the hub's rows have it
MADE: dict[str, tuple[str, str, str, list[str]]] = {  # {task: context, question, answer prefix, gold answers}
    "niah_multiquery": (
        "Numbers are hidden here.\nGo on. ak is: 12. What is it? bm is: 34.\n",
        "What are all the special magic numbers for ak, and bm mentioned in the provided text?",
        " The special magic numbers for ak, and bm mentioned in the provided text are",
        ["12", "34"],
    ),
    "vt": (
        "Learn this.\nVAR A = 1\nQuestion: Find all that are 1. Answer: A\nNow this.\nVAR B = 2\n",
        "Question: Find all variables that are assigned the value 2 in the text above.",
        " Answer: they are: ",
        ["B"],
    ),
    "qa_1": (
        "Answer the question based on the documents. Be brief.\n\nDocument 1: Ann sat.\n\nQuestion: no?\n\n",
        "Answer the question based on the documents. Be brief.\n\nQuestion: Who sat?",
        " Answer:",
        ["Ann", "Ann B"],
    ),
}  # fmt: skip


def written(folder: Path, length: int = 300, words: int = 0, more: Sequence[str] = ()) -> Path:
    """The rows above as RULER's scripts write them, each after that many words and with more gold answers."""
    (folder / str(length)).mkdir(parents=True)
    for task, (context, question, prefix, golds) in MADE.items():
        row = {
            "index": 7,
            "input": "word " * words + context + question,
            "outputs": [*golds, *more],
            "answer_prefix": prefix,
        }
        (folder / str(length) / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def on_hub(length: int = 4096) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """The same as simonjegou/ruler has them: the space before the answer prefix ends the question."""
    names = ("context", "question", "answer_prefix", "answer")
    rows = [
        dict(zip(names, (context, f"{question} ", prefix[1:], golds), strict=True))
        | {"task": task, "max_new_tokens": 5}
        for task, (context, question, prefix, golds) in MADE.items()
    ]
    return {("simonjegou/ruler", str(length), "test"): rows}


def test_rows_of_the_hub_and_of_a_folder_make_the_same_prompts(tmp_path: Path, hub_rows: Any) -> None:
    written(tmp_path, 8192)
    hub_rows.update(on_hub(8192))
    found = tasks("data.length=8192")
    for task, (context, question, prefix, golds) in MADE.items():
        for settings in (DataSettings(), DataSettings(dir=tmp_path)):
            (example,) = own.load(found[task], settings).examples
            assert build_prompt(example, found[task], tiny()[1]).text == context + question + prefix
            assert (example.context, example.input.strip(), example.answers) == (context, question, tuple(golds))
    with pytest.raises(UserError, match="simonjegou/ruler, 8192: no usable row"):
        own.load(found["cwe"], DataSettings())


def test_rows_without_the_column_or_the_question_are_refused(tmp_path: Path, hub_rows: Any) -> None:
    written(tmp_path, 4096)
    file, vt = tmp_path / "4096" / "vt.jsonl", tasks()["vt"]
    file.write_text(file.read_text().replace("Question: ", ""))
    with pytest.raises(UserError, match=r"vt\.jsonl:1: field 'input': no question is in it: expected 'What "):
        own.load(vt, DataSettings(dir=tmp_path))
    hub_rows["simonjegou/ruler", "4096", "test"] = [{"kind": "vt", "answer": ["B"]}]
    with pytest.raises(UserError, match="where: no column 'task': the rows have kind, answer"):
        own.load(vt, DataSettings())


def test_tasks_are_chosen_by_name_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = f"data.dir={written(tmp_path)}"

    def names(*overrides: str) -> list[str]:
        return [dataset.name for dataset in run_of("model=tiny", "data.length=300", folder, *overrides).datasets]

    assert names("dataset=ruler") == ["niah_multiquery", "vt", "qa_1"]
    left_out = "niah_single_1, niah_single_2, niah_single_3, niah_multikey_1, niah_multikey_2, niah_multikey_3, "
    left_out += "niah_multivalue, cwe, fwe, qa_2"
    assert caplog.messages == [f"left out: {left_out}: its file is not in {tmp_path / '300'}"]
    assert names("dataset=[vt,qa_1]") == ["vt", "qa_1"]
    assert names("dataset=ruler", "dataset.vt=false") == ["niah_multiquery", "qa_1"]
    for dataset in ("cwe", "[cwe,fwe]"):
        with pytest.raises(UserError, match="cwe: its file is not in"):
            names(f"dataset={dataset}")
    with pytest.raises(UserError, match=r"dataset=vt, lookup: expected own datasets alone"):
        names("dataset=[vt,lookup]")


def test_without_a_network_or_a_folder_a_line_says_what_to_give(tmp_path: Path, no_hub: None) -> None:
    out = "give data.dir=FOLDER with 8192/vt.jsonl, or run once with a network"
    with pytest.raises(UserError, match=rf"^vt: simonjegou/ruler is not cached and cannot be downloaded: {out}"):
        run_of("model=tiny", "dataset=vt", "data.length=8192")


@pytest.mark.parametrize(("words", "is_refused"), [(400, False), (5000, True)])
def test_a_prompt_is_whole_or_refused(tmp_path: Path, words: int, is_refused: bool) -> None:
    folder = written(tmp_path, words=words)
    run = ["dataset=vt", f"data.dir={folder}", "data.length=300", "model.max_prompt_tokens=100"]
    if is_refused:
        with pytest.raises(UserError, match=r"exceed the model's 4096 positions: choose shorter rows"):
            prompts_of(run_of("model=tiny", *run))
    else:
        (case,) = prompts_of(run_of("model=tiny", *run))
        assert not case.prompt.truncated
        assert case.prompt.text.count("word ") == words


def test_a_target_speedup_is_solved_for_the_rows_length() -> None:
    def keep(length: int) -> float:
        vt, shape = tasks(f"data.length={length}")["vt"], shape_of(ModelSpec("llama2", "dummy"))
        arm = MethodAsked.of({"name": "random_drop", "keep": "2x"}).arm("random_drop", [vt], shape)
        return arm.solved["vt"]["keep"]

    # attention's share of the arithmetic grows with the length, and dropping a token saves more of it
    assert keep(16384) > keep(4096)


def test_a_run_comes_to_a_score_for_each_task_and_their_mean(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows", more=[""])  # which every answer contains
    run = ["dataset=ruler", f"data.dir={rows}", "data.length=300", "method=lazy", "warmup=0"]
    assert main(["run", "model=tiny", *run, "max_new_tokens=4", "threads=1", f"out={tmp_path / 'run'}"]) == 0
    for name in tasks():  # as in another process, which knows no such dataset before it reads the run
        del DATASETS[name]
    results = Results(stored_runs([tmp_path / "run"]))
    table = results.by_task[results.by_task["method"] == "lazy"]
    assert [(row["suite"], row["level"], row["name"]) for row in table.to_dict("records")] == [
        *(("ruler", "dataset", name) for name in MADE),
        ("ruler", "task", "own"),
        ("ruler", "all", "all"),
    ]
    # one of three answers, one of two, any of three; then their mean
    assert table["score"].tolist() == pytest.approx([33.33, 50, 100, 61.11, 61.11], abs=0.005)
