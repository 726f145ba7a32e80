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
        raise UserError(f"{file}: not a table of rows ({reason_of(error)})") from error
    return rows, file, hashlib.sha256(data).hexdigest()


def _numbered(file: str, rows: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{file}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _read_csv(file: str, text: str) -> list[tuple[str, Any]]:
    """As of `read_lines`, of a CSV file with a line of names. Raises csv.Error."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    names = reader.fieldnames or ()
    if len({*names}) < len(names):
        raise csv.Error("a name occurs twice in the first line")
    rows: list[tuple[str, Any]] = []
    for row in reader:
        is_whole = None not in row and None not in row.values()
        lack = UserError("not as many fields as the first line")
        rows.append((f"{file}:{reader.line_num}", row if is_whole else lack))
    return rows
