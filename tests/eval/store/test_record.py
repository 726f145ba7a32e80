"""A record as an object, a line and a row of columns, all by one schema."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.store.folder import read_records
from eval.store.record import MEASURED, Record, compact_counts, to_records, to_table
from eval.store.results import as_frame
from eval.store.runs import StoredRun, example_rows, stored_runs
from lazyllm.errors import UserError
from tests.conftest import ROOT
from tests.eval.store.made import measurement, record, with_turns, write_run


def varied() -> list[Record]:
    """Records that differ in everything that may be empty, missing or of another length."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(40):
        steps = int(rng.integers(0, 20))
        method = measurement(
            text="\u00e4\u4e2d\U0001f600\n\x00\u2028", decode_step_s=rng.random(steps).tolist(),
            score=float(rng.random()), token_ids=rng.integers(0, 50_000, steps + 1).tolist(),
            rouge_l=0.25 if number % 2 else None,
            computed=rng.integers(0, 9000, (steps + 1, 3)).tolist(), group_starts=[1, 4, 9], scoring_tokens=number,
            peak_memory_bytes=2**40 if number % 3 else None,
        )  # fmt: skip
        paired = measurement("" if number % 3 else "x") if number % 4 else None
        lists = {"answers": ["a"] * (number % 3), "groups": ["length=1"] * (number % 2)}
        records.append(replace(record(number), method=method, baseline=paired, **lists))
    return [*records, replace(with_turns(), id="turns")]


def lines(*records: Any) -> bytes:
    """Valid and invalid lines, from records, values or text."""
    texts = [line.to_json() if isinstance(line, Record) else line if isinstance(line, str) else json.dumps(line)
             for line in records]  # fmt: skip
    return "".join(f"{text}\n" for text in texts).encode()


def changed(example: dict[str, Any], side: str = "method", measured: dict[str, Any] | None = None) -> dict[str, Any]:
    """A record's values with some changed, and some of one of its measurements."""
    values = asdict(record(1))
    values[side] |= measured or {}
    return values | example


def test_records_are_equal_in_folder_memory_and_table(tmp_path: Path) -> None:
    records = varied()
    write_run(tmp_path, records)
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == len(records)  # all turns in one line
    stored, memory = StoredRun(tmp_path, {}), StoredRun(tmp_path, {}, records)
    assert to_records(to_table(records)) == stored.records == memory.records == records
    assert stored.keys == [one.key for one in records]
    names = ["id", "method.decode_step_s", "baseline.ttft_s"]
    assert stored.table(names).equals(memory.table(names))
    assert stored.table(names)["method.decode_step_s"].to_pylist()[3] == records[3].method.decode_step_s


def test_frame_has_every_value_of_every_turn_to_the_last_bit() -> None:
    turns = [turn for one in varied() for turn in one.by_turn]
    assert [(turn.id, turn.turn, turn.prompt_tokens) for turn in turns[-3:]] == [
        ("turns", 1, 100), ("turns", 2, 2), ("turns", 3, 3)
    ]  # fmt: skip
    frame = example_rows(varied())
    assert frame["turn"].tolist() == [turn.turn for turn in turns]
    for row, turn in zip(frame.to_dict("records"), turns, strict=True):
        for name, value in slow_row(turn).items():
            found: Any = row[name]
            assert found == value or (math.isnan(found) and math.isnan(value)), name


def slow_row(record: Record) -> dict[str, Any]:
    """The row that `example_rows` makes of a record, value by value."""
    row: dict[str, Any] = {"dataset": record.dataset, "id": record.id, "prompt_tokens": record.prompt_tokens}
    for prefix, side in (("", record.method), ("baseline_", record.baseline)):
        values: dict[str, Any] = dict.fromkeys(MEASURED)
        if side is not None:
            values = {name: getattr(side, name, None) for name in MEASURED} | {
                "score": 100 * side.score, "rouge_l": None if side.rouge_l is None else 100 * side.rouge_l,
                "step_s": float(np.mean(side.decode_step_s)) if side.decode_step_s else None,
                "generated_tokens": len(side.token_ids), "pct_answered": 100 if side.text else 0,
            }  # fmt: skip
        row |= {f"{prefix}{name}": math.nan if value is None else value for name, value in values.items()}
    return row


