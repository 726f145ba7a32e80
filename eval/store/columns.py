"""Records in columns: what tables and figures read of a campaign's hundreds of thousands of them.

A column has the name that a value has in a record's line, with a dot before what lies deeper: `prompt_tokens`,
`method.ttft_s`, `baseline.computed`. Records come from a run folder's lines, from a collected campaign
(`eval.store.collect`)
or from memory; whoever reads columns of them need not know from which.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from eval.store.folder import NO_LINE, files_of, read_run
from eval.store.record import Record, check_example, check_measurement
from lazyllm.errors import UserError

_MEASUREMENT = pa.struct(
    [
        pa.field("text", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("score", pa.float64(), nullable=False),
        pa.field("rouge_l", pa.float64()),
        pa.field("ttft_s", pa.float64(), nullable=False),
        pa.field("scoring_s", pa.float64(), nullable=False),
        pa.field("total_s", pa.float64(), nullable=False),
        pa.field("decode_step_s", pa.list_(pa.float64()), nullable=False),
        pa.field("pct_prompt_tokens_computed", pa.float64(), nullable=False),
        pa.field("group_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("computed", pa.list_(pa.list_(pa.int32())), nullable=False),
        pa.field("kv_bytes", pa.int64(), nullable=False),
        pa.field("aux_bytes", pa.int64(), nullable=False),
        pa.field("peak_memory_bytes", pa.int64()),
    ]
)
# Of `eval.store.record.Record`, field by field
SCHEMA = pa.schema(
    [
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("prompt_sha256", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("prompt_tokens_before_truncation", pa.int64(), nullable=False),
        pa.field("method", _MEASUREMENT, nullable=False),
        pa.field("baseline", _MEASUREMENT),
        pa.field("prompt_end", pa.string(), nullable=False),
        pa.field("answers", pa.list_(pa.string()), nullable=False),
    ]
)
BLOCK = 1000  # lines that are held as Python objects at a time
_FIELDS = {one.name for one in SCHEMA}
_MEASURED_FIELDS = {one.name for one in _MEASUREMENT}
_NO_RECORD = (ValueError, TypeError, KeyError, AttributeError)  # of a line, and of values that fit no column


class StoredRecords(Sequence[Record]):
    """One run's records on a disk, read when they are asked for: by columns, or as records."""

    def table(self, names: Sequence[str] | None = None) -> pa.Table:
        """Every record, in order. names: columns, as in this module's docstring; None for `SCHEMA`'s, nested.

        Raises UserError.
        """
        raise NotImplementedError

    def sha256(self) -> dict[str, str]:
        """{name: SHA-256} of the files that the run wrote its records to. Raises UserError."""
        raise NotImplementedError

    @cached_property
    def _size(self) -> int:
        return len(self.table(["id"]))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Record]:
        return to_records(self.table())

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        numbers = range(len(self))[index]
        return self.take(numbers) if isinstance(numbers, range) else self.take([numbers])[0]

    def take(self, numbers: Iterable[int]) -> list[Record]:
        """The records of these numbers, counted from 0."""
        return list(to_records(self.table().take(list(numbers))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # compared by content


class LineRecords(StoredRecords):
    """The records of a run folder's JSON lines.

    A folder whose lines are not as this version writes them (a damaged line, an example twice) is left to
    `eval.store.folder.read_run`, which says what is wrong with it, or what counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def table(self, names: Sequence[str] | None = None) -> pa.Table:
        schema = SCHEMA if names is None else _part_of_schema({*names, "dataset", "id"})
        files = self.by_file(schema)
        table = pa.concat_tables([schema.empty_table(), *files.values()]) if files is not None else None
        if table is None or repeated(table).any():
            table = self._as_the_store_reads_it(schema)
        return table if names is None else _flat(table).select(list(names))

    def _as_the_store_reads_it(self, schema: pa.Schema) -> pa.Table:
        records = read_run(self.folder)[1]
        try:
            table = to_table(records, schema)
            _refuse_gaps(table)
        except _NO_RECORD as error:
            raise UserError(
                f"{self.folder}: a record holds what no record does ({error}). Nothing was changed: remove its line to "
                "have its example redone"
            ) from error
        return table

    def by_file(self, schema: pa.Schema = SCHEMA) -> dict[str, pa.Table] | None:
        """{name: the records of that file}, what stands twice included; None where a line is no record."""
        try:
            return {file.name: _table_of_lines(file.read_bytes(), schema) for file in files_of(self.folder, "records")}
        except (*_NO_RECORD, OSError):
            return None

    def sha256(self) -> dict[str, str]:
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(self.folder, "records")}


class CollectedRecords(StoredRecords):
    """One run's part of a collected campaign. groups: its row groups in the Parquet file. size: its records."""

    def __init__(self, file: Path, groups: range, size: int, sha256: dict[str, str]) -> None:
        self._file, self._groups, self._sha256 = file, groups, sha256
        self.__dict__["_size"] = size

    def table(self, names: Sequence[str] | None = None) -> pa.Table:
        try:
            with pq.ParquetFile(self._file) as opened:
                table = opened.read_row_groups(list(self._groups), columns=None if names is None else list(names))
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self._file}: cannot be read ({error}); collect the runs again") from error
        return table if names is None else _flat(table).select(list(names))

    def sha256(self) -> dict[str, str]:
        return dict(self._sha256)


def table_of(records: Sequence[Record], names: Sequence[str]) -> pa.Table:
    """The named columns of records, stored or in memory. Raises UserError."""
    if isinstance(records, StoredRecords):
        return records.table(names)
    return _flat(to_table(records, _part_of_schema(set(names)))).select(list(names))


def to_table(records: Iterable[Record], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Records in the columns of a part of `SCHEMA`."""
    return pa.Table.from_pylist([asdict(record) for record in records], schema=schema)


def to_records(table: pa.Table) -> Iterator[Record]:
    """The records of a table with all columns of `SCHEMA`."""
    for values in table.to_pylist():
        yield Record.of(values)


def repeated(table: pa.Table) -> np.ndarray:
    """[rows] bool: whether the same example stands in an earlier row."""
    return table.select(["dataset", "id"]).to_pandas().duplicated().to_numpy()


def _table_of_lines(data: bytes, schema: pa.Schema) -> pa.Table:
    """The lines; the half one that a kill leaves at the end is none. Raises one of `_NO_RECORD`."""
    *lines, tail = data.split(b"\n")
    last: list[Record] = []
    parts = [schema.empty_table()]
    with _no_garbage():
        for start in range(0, len(lines), BLOCK):
            parts.append(pa.Table.from_pylist([_values(line) for line in lines[start : start + BLOCK]], schema=schema))
    with suppress(*NO_LINE):  # without its end, as the store reads it: whole, or not there
        last.append(Record.from_json(tail.decode()))
    parts.append(to_table(last, schema))
    table = pa.concat_tables(parts)
    _refuse_gaps(table)
    return table


def _values(line: bytes) -> dict[str, Any]:
    """A line's values, none missing; what is not exactly a record of this version goes the way of `Record`."""
    values = orjson.loads(line)  # refuses NaN, which Python's own parser takes
    baseline = values["baseline"]
    is_whole = values.keys() == _FIELDS and values["method"].keys() == _MEASURED_FIELDS
    if is_whole and (baseline is None or baseline.keys() == _MEASURED_FIELDS):
        check_example(values)  # Arrow makes of true, 1.0 and "1" what a column wants
        check_measurement(values["method"])
        if baseline is not None:
            check_measurement(baseline)
        return values
    return asdict(Record.from_json(line.decode()))


def _refuse_gaps(table: pa.Table) -> None:
    """Raise ValueError where a value is null that never is: Arrow does not look."""
    for field in table.schema:
        column = table[field.name]
        gaps = column.null_count
        if gaps and not field.nullable:
            raise ValueError(f"{field.name} is null")
        if pa.types.is_struct(field.type):
            for inner, values in zip(field.type, column.flatten(), strict=True):
                if not inner.nullable and values.null_count > gaps:
                    raise ValueError(f"{field.name}.{inner.name} is null")


def _part_of_schema(names: set[str]) -> pa.Schema:
    """`SCHEMA` without the columns that are not named."""
    fields = []
    for field in SCHEMA:
        if field.name in names:
            fields.append(field)
        elif pa.types.is_struct(field.type):
            inner = [one for one in field.type if f"{field.name}.{one.name}" in names]
            if inner:
                fields.append(field.with_type(pa.struct(inner)))
    return pa.schema(fields)


def _flat(table: pa.Table) -> pa.Table:
    """The table with a column for each value of a measurement, in one chunk each."""
    return table.flatten().combine_chunks()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Many values are made, and none refers to itself: looking for such takes longer than making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
