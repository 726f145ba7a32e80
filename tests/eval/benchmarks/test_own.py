"""A user's own rows: CSV, Parquet and gzipped lines to the same examples, to scores, to another process's report."""

import datetime
import gzip
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from eval.run.arms import MethodAsked
from eval.run.config import run_config

from eval.benchmarks.datasets import TASKS, add_own, datasets_asked_for, load_rows
from eval.benchmarks.metrics import score_example
from eval.benchmarks.own import OwnDataset, described, missing, own_dataset
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import DataSettings
from eval.cli import main
from lazyllm.errors import UserError
from lazyllm.models.config import shape_of
from lazyllm.spec import ModelSpec
from tests.helpers import tiny

ROWS = [
    {"n": "a", "report": "aq copper. bq river.", "question": "Entry bq?", "answer": "river"},
    {"n": "b", "report": "cq stone. dq maple.", "question": "Entry cq?", "answer": "stone"},
]  # fmt: skip
ABOUT: dict[str, Any] = {
    "template": "Notes: {report}\nQuestion: {question}", "context": "report", "answers": "answer", "metric": "f1",
    "max_new_tokens": 4, "id": "n",
}  # fmt: skip
LEFT_OUT = object()


def written(folder: Path, kind: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    file = folder / f"rows{kind}"
    if kind == ".csv":
        pd.DataFrame(rows).to_csv(file, index=False)
    elif kind == ".parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file.write_bytes(gzip.compress(lines) if kind == ".jsonl.gz" else lines)
    return file


def loaded(file: Path, **changes: Any) -> Any:
    (own,) = add_own({"mine": ABOUT | {"file": str(file)} | changes})
    return load_rows(own)


@pytest.mark.parametrize("kind", [".csv", ".parquet", ".jsonl.gz", ".jsonl", ".json"])
def test_rows_of_any_file_are_the_same_examples_with_texts_as_they_stand_there(tmp_path: Path, kind: str) -> None:
    texts = ["0042", "10", "7.5", "None", "NA", "2020-01-05", "true", "12345678901234567890", 'ä, "ö"\nü']
    rows = [*ROWS, *({**ROWS[0], "n": f"row {text}", "question": text, "answer": text} for text in texts)]
    data = loaded(written(tmp_path, kind, rows))
    for example, row in zip(data.examples, rows, strict=True):
        assert (example.dataset, example.id, example.answers) == ("mine", row["n"], (row["answer"],))
        text = f"Notes: {row['report']}\nQuestion: {row['question']}"
        assert example.instruction + example.context + example.input == text
    prompt = build_prompt(data.examples[0], data.dataset, tiny()[1])
    assert prompt.text.endswith("Notes: aq copper. bq river.\nQuestion: Entry bq?")
    assert [prompt.text[start:end] for start, end in prompt.context] == [ROWS[0]["report"]]


def test_repeated_rows_are_told_as_intervals_take_them_for_independent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(written(tmp_path, ".jsonl", [*ROWS, {**ROWS[0], "n": "c"}, {**ROWS[0], "answer": "copper", "n": "d"}]))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'rows.jsonl'}: 1 of 4 rows repeat others, but count as independent"
    ]


def test_what_a_prompt_is_made_of_is_hashed_and_a_files_name_is_not(tmp_path: Path) -> None:
    file = written(tmp_path, ".jsonl")
    data = loaded(file)
    for changes in ({"template": "{report}{question}"}, {"metric": "rouge"}, {"max_new_tokens": 5}, {"version": 2}):
        assert loaded(file, **changes).config_sha256 != data.config_sha256
    (tmp_path / "else").mkdir()
    moved = loaded(written(tmp_path / "else", ".jsonl"), prompt_tokens=90)
    assert (moved.data_sha256, moved.config_sha256) == (data.data_sha256, data.config_sha256)
    assert loaded(written(tmp_path, ".jsonl", ROWS[:1])).data_sha256 != data.data_sha256