@pytest.mark.parametrize("name", ["later", "turn", "kl"])
def test_line_without_a_newer_field_takes_its_default(tmp_path: Path, name: str) -> None:
    values = asdict(record(0))
    for part in (values, values["method"], values["baseline"]):
        part.pop(name, None)
    write_run(tmp_path, [])
    (tmp_path / "records.jsonl").write_bytes(lines(values, record(1)))
    assert read_records(tmp_path) == StoredRun(tmp_path, {}).records == [record(0), record(1)]
    assert as_frame(stored_runs([tmp_path]))["turn"].tolist() == [1, 1]


@pytest.mark.slow
def test_committed_records_are_readable() -> None:
    """The board's campaigns: as many records as their descriptions say, as objects and as frames."""
    campaigns = sorted((ROOT / "results").rglob("campaign.json"))
    assert len(campaigns) >= 2
    for file in campaigns:
        expected = {run["folder"]: run["records"] for run in json.loads(file.read_text())["runs"]}
        runs = stored_runs([file.parent])
        assert {run.folder.name: len(run.examples) for run in runs} == expected
        assert sum(len(run.records) for run in runs[:2]) == sum(len(run.examples) for run in runs[:2])


@pytest.mark.parametrize("cut", [1, 2, 400])
def test_last_line_without_its_end_counts_if_it_is_whole(tmp_path: Path, cut: int) -> None:
    write_run(tmp_path, [record(0), record(1)])
    file = tmp_path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    assert (
        to_records(StoredRun(tmp_path, {}).table())
        == read_records(tmp_path)
        == [record(0), record(1)][: 2 if cut == 1 else 1]
    )


def test_equal_lines_count_once_and_different_ones_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, [record(0), record(1)])
    with (tmp_path / "records.jsonl").open("ab") as opened:
        opened.write(lines(record(0), ""))
    assert to_records(StoredRun(tmp_path, {}).table()) == read_records(tmp_path) == [record(0), record(1)]
    with (tmp_path / "records.jsonl").open("ab") as opened:
        opened.write(lines(record(1, score=1.0)))
    for read in (lambda folder: StoredRun(folder, {}).table(), read_records):
        with pytest.raises(UserError, match=r"records\.jsonl:5: another record of hotpotqa, row row-1"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("text", "JSON"),
        ([], "list"),
        (changed({"odd": 1}), "odd"),
        (changed({"id": 3}), "id is int"),
        (changed({"dataset": "nosuch"}), "nosuch"),
        (changed({"prompt_tokens": 512.0}), "prompt_tokens is float"),
        (changed({"prompt_end": None}), "prompt_end"),
        (changed({"answers": "because"}), "answers is str"),
        (changed({"method": None}), "NoneType"),
        (f"{record(1).to_json()}{record(2).to_json()}", "Extra data"),
        (changed({"later": [{"prompt_sha256": "a"}]}), "baseline"),
        (changed({"later": [asdict(with_turns())["later"][0] | {"prompt_tokens": 1.0}]}), "prompt_tokens is float"),
        *(
            (changed({}, side, {name: value}), f"{name} is")
            for side in ("method", "baseline")
            for name, value in (
                ("score", True), ("score", math.nan), ("ttft_s", math.inf), ("kv_bytes", 123.0),
                ("peak_memory_bytes", 123.0), ("text", None), ("token_ids", {}),
            )
        ),
    ],
)  # fmt: skip
def test_reader_refuses_invalid_line_with_its_number(tmp_path: Path, line: Any, reason: str) -> None:
    (tmp_path / "records.jsonl").write_bytes(lines(record(0), line))
    with pytest.raises(UserError, match=rf"records\.jsonl:2: not a line of records .*({reason})"):
        StoredRun(tmp_path, {}).table()


def test_reader_refuses_number_that_no_column_holds(tmp_path: Path) -> None:
    write_run(tmp_path, [record(0, token_ids=[2**40])])
    with pytest.raises(UserError, match="a record holds an impossible value"):
        StoredRun(tmp_path, {}).table()


def test_compact_counts_lose_nothing() -> None:
    rng = random.Random(0)
    for _ in range(50):
        steps, groups = rng.randint(1, 5), rng.randint(1, 4)
        widths = [rng.randint(1, 4) for _ in range(groups)]
        counts = np.array([[rng.randint(0, 2) for _ in range(groups)] for _ in range(steps)])
        full = np.repeat(counts, widths, axis=1)
        starts, compact = compact_counts(full)
        ends = [*starts[1:], full.shape[1] + 1]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        assert np.array_equal(np.repeat(np.array(compact), lengths, axis=1), full)
