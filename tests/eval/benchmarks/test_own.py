"""A user's own rows: files of any kind, descriptions, and the scores of another process."""

import datetime
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from eval.arms import Arm
from eval.benchmarks.datasets import DESCRIPTIONS, add_own, choose
from eval.benchmarks.metrics import score_example
from eval.benchmarks.own import described, missing, own_dataset
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import DataSettings, LoadedDataset
from eval.cli import main
from eval.store.folder import read_visits
from lazyllm.errors import UserError
from lazyllm.models.config import shape_of
from lazyllm.spec import ModelSpec
from tests.eval.benchmarks.loading import context_of, load
from tests.helpers import tiny

ROWS = [
    {"n": "a", "report": "aq copper. bq river.", "question": "Entry bq?", "answer": "river"},
    {"n": "b", "report": "cq stone. dq maple.", "question": "Entry cq?", "answer": "stone"},
]
ABOUT: dict[str, Any] = {
    "template": "Notes: {report}\nQuestion: {question}",
    "context": "report",
    "answers": "answer",
    "metric": "f1",
    "max_new_tokens": 4,
    "id": "n",
}
HUB = {"file": "", "hub": "me/rows"}


def written(folder: Path, kind: str = ".jsonl", rows: list[dict[str, Any]] = ROWS) -> Path:
    file = folder / f"rows{kind}"
    if kind == ".csv":
        pd.DataFrame(rows).to_csv(file, index=False)
    elif kind == ".parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file.write_bytes(gzip.compress(lines) if kind == ".jsonl.gz" else lines)
    return file


def loaded(file: Path, **changes: Any) -> LoadedDataset:
    add_own({"mine": ABOUT | {"file": str(file)} | changes})
    return load("mine")


@pytest.mark.parametrize("kind", [".csv", ".parquet", ".jsonl.gz", ".jsonl", ".json"])
def test_rows_of_any_file_are_the_same_examples_with_texts_as_they_stand_there(
    tmp_path: Path, kind: str
) -> None:
    texts = ["0042", "10", "7.5", "None", "NA", "2020-01-05", "true", "12345678901234567890"]
    texts.append('ä, "ö"\nü')
    changes = ({"n": f"row {text}", "question": text, "answer": text} for text in texts)
    rows = [*ROWS, *(ROWS[0] | change for change in changes)]
    data = loaded(written(tmp_path, kind, rows))
    for example, row in zip(data.examples, rows, strict=True):
        found = (example.dataset, example.id, example.answers)
        assert found == ("mine", row["n"], (row["answer"],))
        text = f"Notes: {row['report']}\nQuestion: {row['question']}"
        assert example.instruction + example.context + example.input == text
    prompt = build_prompt(data.examples[0], data.dataset, tiny()[1])
    assert prompt.text == "Notes: aq copper. bq river.\nQuestion: Entry bq?"
    assert context_of(prompt) == [ROWS[0]["report"]]


def test_what_a_prompt_is_made_of_is_hashed_and_a_files_name_is_not(tmp_path: Path) -> None:
    file = written(tmp_path)
    data = loaded(file)
    for key, value in {
        "template": "{report}{question}",
        "metric": "rouge",
        "max_new_tokens": 5,
        "version": 2,
    }.items():
        assert loaded(file, **{key: value}).config_sha256 != data.config_sha256
    (tmp_path / "else").mkdir()
    moved = loaded(written(tmp_path / "else"), prompt_tokens=90)
    assert (moved.data_sha256, moved.config_sha256) == (data.data_sha256, data.config_sha256)
    assert loaded(written(tmp_path, rows=ROWS[:1])).data_sha256 != data.data_sha256


