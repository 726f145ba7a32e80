"""JSON lines in LongBench's format, checked by line and field, as `datasets` does not."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from eval.benchmarks.metrics import check_gold
from eval.benchmarks.suite import Dataset, Example, LoadedDataset, OnError
from lazyllm.errors import UserError, reason_of

Check = tuple[Callable[[Any], Any], str]  # of a field: a check of its value, and what is expected
# (place, JSON value, or UserError with the reason why it is none) of each row; their source, and
# their hash
Rows = tuple[Iterable[tuple[str, Any]], str, str]
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_NAMED = 10  # bad rows in one message


def is_text(value: Any) -> bool:
    """Whether a value is a string without half a surrogate pair.

    JSON allows these, but tokenizers and files do not.
    """
    return isinstance(value, str) and (value.isascii() or not _HALF_PAIR.search(value))


def is_texts(value: Any) -> bool:
    """Whether a value is a list of such strings."""
    return isinstance(value, list) and all(map(is_text, value))


TEXT: Check = is_text, "a string"
FILLED: Check = lambda value: is_text(value) and value.strip(), "a string that is not empty"
CLASSES: Check = lambda value: value is None or is_texts(value), "a list of strings or null"

_FIELDS: dict[str, Check] = {
    "input": TEXT,
    "context": FILLED,
    "answers": (
        lambda value: is_texts(value) and any(map(str.strip, value)),
        "a list of strings, not all of them empty",
    ),
    "length": (lambda value: type(value) is int and value >= 0, "a whole number"),
    "dataset": TEXT,
    "language": TEXT,
    "all_classes": CLASSES,
}


def read_lines(data: bytes, source: str) -> Iterator[tuple[str, Any]]:
    """Yield (source:line, value) of every line that is not blank.

    value: of the JSON, or a UserError with the reason why it is none. Lines end at \\n only and are
        not normalised: rows hold \\r and other characters that end lines in text mode.
    """
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parsed_json(line)
        except UserError as error:
            row = error
        yield f"{source}:{number}", row


def parsed_json(data: bytes) -> Any:
    """The value of JSON in UTF-8. Raises UserError."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON in UTF-8 ({error})") from error


def check_fields(row: Any, fields: Mapping[str, Check]) -> None:
    """Raise UserError unless a row is a JSON object with all fields, each of its type."""
    if isinstance(row, UserError):
        raise row
    if not isinstance(row, dict):
        raise UserError(f"expected a JSON object, got {type(row).__name__}")
    for field, (accepts, expected) in fields.items():
        if field not in row:
            raise UserError(f"field {field!r} is missing; expected {', '.join(fields)}")
        if not accepts(row[field]):
            raise UserError(f"field {field!r} must be {expected}, got {shortened(row[field])}")


def load_lines(
    dataset: Dataset,
    data: bytes,
    source: str,
    template: str,
    max_new_tokens: int,
    on_error: OnError,
) -> LoadedDataset:
    """Make a dataset of lines in LongBench's format. Raises UserError as `loaded`."""
    rows = read_lines(data, source), source, hashlib.sha256(data).hexdigest()
    parse = partial(parse_example, dataset, template)
    return loaded(dataset, rows, parse, on_error, max_new_tokens, [template])


def loaded(
    dataset: Dataset,
    rows: Rows,
    parse: Callable[[Any, int], Example],
    on_error: OnError,
    max_new_tokens: int,
    prompts: Sequence[Any],
) -> LoadedDataset:
    """Make a dataset of its rows.

    parse: makes an example of a row and its number, from 0; raises UserError.
    prompts: the official ones, and all else that decides what a row means.
    Raises UserError for an unusable row (unless skipped), which names the first ten, for a repeated
        `_id`, and for no usable row.
    """
    values, source, data_sha256 = rows
    examples: list[Example] = []
    skipped: list[tuple[str, str]] = []
    places: dict[str, str] = {}
    for number, (where, row) in enumerate(values):
        try:
            example = parse(row, number)
            if (place := places.setdefault(example.id, where)) != where:
                same = f"the same _id as in {place} ({example.id!r})"
                raise UserError(f"{same}; expected each row once")
            examples.append(example)
        except (UserError, RecursionError) as error:  # nested too deeply to be shown
            skipped.append((where, str(error)))
    if skipped and on_error == "raise":
        raise UserError(_name_rows(skipped))
    if not examples:
        first = f": {len(skipped)} skipped, the first {': '.join(skipped[0])}" if skipped else ""
        raise UserError(f"{source}: no usable row{first}; give other rows")
    return LoadedDataset(
        dataset,
        tuple(examples),
        max_new_tokens,
        data_sha256,
        config_sha256=sha256_of([*prompts, max_new_tokens]),
        source=source,
        skipped=tuple(skipped),
    )


