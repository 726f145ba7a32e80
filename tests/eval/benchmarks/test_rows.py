"""Bad rows of LongBench, named by place and field or skipped."""

import re
from pathlib import Path
from typing import Any

import pytest

from lazyllm.errors import UserError
from tests.eval.benchmarks import test_longbench
from tests.eval.benchmarks.loading import load
from tests.eval.benchmarks.test_longbench import ROW

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
    *((text, "not valid JSON") for text in ("{", '{"input": "\x01"}', "[" * 100_000)),
    ("[]", "expected a JSON object"),
    *(
        (ROW | {"_id": "two", key: bad}, key)
        for key, values in BAD_VALUES.items()
        for bad in values
    ),
    *(
        ({key: ROW[key] for key in ROW if key != field}, f"field '{field}' is missing")
        for field in ROW
        if field != "_id"
    ),
]


@pytest.mark.parametrize(("bad", "named"), BAD_ROWS)
def test_bad_row_is_named_or_skipped(bad: Any, named: str, tmp_path: Path) -> None:
    place = f"{test_longbench.write(tmp_path, ROW, bad)}:2"
    reason = rf"{re.escape(place)}: .*{named}.*data\.on_error=skip"
    with pytest.raises(UserError, match=reason):
        load("qasper", tmp_path)
    loaded = load("qasper", tmp_path, on_error="skip")
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
