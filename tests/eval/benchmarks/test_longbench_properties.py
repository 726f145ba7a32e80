"""The loader with arbitrary rows and files: a row is read as written, or refused with its place and the reason."""

from __future__ import annotations

import json
import random
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.longbench import TemplateWarning
from lazyllm.errors import UserError
from tests.eval.benchmarks.test_longbench import CONFIG, ROW
from tests.eval.store.test_folder_properties import JSON

FEW = settings(max_examples=30, deadline=None)  # each writes a folder
QASPER = DATASETS["qasper"]
ROWS = st.fixed_dictionaries(
    {
        "input": st.text(),
        "context": st.text(min_size=1).filter(str.strip),
        "answers": st.lists(st.text(), min_size=1, max_size=3),
        "length": st.integers(0, 10**9),
        "dataset": st.just("qasper"),
        "language": st.text(),
        "all_classes": st.none() | st.lists(st.text(), max_size=3),
        "_id": st.text(min_size=1),
    }
)


@contextmanager
def folder_with(content: bytes) -> Iterator[Path]:
    """A data folder whose qasper.jsonl holds these bytes; warnings about templates other than LongBench's are off."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", TemplateWarning)
        folder = Path(name)
        (folder / "config").mkdir()
        for file, text in CONFIG.items():
            (folder / "config" / file).write_text(text)
        (folder / "qasper.jsonl").write_bytes(content)
        yield folder


def fields(one: Any) -> tuple[Any, ...]:
    return one.id, one.input, one.context, one.answers, one.all_classes, one.length, one.language


def expected(row: dict[str, Any]) -> tuple[Any, ...]:
    classes = tuple(row["all_classes"] or ())
    return row["_id"], row["input"], row["context"], tuple(row["answers"]), classes, row["length"], row["language"]


def is_usable(row: Any) -> bool:
    """Whether a row fits LongBench's description, implemented independently."""

    def text(value: Any) -> bool:
        try:
            return isinstance(value, str) and bool(value.encode() or True)
        except UnicodeEncodeError:  # half of a surrogate pair
            return False

    def texts(value: Any) -> bool:
        return isinstance(value, list) and all(map(text, value))

    return (
        isinstance(row, dict)
        and text(row.get("input"))
        and text(row.get("context"))
        and row["context"].strip() != ""
        and texts(row.get("answers"))
        and row["answers"] != []
        and type(row.get("length")) is int
        and row["length"] >= 0
        and row.get("dataset") == "qasper"
        and text(row.get("language"))
        and ("all_classes" in row and (row["all_classes"] is None or texts(row["all_classes"])))
        and (row.get("_id") is None or (text(row["_id"]) and row["_id"] != ""))
    )


@FEW
@given(
    st.lists(ROWS, min_size=1, max_size=4, unique_by=lambda row: row["_id"]),
    st.booleans(),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\r", "\t:  ")]),
    st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \t\n"]),
    st.randoms(use_true_random=False),
)
def test_rows_are_read_as_they_are_written(
    rows: list[dict[str, Any]], ascii_only: bool, separators: tuple[str, str], end: bytes, rng: random.Random
) -> None:
    lines = []
    for row in rows:
        shuffled = rng.sample(sorted(row.items()), len(row))
        lines.append(json.dumps(dict(shuffled), ensure_ascii=ascii_only, separators=separators).encode())
    with folder_with(end.join(lines)) as folder:
        assert [fields(example) for example in load_rows(QASPER, folder).examples] == [expected(row) for row in rows]


@FEW
@given(st.binary(max_size=300) | st.lists(JSON.map(json.dumps)).map(lambda lines: "\n".join(lines).encode()))
@example(b"\xff\xfe{\x00}\x00\n")
@example(b'{"a":' * 2000)
def test_arbitrary_files_are_refused_line_by_line(content: bytes) -> None:
    first = next((number for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()), None)
    with folder_with(content) as folder:
        with pytest.raises(UserError, match="no usable row"):
            load_rows(QASPER, folder, "skip")
        with pytest.raises(UserError, match="no usable row" if first is None else rf"qasper\.jsonl:{first}: "):
            load_rows(QASPER, folder)


@FEW
@given(ROWS, st.data())
def test_row_with_any_other_value_is_read_if_it_fits_and_else_named(row: dict[str, Any], data: st.DataObject) -> None:
    bad = dict(row)
    for _ in range(data.draw(st.integers(1, 2))):
        field = data.draw(st.sampled_from(sorted(ROW)) | st.text(max_size=8))
        if data.draw(st.booleans()):
            bad.pop(field, None)
        else:
            bad[field] = data.draw(JSON | st.text(st.characters()) | st.lists(st.text(st.characters()), max_size=2))
    good = {**row, "_id": "another " + str(row["_id"])}
    content = "\n".join(map(json.dumps, (good, bad)))  # escapes what UTF-8 cannot hold
    bad = json.loads(json.dumps(bad))  # if two halves of a surrogate pair have become one character
    with folder_with(content.encode()) as folder:
        loaded = load_rows(QASPER, folder, "skip")
        assert fields(loaded.examples[0]) == expected(good)
        duplicate = isinstance(bad.get("_id"), str) and bad["_id"] == good["_id"]
        if is_usable(bad) and not duplicate:
            assert loaded.skipped == ()
            anonymous = bad.get("_id") is None
            assert fields(loaded.examples[1])[anonymous:] == expected({"_id": None, **bad})[anonymous:]
            assert loaded.examples[1].id
        else:
            assert [row.where for row in loaded.skipped] == [f"{folder / 'qasper.jsonl'}:2"]
            with pytest.raises(UserError, match=r"qasper\.jsonl:2: .*on_error=skip"):
                load_rows(QASPER, folder)