def test_lists_of_answers_and_classes_and_numbers_as_in_the_file(tmp_path: Path) -> None:
    rows = [{**row, "answer": ["river", 7, 2.5, 12345678901234567890], "second": "lake"} for row in ROWS]
    about: Any = {"answers": ["answer", "second"], "metric": "classification"}
    answers = ("river", "7", "2.5", "12345678901234567890", "lake")
    file = written(tmp_path, ".jsonl", rows)
    (example, _) = loaded(file, **about, classes=["sea", *answers]).examples
    assert example.answers == answers
    assert example.all_classes == ("sea", *answers)
    with pytest.raises(UserError, match=r"'lake'.* is not in classes: river, 7"):
        loaded(file, **about, classes=[*answers[:-1]])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"metrics": "f1"}, "dataset.mine.metrics"),
        ({"metric": "bleu"}, "dataset.mine.metric"),
        ({"context": "question text"}, "dataset.mine.context"),
        ({"template": "{report} {report}"}, "dataset.mine.context"),
        ({"template": "{report} {"}, "dataset.mine.template"),
        ({"max_new_tokens": 0}, "dataset.mine.max_new_tokens"),
        ({"max_new_tokens": "4"}, "dataset.mine.max_new_tokens"),
        ({"prompt_tokens": -1}, "dataset.mine.prompt_tokens"),
        ({"prompt_tokens": "long"}, "dataset.mine.prompt_tokens"),
        ({"hub": "me/rows"}, "dataset.mine.file"),
        ({"file": ""}, "dataset.mine.file"),
        ({"file": "rows.xlsx"}, "dataset.mine.file"),
        ({"task": "few_shot"}, "dataset.mine.task"),
        ({"template": "{report!s} {question}"}, "dataset.mine.context"),
        ({"template": 5}, "dataset.mine.template"),
        ({"file": ["rows.csv"]}, "dataset.mine.file"),
        ({"chat_wrap": "no"}, "dataset.mine.chat_wrap"),
        ({"answers": ["answer", 3]}, "dataset.mine.answers"),
        ({"classes": "river"}, "dataset.mine.classes"),
        ({"metric": "classification"}, "dataset.mine.classes"),
        ({"answers": []}, "dataset.mine.answers"),
        ({"question": "(who"}, "dataset.mine.question"),
        ({"where": {"task": "a"}}, "dataset.mine.where"),
        ({"folder": {"context": "report"}}, "dataset.mine.folder"),
        ({"file": "", "hub": "me/rows", "where": "task"}, "dataset.mine.where"),
        ({"file": "", "hub": "me/rows", "folder": "rows.csv"}, "dataset.mine.folder"),
        ({"file": "", "hub": "me/rows", "folder": {"template": "{text}"}}, "dataset.mine.folder.context"),
        ({"file": "", "hub": "me/rows", "folder": {"metric": "f1"}}, "dataset.mine.folder.file"),
        *(({key: LEFT_OUT}, f"dataset.mine.{key}") for key in [*ABOUT][:5]),
    ],
)
def test_a_bad_description_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"^{key}="):
        given = {"file": "rows.csv", **ABOUT, **changes}
        own_dataset("mine", {name: value for name, value in given.items() if value is not LEFT_OUT})


@pytest.mark.parametrize(
    ("row", "metric", "reason"),
    [
        ({"question": None}, "f1", "question"),
        ({"question": "cq \ud800"}, "f1", "question. has half"),
        ({"answer": [""]}, "f1", "answer"),
        *(
            ({"answer": bad}, "f1", "answer. must be a text or a number")
            for bad in ([None], [["x"]], {"text": "x"}, math.nan)
        ),
        ({"question": ["x"]}, "f1", "question. must be a text or a number"),
        ({}, "retrieval", "answers must read 'Paragraph <number>', got 'stone'"),
    ],
)
def test_a_bad_row_is_named_by_file_number_and_field(
    tmp_path: Path, row: dict[str, Any], metric: str, reason: str
) -> None:
    file = written(tmp_path, ".jsonl", [ROWS[0] | {"answer": [5]}, ROWS[1] | {"answer": ["stone"]} | row])
    with pytest.raises(UserError, match=rf"rows\.jsonl:2: .*{reason}"):
        loaded(file, metric=metric)


