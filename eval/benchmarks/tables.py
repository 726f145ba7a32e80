"""Tables of rows in files: JSON lines, a JSON array, CSV and Parquet, also gzipped."""

import codecs
import csv
import gzip
import hashlib
import io
import sys
import zlib
from pathlib import Path
from typing import Any

from eval.benchmarks.rows import Rows, parsed_json, read_lines
from lazyllm.errors import UserError, reason_of

csv.field_size_limit(sys.maxsize)  # a context may be longer than Python's limit
KINDS = (".jsonl", ".json", ".csv", ".parquet")
_LACK = UserError("not as many fields as the first line")


def kind_of(file: str) -> str:
    """The ending of a file's name, without .gz."""
    return Path(file.removesuffix(".gz")).suffix


def read_table(file: str) -> Rows:
    """Read the rows of a file. Raises UserError if it is no table.

    Values are as in the file: "0042" of a CSV stays a text, and a date in JSON too.
    """
    try:
        data = Path(file).read_bytes()
        plain = gzip.decompress(data) if file.endswith(".gz") else data
        plain = plain.removeprefix(codecs.BOM_UTF8)
        match kind_of(file):
            case ".csv":
                rows = _read_csv(file, plain.decode())
            case ".parquet":
                from pyarrow import BufferReader, parquet  # slow to import, for these files only

                rows = _numbered(file, parquet.read_table(BufferReader(plain)).to_pylist())
            case ".json" if plain.lstrip().startswith(b"["):
                rows = _numbered(file, parsed_json(plain))
            case _:
                rows = list(read_lines(plain, file))
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        raise UserError(f"{file}: not a table of rows in UTF-8 ({reason_of(error)})") from error
    return rows, file, hashlib.sha256(data).hexdigest()


def _numbered(file: str, rows: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{file}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _read_csv(file: str, text: str) -> list[tuple[str, Any]]:
    """As of `read_lines`, of a CSV file with a line of names. Raises csv.Error."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names = next(reader, [])
    if len({*names}) < len(names):
        raise csv.Error("a name occurs twice in the first line")
    rows: list[tuple[str, Any]] = []
    first = reader.line_num + 1  # of the next row, whose quoted fields may hold line ends
    try:
        for values in reader:
            is_whole = len(values) == len(names)
            row = dict(zip(names, values, strict=True)) if is_whole else _LACK
            if values:
                rows.append((f"{file}:{first}", row))
            first = reader.line_num + 1
    except csv.Error as error:
        raise csv.Error(f"{error} in the row that begins in line {first}") from error
    return rows
