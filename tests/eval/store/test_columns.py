from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.store.columns import SCHEMA, LineRecords, table_of, to_records, to_table
from eval.store.folder import read_run
from eval.store.frame import MEASURED, example_rows
from eval.store.record import Measurement, Record
from lazyllm.errors import UserError
from tests.eval.store.test_folder import measurement, record
from tests.eval.store.test_frame import write_run


def varied() -> list[Record]:
    """Records that differ in everything that may be empty, missing or of another length."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(40):
        steps = int(rng.integers(0, 200))
        method = measurement(
            text="\u00e4\u4e2d\U0001f600\n\x00", decode_step_s=rng.random(steps).tolist(), score=float(rng.random()),
            token_ids=rng.integers(0, 50_000, steps + 1).tolist(), rouge_l=0.25 if number % 2 else None,
            computed=rng.integers(0, 9000, (steps + 1, 3)).tolist(), group_starts=[1, 4, 9],
            peak_memory_bytes=2**40 if number % 3 else None,
        )  # fmt: skip
        paired = measurement() if number % 4 else None
        records.append(replace(record(number), method=method, baseline=paired, answers=["a"] * (number % 3)))
    return records


def test_the_columns_are_the_records_fields() -> None:
    assert SCHEMA.names == [one.name for one in fields(Record)]
    for side in ("method", "baseline"):
        assert [one.name for one in SCHEMA.field(side).type] == [one.name for one in fields(Measurement)]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    records = varied()
    assert list(to_records(to_table(records))) == records
    write_run(tmp_path, records)
    stored = LineRecords(tmp_path)
    assert list(stored) == records
    assert stored == records
    assert stored != records[:-1]
    assert stored.take([7, 3]) == [records[7], records[3]]
    assert (stored[5], stored[-1], stored[2:4]) == (records[5], records[-1], records[2:4])
    with pytest.raises(IndexError):
        stored[40]
    names = ["id", "method.decode_step_s", "baseline.ttft_s"]
    assert stored.table(names).to_pylist() == table_of(records, names).to_pylist()
    assert stored.table(names)["method.decode_step_s"].to_pylist()[3] == records[3].method.decode_step_s


def slow_row(record: Record) -> dict[str, Any]:
    """What `example_rows` says of a record, one value after the other."""
    row: dict[str, Any] = {"dataset": record.dataset, "id": record.id, "prompt_tokens": record.prompt_tokens}
    for prefix, one in (("", record.method), ("baseline_", record.baseline)):
        values: dict[str, Any] = dict.fromkeys(MEASURED)
        if one is not None:
            values = {
                "score": 100 * one.score, "rouge_l": None if one.rouge_l is None else 100 * one.rouge_l,
                "ttft_s": one.ttft_s, "scoring_s": one.scoring_s, "total_s": one.total_s,
                "step_s": float(np.mean(one.decode_step_s)) if one.decode_step_s else None,
                "tokens": len(one.token_ids), "pct_computed": one.pct_prompt_tokens_computed,
                "kv_bytes": one.kv_bytes, "aux_bytes": one.aux_bytes, "peak_bytes": one.peak_memory_bytes,
            }  # fmt: skip
        row |= {f"{prefix}{name}": math.nan if value is None else value for name, value in values.items()}
    return row


def test_every_value_is_the_records_to_the_last_bit() -> None:
    records = varied()
    frame = example_rows(records)
    for row, one in zip(frame.to_dict("records"), records, strict=True):
        for name, value in slow_row(one).items():
            found: Any = row[name]
            assert found == value or (math.isnan(found) and math.isnan(value)), name


@pytest.mark.parametrize(("cut", "left"), [(1, 2), (2, 1), (40, 1), (400, 1)])
def test_a_last_line_without_its_end_counts_if_it_is_whole(tmp_path: Path, cut: int, left: int) -> None:
    write_run(tmp_path, [record(0), record(1)])
    file = tmp_path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    assert list(LineRecords(tmp_path)) == [record(0), record(1)][:left]
    assert read_run(tmp_path)[1] == [record(0), record(1)][:left]


@pytest.mark.parametrize("change", [{"id": None}, {"prompt_tokens": "many"}, {"method": None}, {"odd": 1}, "text"])
def test_a_damaged_line_is_no_record(tmp_path: Path, change: Any) -> None:
    write_run(tmp_path, [record(0)])
    values = asdict(record(1)) | change if isinstance(change, dict) else change
    with (tmp_path / "records.jsonl").open("a") as opened:
        opened.write(json.dumps(values) + "\n")
    with pytest.raises(UserError, match=r"not a record|holds what no record does"):
        LineRecords(tmp_path).table()


def test_an_example_that_stands_twice_counts_as_the_store_says(tmp_path: Path) -> None:
    write_run(tmp_path, [record(0), record(1)])
    with (tmp_path / "records.jsonl").open("a") as opened:
        opened.write(record(0).to_json() + "\n")
    stored = LineRecords(tmp_path)
    assert list(stored) == read_run(tmp_path)[1]
    assert len(stored) == 2
    with (tmp_path / "records.jsonl").open("a") as opened:
        opened.write(record(1, score=1.0).to_json() + "\n")
    with pytest.raises(UserError, match="another record of hotpotqa, row row-1"):
        len(LineRecords(tmp_path))


def test_lines_of_before_are_read(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    values = asdict(record(0))
    del values["prompt_end"], values["answers"]
    (tmp_path / "records.jsonl").write_text(json.dumps(values) + "\n")
    (one,) = LineRecords(tmp_path)
    assert (one.prompt_end, one.answers) == ("", [])


def test_numbers_that_are_none_are_refused_as_the_store_refuses_them(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    values = asdict(record(0)) | {"method": asdict(measurement(ttft_s=math.nan))}
    (tmp_path / "records.jsonl").write_text(json.dumps(values) + "\n")
    with pytest.raises(UserError, match=r"records\.jsonl:1: not a record \(ValueError: ttft_s is nan\)"):
        list(LineRecords(tmp_path))


@pytest.mark.parametrize(
    ("example", "measured"),
    [
        ({}, {"score": True}),
        ({}, {"kv_bytes": 123.0}),
        ({}, {"peak_memory_bytes": 123.0}),
        ({}, {"text": None}),
        ({"prompt_tokens": 512.0}, {}),
        ({"dataset": "nosuch"}, {}),
    ],
)
@pytest.mark.parametrize("side", ["method", "baseline"])
def test_what_the_store_refuses_is_refused_by_its_line(
    tmp_path: Path, example: dict[str, Any], measured: dict[str, Any], side: str
) -> None:
    write_run(tmp_path, [record(0)])
    values = asdict(record(1)) | example
    values[side] |= measured
    with (tmp_path / "records.jsonl").open("a") as opened:
        opened.write(json.dumps(values) + "\n")
    with pytest.raises(UserError, match=r"records\.jsonl:2: not a record"):
        read_run(tmp_path)
    with pytest.raises(UserError, match=r"records\.jsonl:2: not a record"):
        LineRecords(tmp_path).table(["id"])
    with pytest.raises(UserError, match=r"records\.jsonl:2: not a record"):
        example_rows(LineRecords(tmp_path))