def test_columns_that_json_lacks_stand_beside_the_rows_texts(tmp_path: Path) -> None:
    rows = [{**row, "day": datetime.date(2026, 11, 25), "picture": b"\x89"} for row in ROWS]
    file = written(tmp_path, ".parquet", rows)
    ids = [one.id for one in loaded(file, id="").examples]
    assert len({*ids}) == 2
    assert [one.id for one in loaded(file, id="").examples] == ids
    assert loaded(file, template="{report} {day}").examples[0].input == " 2026-11-25"
    with pytest.raises(UserError, match=r"field 'picture' must be a text or a number, got b"):
        loaded(file, template="{report} {picture}")


@pytest.mark.parametrize("line", ["aq copper.,Entry", "a,b,c,d,e,f"])
def test_a_csv_field_may_be_long_and_a_row_with_another_number_of_fields_is_named(tmp_path: Path, line: str) -> None:
    file = written(tmp_path, ".csv", [ROWS[0] | {"report": "bq river. " + "aq copper. " * 20_000}])
    assert len(loaded(file).examples[0].context) == 220_010
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"rows\.csv:3: not as many fields as the first line"):
        loaded(file)


LINES = "".join(json.dumps({**ROWS[0], "n": number}) + "\n" for number in range(50)).encode()


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (".parquet", b"no table"),
        (".csv", b"n,report,report\na,b,c\n"),
        (".json", b"[\n{'a': 1}\n]"),
        (".json", b"[\xff]"),
        (".jsonl.gz", b"no gzip"),
        (".jsonl.gz", gzip.compress(LINES)[:-20]),
        (".jsonl.gz", gzip.compress(LINES)[:30] + b"\xff" * 9 + gzip.compress(LINES)[39:]),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, kind: str, content: bytes) -> None:
    (tmp_path / f"rows{kind}").write_bytes(content)
    with pytest.raises(UserError, match=rf"rows\{kind}: not a table of rows"):
        loaded(tmp_path / f"rows{kind}")


@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".json"])
def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path, kind)
    content = json.dumps(ROWS, indent=1).encode() if kind == ".json" else file.read_bytes()
    file.write_bytes(b"\xef\xbb\xbf" + content)
    assert [one.id for one in loaded(file).examples] == ["a", "b"]


@pytest.mark.parametrize("text", ["{}", "- mine", "1: {file: rows.csv}", "mine: 5"])
def test_a_file_without_descriptions_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml: expected NAME: with "):
        described(tmp_path / "mine.yaml")


def test_a_dataset_of_the_hub_without_a_network_says_what_to_do(no_hub: None) -> None:
    reason = missing(own_dataset("mine", ABOUT | {"hub": "me/rows"}), DataSettings())
    assert re.fullmatch(r"me/rows is not cached .* dataset\.mine\.file=FILE, or run once with a network", reason or "")


def test_names_of_suites_are_refused_and_own_ones_stand_alone() -> None:
    about = ABOUT | {"file": "rows.csv"}
    for name in ("hotpotqa", "embedded", "few_shot", "all"):  # a dataset, a suite, a task, a suite's name in configs
        with pytest.raises(UserError, match=rf"dataset\.{name}: .* is named '{name}'; give another"):
            add_own({name: about})
        with pytest.raises(UserError, match=rf"dataset\.mine: .* is named '{name}'; give another"):
            add_own({"mine": about | {"suite": name}})
    with pytest.raises(UserError, match="own datasets alone"):
        datasets_asked_for({"mine": about, "hotpotqa": True}, "llama2")
    (own,) = datasets_asked_for({"mine": about}, "llama2")
    assert isinstance(own, OwnDataset)
    assert own.task in TASKS