def _name_rows(skipped: Sequence[tuple[str, str]]) -> str:
    """The message about unusable rows: the first ten, with their places and reasons."""
    lines = "\n".join(f"{where}: {reason}" for where, reason in skipped[:_NAMED])
    more = len(skipped) - _NAMED
    rest = f"\n{more} more unusable rows" if more > 0 else ""
    them = "this row, or skip such rows" if len(skipped) == 1 else "these rows, or skip them"
    return f"{lines}{rest}. Fix {them} by data.on_error=skip"


def made_here(
    dataset: Dataset,
    examples: Iterable[Example],
    max_new_tokens: int,
    made_of: Any,
    source: str,
    total: int,
) -> LoadedDataset:
    """Make a dataset of the first rows that a suite has made.

    made_of: all that determines them, to be hashed, as JSON.
    """
    return LoadedDataset(
        dataset,
        tuple(examples),
        max_new_tokens,
        data_sha256=sha256_of(made_of),
        # the official prompt of rows that hold their whole prompt
        config_sha256=sha256_of(["{instruction}{context}{input}", max_new_tokens]),
        source=source,
        total=total,
    )


def prompt_parts(
    template: str,
    values: Mapping[str, Any],
    context: str = "context",
) -> tuple[str, str]:
    """Fill in the texts before and after the context's place in a template. Raises UserError."""
    before, _, after = template.partition("{" + context + "}")
    try:
        return before.format_map(values), after.format_map(values)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        instead = "literal braces are written {{ and }}"
        raise UserError(f"the template cannot be filled ({reason_of(error)}); {instead}") from error


def parse_example(dataset: Dataset, template: str, row: Any, number: int = 0) -> Example:
    """Make an example of a row in LongBench's format.

    template: with fields in braces, {context} once. Raises UserError for a bad row.
    """
    check_fields(row, _FIELDS)
    if row["dataset"] not in (dataset.name, dataset.name.removesuffix("_e")):  # LongBench-E
        expected = f"{dataset.name!r}, the file's name"
        raise UserError(f"field 'dataset' must be {expected}, got {shortened(row['dataset'])}")
    check_gold(dataset, row["answers"], row["all_classes"])
    identity = row.get("_id")
    if identity is None:
        identity = sha256_of(row)[:48]
    elif not is_text(identity) or not identity:
        found = shortened(identity)
        raise UserError(f"field '_id' must be a string that is not empty, got {found}")
    before, after = prompt_parts(template, row)
    return Example(
        dataset=dataset.name,
        id=identity,
        instruction=before,
        context=row["context"],
        input=after,
        answers=tuple(row["answers"]),
        all_classes=tuple(row["all_classes"] or ()),
        length=row["length"],
        official=row,
    )


def shortened(value: Any) -> str:
    """A value for a message, at most 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({type(value).__name__})"


def canonical(value: Any) -> bytes:
    """JSON that is the same for equal values, in ASCII; with `named` for values that JSON lacks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=named).encode()


def named(value: Any) -> str:
    """Name a value of a table that JSON lacks: the text of a date, the type of other values."""
    return str(value) if hasattr(value, "isoformat") else type(value).__name__


def sha256_of(value: Any) -> str:
    """The sha256 of a value as canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()