def test_lists_of_answers_and_classes_and_numbers_as_in_the_file(tmp_path: Path) -> None:
    held = ["river", 7, 2.5, 12345678901234567890]
    rows = [row | {"answer": held, "second": "lake"} for row in ROWS]
    about: Any = {"answers": ["answer", "second"], "metric": "classification"}
    answers = ("river", "7", "2.5", "12345678901234567890", "lake")
    file = written(tmp_path, rows=rows)
    (example, _) = loaded(file, **about, classes=["sea", *answers]).examples
    assert (example.answers, example.all_classes) == (answers, ("sea", *answers))
    with pytest.raises(UserError, match=r"'lake'.* is not in classes: river, 7"):
        loaded(file, **about, classes=[*answers[:-1]])


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"metrics": "f1"}, "metrics=f1: no such key: the nearest names are metric,"),
        ({"task": "few_shot"}, "task=few_shot: no such key"),
        ({"metric": "bleu"}, "metric=bleu: expected one of f1, rouge,"),
        ({"metric": "classification"}, "classes=.*: expected the class names"),
        ({"context": "question text"}, "context=.*: expected a field of the template, once: rep"),
        ({"template": "{report} {report}"}, "context=report: expected .*, once"),
        ({"template": "{report!s} {question}"}, "context=report: expected .*, once"),
        ({"template": "{report} {"}, "template=.*: expected a text with {fields}"),
        ({"template": "{report} \ud800"}, "template=.*: expected a text without half a surrog"),
        ({"template": 5}, "template=5: expected a text"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected 1 or more"),
        ({"max_new_tokens": "4"}, "max_new_tokens=4: expected a whole number"),
        ({"prompt_tokens": -1}, "prompt_tokens=-1: expected 0 or more"),
        ({"chat_wrap": "no"}, "chat_wrap=no: expected true or false"),
        ({"answers": ["answer", 3]}, "answers=.*: expected a text or a list of texts"),
        ({"answers": []}, "answers=.*: expected a field of the rows, or several"),
        ({"question": "(who"}, r"question=\(who: expected a regular expression"),
        ({"file": ""}, "file=: expected a file, or hub: OWNER/NAME instead"),
        ({"hub": "me/rows"}, "file=rows.csv: expected a file, or hub: OWNER/NAME instead"),
        ({"file": "rows.xlsx"}, r"file=rows.xlsx: expected .jsonl, .json, .csv, .parquet"),
        ({"where": {"task": "a"}}, "where=.*: expected hub: OWNER/NAME with it"),
        ({"folder": {"file": "a.csv"}}, "folder=.*: expected hub: OWNER/NAME with it"),
        (HUB | {"where": "task"}, "where=task: expected a mapping"),
        (HUB | {"folder": "rows.csv"}, "folder=rows.csv: expected a mapping"),
        (HUB | {"folder": {"file": "a.csv", "template": "{text}"}}, "folder.context=report: "),
        (HUB | {"folder": {"metric": "f1"}}, "folder.file=: expected a file"),
        *(({key: None}, f"{key}=null: expected a value") for key in [*ABOUT][:5]),
    ],
)
def test_a_bad_description_is_refused_by_its_key(changes: dict[str, Any], refusal: str) -> None:
    given = {"file": "rows.csv", **ABOUT, **changes}
    about = {key: value for key, value in given.items() if value is not None}
    with pytest.raises(UserError, match=rf"^dataset\.mine\.{refusal}") as refused:
        own_dataset("mine", about)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("row", "metric", "reason"),
    [
        ({"question": None}, "f1", "field 'question' is null"),
        ({"question": "cq \ud800"}, "f1", "question. has half"),
        ({"question": ["x"]}, "f1", "question. must be a text or a number"),
        ({"answer": [""]}, "f1", "field 'answer': its text is empty"),
        ({"report": " "}, "f1", "field 'report': its text is empty"),
        *(
            ({"answer": bad}, "f1", "answer. must be a text or a number")
            for bad in ([["x"]], {"text": "x"}, math.nan)
        ),
        ({"answer": [None]}, "f1", "field 'answer' is null"),
        ({}, "retrieval", "answers must read 'Paragraph <number>', got 'stone'"),
    ],
)
def test_a_bad_row_is_named_by_file_number_and_field(
    tmp_path: Path, row: dict[str, Any], metric: str, reason: str
) -> None:
    rows = [ROWS[0] | {"answer": ["Paragraph 5"]}, ROWS[1] | {"answer": ["stone"]} | row]
    with pytest.raises(UserError, match=rf"rows\.jsonl:2: .*{reason}"):
        loaded(written(tmp_path, rows=rows), metric=metric)
    del rows[1]["question"]
    with pytest.raises(UserError, match=r"field 'question' is missing; the row has n, report, ans"):
        loaded(written(tmp_path, rows=rows), metric=metric)


