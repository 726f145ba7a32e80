"""Bad rows of all suites, named by place and field or skipped, and settings that allow no rows."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import SUITES
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.suite import DataSettings
from lazyllm.errors import UserError
from lazyllm.spec import ModelSpec
from tests.eval.benchmarks import test_longbench, test_longbench_v2
from tests.eval.benchmarks.test_longbench import ROW

V2 = test_longbench_v2.row(1)


# {suite: (how rows are written, a good row, the file in the folder)}
WRITTEN: dict[str, tuple[Any, Any, str]] = {
    "longbench": (test_longbench.write_rows, ROW, "qasper.jsonl"),
    "longbench_v2": (test_longbench_v2.write, test_longbench_v2.row(0), "data.json"),
}


BAD_VALUES = {
    "context": ["", " \n", None],
    "input": [1, "\ud800"],
    "answers": ["cat", [None], [], ["", " "]],
    "length": ["3", True, -1],
    "language": [3],
    "all_classes": ["cat", [1]],
    "dataset": ["lcc"],
    "_id": [7, "", "\ud800", "one"],  # the last: of the first row
}
BAD_ROWS = [
    *(("qasper", text, "not valid JSON") for text in ("{", '{"input": "\x01"}', "[" * 100_000)),
    ("qasper", "[]", "expected a JSON object"),
    *(("qasper", ROW | {"_id": "two", key: bad}, key) for key, values in BAD_VALUES.items() for bad in values),
    *(
        ("qasper", {name: value for name, value in ROW.items() if name != field}, f"field '{field}' is missing")
        for field in ROW
        if field != "_id"
    ),
    ("longbench_v2", V2 | {"answer": "E"}, "field 'answer'"),
    ("longbench_v2", V2 | {"length": "tiny"}, "field 'length'"),
    ("longbench_v2", V2 | {"difficulty": None}, "field 'difficulty'"),
    ("longbench_v2", V2 | {"context": " "}, "field 'context'"),
    ("longbench_v2", V2 | {"choice_C": 3}, "field 'choice_C'"),
    ("longbench_v2", {name: value for name, value in V2.items() if name != "question"}, "field 'question'"),
    ("longbench_v2", V2 | {"_id": "id-0"}, "the same _id as in"),
    ("longbench_v2", "text", "expected a JSON object, got str"),
]


@pytest.mark.parametrize(("dataset", "bad", "named"), BAD_ROWS)
def test_bad_row_is_named_or_skipped(dataset: str, bad: Any, named: str, tmp_path: Path) -> None:
    suite = SUITES[DATASETS[dataset].suite]
    write, good, file = WRITTEN[suite.name]
    write(tmp_path, good, bad)
    place = f"{tmp_path / file}{':' if file.endswith('.jsonl') else ', row '}2"
    settings = DataSettings(tmp_path)
    with pytest.raises(UserError, match=rf"{re.escape(place)}: .*{named}.*data\.on_error=skip"):
        suite.load(DATASETS[dataset], settings)
    loaded = suite.load(DATASETS[dataset], replace(settings, on_error="skip"))
    assert (len(loaded.examples), [where for where, _ in loaded.skipped]) == (1, [place])


def test_rows_are_numbered_to_the_end_and_the_first_ten_bad_ones_are_named_at_once(tmp_path: Path) -> None:
    rows = [ROW, *(ROW | {"_id": f"{number}", "input": number} for number in range(12)), ROW | {"_id": "last"}]
    file = test_longbench.write_rows(tmp_path, *rows)
    with pytest.raises(UserError) as error:
        load_rows(DATASETS["qasper"], tmp_path)
    lines = str(error.value).split("\n")
    assert [line.split(": ")[0] for line in lines[:10]] == [f"{file}:{number}" for number in range(2, 12)]
    assert lines[10].startswith("2 more unusable rows. Fix these rows, or skip them by data.on_error=skip")
    assert len(lines) == 11
    assert [row.id for row in load_rows(DATASETS["qasper"], tmp_path, "skip").examples] == ["one", "last"]


@pytest.mark.parametrize("rows", [[], [ROW | {"answers": []}]])
def test_no_usable_row_is_an_error_also_when_skipping(tmp_path: Path, rows: list[Any]) -> None:
    test_longbench.write_rows(tmp_path, *rows)
    with pytest.raises(UserError, match="no usable row"):
        load_rows(DATASETS["qasper"], tmp_path, "skip")


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        ("needle", {"lengths": []}, r"lengths=\[\]: expected a list of different numbers from 1"),
        ("needle", {"lengths": [512, 512]}, "lengths=.* different numbers"),
        ("needle", {"depths": [0, 101]}, r"depths=\[0, 101\]: expected a list of different numbers from 0 to 100"),
        ("needle", {"repeats": 0}, "repeats=0: expected"),
        ("needle", {"haystack": "nowhere.txt"}, r"haystack=nowhere\.txt: expected a text file or a folder"),
    ],
)
def test_settings_without_rows_are_refused(suite: str, options: dict[str, Any], message: str) -> None:
    made: Any = SUITES[suite].options
    settings = DataSettings(options=made(**options), model=ModelSpec("tiny"))
    with pytest.raises(UserError, match=rf"^{suite}\.{message}"):
        SUITES[suite].check(SUITES[suite].datasets[0], settings)