def test_the_example_in_conf_is_a_whole_description() -> None:
    (name, description), *others = described(Path("conf/dataset/example.yaml")).items()
    assert not others
    assert Path(own_dataset(name, description).file).is_absolute()


def test_datasets_of_the_hub_in_conf_become_rows_and_scores(hub_rows: Any) -> None:
    graph = {"prompt": "a -> b\nOperation: find", "answer_nodes": ["b", "c"], "problem_type": "bfs", "prompt_chars": 22}
    hub_rows["openai/graphwalks", None, "train"] = [graph]
    fact = {"input": "It rained. Mary went to the garden. ", "question": "Where is Mary? ", "target": "garden"}
    for split in ("qa1", "qa2"):
        hub_rows["RMT-team/babilong", "4k", split] = [fact]
    (walks,) = add_own(run_config(["model=tiny", "dataset=graphwalks"]).dataset)
    (example,) = load_rows(walks).examples
    assert (example.context, example.answers) == (graph["prompt"], ("b", "c"))
    assert score_example(walks, "b leads to c.\nFinal Answer: [c, d]", example.answers) == 0.5
    one, two = add_own(run_config(["model=tiny", "dataset=babilong"]).dataset)
    for own in (one, two):
        (example,) = load_rows(own).examples
        assert (example.context, example.answers) == (fact["input"], ("garden",))
        assert example.input == "\n\nQuestion: Where is Mary? \nAnswer:"
        assert score_example(own, " the garden\nor the kitchen", example.answers, example.all_classes) == 1
        assert score_example(own, "kitchen", example.answers, example.all_classes) == 0


def test_a_target_speedup_is_solved_for_the_rows_own_length_or_refused() -> None:
    def solved(prompt_tokens: int) -> dict[str, Any]:
        (own,) = add_own({"mine": ABOUT | {"file": "rows.csv", "prompt_tokens": prompt_tokens}})
        shape = shape_of(ModelSpec("llama2", "dummy"))
        return MethodAsked.of({"name": "lazy", "schedule": "2x"}).arm("lazy", [own], shape).solved[own.name]

    with pytest.raises(UserError, match=r"^dataset\.mine\.prompt_tokens=0: expected the rows' mean"):
        solved(0)
    assert solved(3376)["schedule"] != solved(20_000)["schedule"]


def test_two_own_datasets_come_to_scores_of_their_own_and_to_the_report_of_another_process(
    tmp_path: Path, capsys: Any
) -> None:
    runs, options = tmp_path / "runs", ["model=tiny", "method=lazy", "warmup=0", "threads=1"]
    for name, kind in (("mine", ".csv"), ("other", ".parquet")):
        about = {name: ABOUT | {"file": written(tmp_path, kind).name}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(about))
        assert main(["run", f"dataset={tmp_path / name}.yaml", *options, f"out={runs / name}"]) == 0
        visits = [json.loads(line) for line in (runs / name / "visits.jsonl").read_text().splitlines()]
        assert [(visit["dataset"], visit["id"]) for visit in visits] == [(name, "a"), (name, "b")]
        assert {*visits[0]["arms"]} == {"baseline", "lazy"}
    capsys.readouterr()
    for quote in ("", '"', "'"):
        assert main(["rows", f"dataset={quote}{tmp_path / 'mine.yaml'}{quote}", options[0]]) == 0
    shown = capsys.readouterr().out
    assert "Notes: aq copper. bq river.\nQuestion: Entry bq?" in shown
    assert "gold: river" in shown
    code = "import sys; from eval.cli import main; sys.exit(main(sys.argv[1:]))"
    listed, _ = (
        subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True).stdout
        for command in (["results", str(runs), "--json"], ["paper", str(runs), "--formats", "html"])
    )
    assert {(row["suite"], row["examples"]) for row in json.loads(listed)} == {("mine", 2), ("other", 2)}
    assert "mine" in (runs / "paper" / "index.html").read_text()