def test_columns_that_json_lacks_stand_with_the_rows_texts(tmp_path: Path) -> None:
    rows = [row | {"day": datetime.date(2026, 11, 25), "picture": b"\x89"} for row in ROWS]
    file = written(tmp_path, ".parquet", rows)
    ids = [row.id for row in loaded(file, id="").examples]
    assert len({*ids}) == 2
    assert [row.id for row in loaded(file, id="").examples] == ids
    assert loaded(file, template="{report} {day}").examples[0].input == " 2026-11-25"
    with pytest.raises(UserError, match=r"field 'picture' must be a text or a number, got b"):
        loaded(file, template="{report} {picture}")


@pytest.mark.parametrize("line", ["aq copper.,Entry", "a,b,c,d,e,f"])
def test_a_csv_field_may_be_long_and_a_row_with_other_fields_is_named(
    tmp_path: Path, line: str
) -> None:
    report = "bq river. " + "aq copper. " * 20_000
    file = written(tmp_path, ".csv", [ROWS[0] | {"report": report}])
    assert loaded(file).examples[0].context == report
    file.write_text(file.read_text() + line + "\n")
    reason = r"rows\.csv:3: not as many fields as the first line"
    with pytest.raises(UserError, match=reason):
        loaded(file)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('5,"the harbour\nmaster\nsaid so"', r"rows\.csv:6: not as many fields"),
        ('5,"the harbour\nmaster\nsaid so', r"rows\.csv: .*in the row that begins in line 6"),
    ],
)
def test_a_csv_row_is_named_by_the_line_in_which_it_begins(
    tmp_path: Path, row: str, message: str
) -> None:
    """Its text has three lines, and so has that of the row before; an empty line is no row."""
    file = written(tmp_path, ".csv", [ROWS[0] | {"report": "aq copper.\nbq river.\ncq stone."}])
    assert file.read_text().count("\n") == 4
    file.write_text(file.read_text() + "\n" + row + "\n")
    with pytest.raises(UserError, match=message):
        loaded(file)


PACKED = gzip.compress("".join(json.dumps(ROWS[0] | {"n": n}) + "\n" for n in range(50)).encode())


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (".parquet", b"no table"),
        (".csv", b"n,report,report\na,b,c\n"),
        (".json", b"[\n{'a': 1}\n]"),
        (".json", b"[\xff]"),
        (".jsonl.gz", b"no gzip"),
        (".jsonl.gz", PACKED[:-20]),
        (".jsonl.gz", PACKED[:30] + b"\xff" * 9 + PACKED[39:]),
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
    assert [row.id for row in loaded(file).examples] == ["a", "b"]


@pytest.mark.parametrize("text", ["{}", "- mine", "1: {file: rows.csv}", "mine: 5"])
def test_a_file_without_descriptions_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml: expected NAME: with "):
        described(tmp_path / "mine.yaml")


def test_rows_that_are_not_there_are_named_with_what_to_do(hub_rows: Any, tmp_path: Path) -> None:
    at_hub, settings = own_dataset("mine", ABOUT | {"hub": "me/rows"}), DataSettings()
    reason = r"me/rows is not cached .*: describe a file \(file: FILE\), or run once with a network"
    assert re.fullmatch(reason, missing(at_hub, settings) or "")
    file = str(tmp_path / "rows.csv")
    in_file = own_dataset("mine", ABOUT | {"file": file})
    assert missing(in_file, settings) == f"{file}: no such file; give another in its description"
    reason = "expected no such key, as the description of mine names no files of a folder"
    with pytest.raises(UserError, match=reason):
        missing(in_file, DataSettings(dir=tmp_path))


