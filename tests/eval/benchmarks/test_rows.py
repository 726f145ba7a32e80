"""Bad rows of LongBench and LongBench v2, named by place and field or skipped."""

import re
from pathlib import Path
from typing import Any

import pytest

from lazyllm.errors import UserError
from tests.eval.benchmarks import test_longbench, test_longbench_v2
from tests.eval.benchmarks.loading import load
from tests.eval.benchmarks.test_longbench import ROW

V2 = test_longbench_v2.row(1)
# {dataset: (how rows are written, a good row, the place of the second row)}
WRITTEN: dict[str, tuple[Any, Any, str]] = {
    "qasper": (test_longbench.write, ROW, "qasper.jsonl:2"),
    "longbench_v2": (test_longbench_v2.write, test_longbench_v2.row(0), "data.json, row 2"),
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
BAD_V2 = {
    "answer": "E",
    "length": "tiny",
    "difficulty": None,
    "context": " ",
    "choice_C": 3,
}
BAD_ROWS = [
    *(("qasper", text, "not valid JSON") for text in ("{", '{"input": "\x01"}', "[" * 100_000)),
    ("qasper", "[]", "expected a JSON object"),
    *(
        ("qasper", ROW | {"_id": "two", key: bad}, key)
        for key, values in BAD_VALUES.items()
        for bad in values
    ),
    *(
        ("qasper", {key: ROW[key] for key in ROW if key != field}, f"field '{field}' is missing")
        for field in ROW
        if field != "_id"
    ),
    *(("longbench_v2", V2 | {key: bad}, f"field '{key}'") for key, bad in BAD_V2.items()),
    ("longbench_v2", {key: V2[key] for key in V2 if key != "question"}, "'question' is missing"),
    ("longbench_v2", V2 | {"_id": "id-0"}, "the same _id as in"),
    ("longbench_v2", "text", "expected a JSON object, got str"),
]


@pytest.mark.parametrize(("dataset", "bad", "named"), BAD_ROWS)
def test_bad_row_is_named_or_skipped(dataset: str, bad: Any, named: str, tmp_path: Path) -> None:
    write, good, second = WRITTEN[dataset]
    write(tmp_path, good, bad)
    place = f"{tmp_path}/{second}"
    reason = rf"{re.escape(place)}: .*{named}.*data\.on_error=skip"
    with pytest.raises(UserError, match=reason):
        load(dataset, tmp_path)
    loaded = load(dataset, tmp_path, on_error="skip")
    assert len(loaded.examples) == 1
    assert [where for where, _ in loaded.skipped] == [place]


def test_the_first_ten_bad_rows_are_named_at_once(tmp_path: Path) -> None:
    bad = [ROW | {"_id": f"{number}", "input": number} for number in range(12)]
    file = test_longbench.write(tmp_path, ROW, *bad, ROW | {"_id": "last"})
    with pytest.raises(UserError) as error:
        load("qasper", tmp_path)
    *named, last = str(error.value).split("\n")
    assert [line.split(": ")[0] for line in named] == [f"{file}:{line}" for line in range(2, 12)]
    assert last == "2 more unusable rows. Fix these rows, or skip them by data.on_error=skip"
    loaded = load("qasper", tmp_path, on_error="skip")
    assert [row.id for row in loaded.examples] == ["one", "last"]


@pytest.mark.parametrize("rows", [[], [ROW | {"answers": []}]])
def test_no_usable_row_is_an_error_also_when_skipping(tmp_path: Path, rows: list[Any]) -> None:
    test_longbench.write(tmp_path, *rows)
    with pytest.raises(UserError, match="no usable row"):
        load("qasper", tmp_path, on_error="skip")
