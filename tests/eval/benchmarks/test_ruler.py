"""RULER as own rows: official rows, settings and scorers, rows in the hub's columns, and a run."""

import ast
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.benchmarks.datasets import DATASETS, choose
from eval.benchmarks.metrics import dataset_score, score_example
from eval.benchmarks.own import OwnDataset
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import LoadedDataset
from eval.cli import main
from eval.compose import read
from eval.run.check import choose_data
from eval.run.prepare import prompts_of
from eval.store.results import Results
from eval.store.runs import stored_runs
from lazyllm.errors import UserError
from tests.eval import official
from tests.eval.benchmarks.loading import context_of, load
from tests.helpers import tiny

ROWS = official.RULER / "rows"
FILES = sorted(ROWS.glob("*/*.jsonl"))


def tasks(length: int = 4096) -> dict[str, OwnDataset]:
    """The datasets of `dataset=ruler`."""
    found = {dataset.name: dataset for dataset in choose(["ruler"], "tiny", length)}
    assert all(isinstance(dataset, OwnDataset) for dataset in found.values())
    return found  # type: ignore[return-value]


def official_module(name: str) -> dict[str, Any]:
    return runpy.run_path(str(official.RULER / "official" / name))


@official.needs(official.RULER)
def test_tasks_have_rulers_own_scorer_and_answer_length() -> None:
    chosen = yaml.safe_load((official.RULER / "official" / "synthetic.yaml").read_text())
    body = ast.parse((official.RULER / "official" / "constants.py").read_text()).body
    kinds = next(ast.literal_eval(part.value) for part in body if isinstance(part, ast.Assign))
    scored = official_module("eval_constants.py")["TASKS"]
    found = tasks()
    assert found.keys() == chosen.keys()
    for name, dataset in found.items():
        kind = chosen[name]["task"]
        expected = scored[kind]["metric_fn"].__name__, kinds[kind]["tokens_to_generate"]
        assert (dataset.metric, dataset.max_new_tokens) == expected
        assert (dataset.suite, dataset.where) == ("ruler", {"task": name})
        assert dataset.prompt_tokens == 4096  # for which a speedup is solved


@official.needs(ROWS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.stem}-{file.parent.name}")
def test_prompts_and_scores_of_official_rows_are_official(file: Path) -> None:
    tasks(int(file.parent.name))
    data: LoadedDataset = load(file.stem, file.parents[1])
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for example, row in zip(data.examples, rows, strict=True):
        prompt = build_prompt(example, data.dataset, official.llama2())
        assert prompt.text == row["input"] + row["answer_prefix"]
        tokens = len(prompt.token_ids) - 1 + data.max_new_tokens
        assert tokens == row["length"]  # RULER counts no BOS
        assert example.answers == tuple(row["outputs"])
        assert context_of(prompt) == [example.context]
        assert all(output in example.context for output in row["outputs"])
        assert example.input == row["input"].rpartition("\n")[2]  # the question is the last line
    score = official_module("eval_constants.py")[data.dataset.metric]
    golds = [[*example.answers] for example in data.examples]
    for answer_of in (
        ", ".join,
        lambda golds: golds[0],
        lambda golds: " and ".join(golds[1:]).upper(),
        lambda golds: f"1. {golds[-1]}\n2. none",
        lambda golds: "none",
    ):
        answers = [*map(answer_of, golds)]
        pairs = zip(answers, golds, strict=True)
        ours = [score_example(data.dataset, *pair) for pair in pairs]
        assert dataset_score(ours) == score(answers, golds)


# Rows in RULER's forms, in words of our own. `question` begins where the hub's rows have it
MADE: dict[str, tuple[str, str, str, list[str]]] = {  # context, question, answer prefix, golds
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
        "Answer the question based on the documents. Be brief.\n\nDocument 1: Ann sat.\n\n"
        "Question: no?\n\n",
        "Answer the question based on the documents. Be brief.\n\nQuestion: Who sat?",
        " Answer:",
        ["Ann", "Ann B"],
    ),
}  # fmt: skip