def test_names_of_suites_are_refused_and_own_ones_stand_alone(tmp_path: Path) -> None:
    about = ABOUT | {"file": "rows.csv"}
    for name in ("hotpotqa", "embedded", "few_shot", "all"):
        reason = rf"dataset\.\w+: a dataset, task or suite .* is named '{name}'; give another"
        for descriptions in ({name: about}, {"mine": about | {"suite": name}}):
            with pytest.raises(UserError, match=reason):
                add_own(descriptions)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"mine": about, "other": about}))
    for names, reason in (
        ([str(file), "hotpotqa"], "hotpotqa shares no table with your own rows"),
        ([str(file)], r"datasets of several suites \(mine, other\) share no table"),
        (["hotpot"], "dataset=hotpot: the nearest names are hotpotqa"),
        (["x" * 8], "lazyllm-bench run --list shows all"),
    ):
        with pytest.raises(UserError, match=reason):
            choose(names, "llama2", 4096)


def test_datasets_of_the_hub_in_conf_become_rows_and_scores(hub_rows: Any) -> None:
    graph = {"prompt": "a -> b\nOperation: find", "answer_nodes": ["b", "c"], "prompt_chars": 22}
    hub_rows["openai/graphwalks", None, "train"] = [graph]
    fact = {"input": "It rained. Mary went to the garden. ", "target": "garden"}
    for split in ("qa1", "qa2"):
        hub_rows["RMT-team/babilong", "4k", split] = [fact | {"question": "Where is Mary? "}]
    (walks,) = choose(["graphwalks"], "tiny", 4096)
    (example,) = load("graphwalks").examples
    assert (example.context, example.answers) == (graph["prompt"], ("b", "c"))
    assert score_example(walks, "b to c.\nFinal Answer: [c, d]", example.answers) == 0.5
    tasks = choose(["babilong"], "tiny", 4096)
    assert [task.name for task in tasks] == ["babilong_qa1", "babilong_qa2"]
    for task in tasks:
        (example,) = load(task.name).examples
        assert (example.context, example.answers) == (fact["input"], ("garden",))
        assert example.input == "\n\nQuestion: Where is Mary? \nAnswer:"
        for answer, score in ((" the garden\nor the kitchen", 1), ("kitchen", 0)):
            assert score_example(task, answer, example.answers, example.all_classes) == score


def test_the_example_in_conf_is_a_whole_description() -> None:
    ((name, description),) = described(DESCRIPTIONS / "example.yaml").items()
    assert Path(own_dataset(name, description).file).is_absolute()


def test_a_speedup_is_solved_for_the_rows_own_length_or_refused() -> None:
    def solved(prompt_tokens: int) -> Any:
        dataset = own_dataset("mine", ABOUT | {"file": "a.csv", "prompt_tokens": prompt_tokens})
        shape = shape_of(ModelSpec("llama2", "dummy"))
        return Arm("lazy", "lazy", {}, speedup=2.0).method(dataset, shape, None, None, None)

    reason = "dataset=mine: speedup=2x of lazy .*: give the rows' mean as prompt_tokens in the"
    with pytest.raises(UserError, match=reason):
        solved(0)
    assert solved(3376) != solved(20_000)


@pytest.mark.parametrize(("kind", "quote"), [(".csv", ""), (".parquet", '"'), (".jsonl.gz", "'")])
def test_a_run_of_own_rows_has_their_suite(
    tmp_path: Path, capsys: Any, kind: str, quote: str
) -> None:
    about = {"mine": ABOUT | {"file": written(tmp_path, kind).name}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(about))
    rows = ["model=tiny", f"dataset={quote}{tmp_path / 'mine.yaml'}{quote}"]
    settings = ["method=lazy", "warmup=0", "threads=1", f"out={tmp_path / 'run'}"]
    assert main(["run", *rows, *settings]) == 0
    visits = read_visits(tmp_path / "run")
    assert [visit.key for visit in visits] == [("mine", "a"), ("mine", "b")]
    assert {*visits[0].answers} == {"baseline", "lazy"}
    capsys.readouterr()
    assert main(["rows", *rows]) == 0
    output = capsys.readouterr().out
    assert "gold: river\nNotes: aq copper. bq river.\nQuestion: Entry bq?" in output