def written(folder: Path, length: int, words: int = 0, more: Sequence[str] = ()) -> Path:
    """The rows as RULER's scripts write them, after that many words, with more gold answers."""
    (folder / str(length)).mkdir(parents=True)
    for task, (context, question, prefix, golds) in MADE.items():
        text = "word " * words + context + question
        row = {"index": 7, "input": text, "outputs": [*golds, *more], "answer_prefix": prefix}
        (folder / str(length) / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def on_hub() -> list[dict[str, Any]]:
    """The same as simonjegou/ruler has them: the space before the prefix ends the question."""
    rows = []
    for task, (context, question, prefix, golds) in MADE.items():
        row = {"context": context, "question": f"{question} ", "answer_prefix": prefix[1:]}
        rows.append(row | {"answer": golds, "task": task, "max_new_tokens": 5})
    return rows


def test_rows_of_the_hub_and_of_a_folder_make_the_same_prompts(
    tmp_path: Path, hub_rows: Any
) -> None:
    written(tmp_path, 8192)
    hub_rows["simonjegou/ruler", "8192", "test"] = on_hub()
    found = tasks(8192)
    for task, (context, question, prefix, golds) in MADE.items():
        for folder in (None, tmp_path):
            (example,) = load(task, folder).examples
            prompt = build_prompt(example, found[task], tiny()[1])
            assert prompt.text == context + question + prefix
            assert (example.context, example.answers) == (context, tuple(golds))
            assert example.input.strip() == question
    with pytest.raises(UserError, match="simonjegou/ruler, 8192: no usable row"):
        load("cwe")


def test_rows_without_the_column_or_the_question_are_refused(tmp_path: Path, hub_rows: Any) -> None:
    tasks()
    file = written(tmp_path, 4096) / "4096" / "vt.jsonl"
    file.write_text(file.read_text().replace("Question: ", ""))
    reason = r"vt\.jsonl:1: field 'input': no question is in it: expected 'What "
    with pytest.raises(UserError, match=reason):
        load("vt", tmp_path)
    hub_rows["simonjegou/ruler", "4096", "test"] = [{"kind": "vt", "answer": ["B"]}]
    with pytest.raises(UserError, match="where: no column 'task': the rows have kind, answer"):
        load("vt")


def test_tasks_without_a_file_are_left_out_unless_they_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written(tmp_path, 300)

    def names(chosen: str) -> list[str]:
        settings = [f"dataset={chosen}", "data.length=300", f"data.dir={folder}"]
        return [dataset.name for dataset in choose_data(read(["model=tiny", *settings]))[0]]

    assert names("ruler") == [*MADE]
    left_out = [name for name in tasks() if name not in MADE]
    reason = f"its file is not in {tmp_path / '300'}"
    assert caplog.messages == [f"left out: {', '.join(left_out)}: {reason}"]
    assert names("[vt,qa_1]") == ["vt", "qa_1"]
    with pytest.raises(UserError, match="cwe: its file is not in"):
        names("[cwe,fwe]")


def test_without_a_network_or_a_folder_a_line_says_what_to_give(hub_rows: Any) -> None:
    reason = r"vt: simonjegou/ruler is not cached and cannot be downloaded \(.*\): "
    instead = "give data.dir=FOLDER with 8192/vt.jsonl, or run once with a network"
    with pytest.raises(UserError, match=f"^{reason}{instead}$"):
        choose_data(read(["model=tiny", "dataset=vt", "data.length=8192"]))


@pytest.mark.parametrize(("words", "is_refused"), [(400, False), (5000, True)])
def test_a_prompt_is_whole_or_refused(tmp_path: Path, words: int, is_refused: bool) -> None:
    folder = written(tmp_path, 300, words)
    data = ["dataset=vt", f"data.dir={folder}", "data.length=300"]
    config = read(["model=tiny", "model.max_prompt_tokens=100", *data])
    if is_refused:
        with pytest.raises(UserError, match=r"4096 positions: choose shorter rows"):
            prompts_of(config)
    else:
        (prompt,) = prompts_of(config)
        assert not prompt.truncated
        assert prompt.text.count("word ") == words


def test_a_run_comes_to_a_score_for_each_task_and_their_mean(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows", 300, more=[""])  # which every answer contains
    data = ["dataset=ruler", f"data.dir={rows}", "data.length=300", "max_new_tokens=4"]
    run = ["model=tiny", "method=lazy", "warmup=0", "threads=1", f"out={tmp_path / 'run'}"]
    assert main(["run", *run, *data]) == 0
    for name in tasks():  # as in another process, which knows no such dataset before it reads
        del DATASETS[name]
    table = Results(stored_runs([tmp_path / "run"])).by_task
    table = table[table["method"] == "lazy"]
    found = [(row["suite"], row["level"], row["name"]) for row in table.to_dict("records")]
    ends = [("ruler", "task", "own"), ("ruler", "all", "all")]
    assert found == [*(("ruler", "dataset", name) for name in MADE), *ends]
    # one of three answers, one of two, any of three; then their mean
    scores = [33.33, 50, 100, 61.11, 61.11]
    assert table["score"].tolist() == pytest.approx(scores, abs=0.005)
