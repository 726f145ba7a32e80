"""A user's own rows: `dataset=mine.yaml`, or `dataset=mine` for conf/datasets/mine.yaml.

docs/suites.md tells the keys of a description; conf/datasets/example.yaml is one. A path is
relative to the YAML file, and in conf/datasets to the working folder. Rows of the hub come through
the package `datasets`, which guesses types: it would take "0042" of a CSV file for 42. RULER,
BABILong and GraphWalks are such descriptions.
"""

import hashlib
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import ConfigDict, PlainValidator, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from eval.benchmarks.downloads import find_split
from eval.benchmarks.metrics import METRICS, check_gold, needs_classes
from eval.benchmarks.rows import (
    Rows,
    canonical,
    check_fields,
    is_text,
    is_texts,
    loaded,
    prompt_parts,
    sha256_of,
    shortened,
)
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite
from eval.benchmarks.tables import KINDS, kind_of, read_table
from eval.settings import Count, Positive, Text, first_fault
from lazyllm.errors import UserError, nearest, reason_of, require

TASK = "own"


def _read_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [*value] if isinstance(value, tuple) else value
    if not is_texts(texts):
        raise ValueError("a text or a list of texts")
    return tuple(texts)


_Texts = Annotated[tuple[str, ...], PlainValidator(_read_texts)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class OwnDataset(Dataset):
    """A dataset that a YAML file describes; docs/suites.md tells its keys.

    folder: the dataset as files in `data.dir` hold it; None if there are no such.
    """

    task: str = TASK
    suite: str = ""
    decode_halves: bool = False
    template: str
    context: str
    question: str = ""
    answer_prefix: str = ""
    answers: _Texts
    max_new_tokens: Positive
    file: str = ""
    hub: str = ""
    split: str = "test"
    configuration: Text | None = None
    where: dict[str, Any] = field(default_factory=dict, hash=False)
    folder: Dataset | None = None
    classes: _Texts = ()
    id: str = ""
    prompt_tokens: Count = 0
    version: int = 1

    @model_validator(mode="after")
    def _agree(self) -> Self:
        places = _places(self.template)
        is_once = places.count(self.context) == 1 and f"{{{self.context}}}" in self.template
        has_classes = bool(self.classes) or not needs_classes(self)
        is_table = not self.file or kind_of(self.file) in KINDS
        for holds, key, expected in (
            (self.metric in METRICS, "metric", f"one of {', '.join(METRICS)}"),
            (has_classes, "classes", f"the class names, which metric={self.metric} needs"),
            (self.answers, "answers", "a field of the rows, or several"),
            (places, "template", "a text with {fields}; a brace itself is written twice"),
            (is_once, "context", f"a field of the template, once: {', '.join(places)}"),
            (_is_pattern(self.question), "question", "a regular expression"),
            (bool(self.file) != bool(self.hub), "file", "a file, or hub: OWNER/NAME instead"),
            (self.hub or not self.where, "where", "hub: OWNER/NAME with it"),
            (self.hub or not self.folder, "folder", "hub: OWNER/NAME with it"),
            (is_table, "file", f"{', '.join(KINDS)}, also with .gz"),
        ):
            require(bool(holds), key, getattr(self, key), expected)
        return self


_NOT_GIVEN = ("name", "task", "protected")
_KEYS = [item.name for item in fields(OwnDataset) if item.name not in _NOT_GIVEN]
_OF_THE_HUB = ("hub", "split", "configuration", "where", "folder")
_NO_PROMPT = ("name", "suite", "file", "folder", "prompt_tokens")  # change no prompt and no score


def _places(template: str) -> list[str]:
    """The fields of a template, in order; none if it is no template."""
    try:
        parts = [*string.Formatter().parse(template)]
    except ValueError:
        return []
    return [place for _, place, _, _ in parts if place is not None]


def _is_pattern(text: str) -> bool:
    try:
        return re.compile(text) is not None
    except re.error:
        return False


def described(file: Path) -> dict[str, dict[str, Any]]:
    """Read {name: description} of a YAML file, paths of rows made absolute.

    Raises UserError if it has no descriptions.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"dataset={file}: cannot be read ({reason_of(error)})") from error
    items = content.items() if isinstance(content, dict) else ()
    if not items or not all(is_text(name) and isinstance(about, dict) for name, about in items):
        raise UserError(f"dataset={file}: expected NAME: with {', '.join(_KEYS)} below it")
    for about in content.values():
        if about.get("file"):
            about["file"] = str((file.parent / str(about["file"])).absolute())
    return content


def own_dataset(name: str, description: Mapping[str, Any], key: str = "") -> OwnDataset:
    """Make the dataset of a description. Raises UserError for a key or value that is not allowed.

    key: of the description in the config, for messages.
    """
    key = key or f"dataset.{name}"
    for item, value in description.items():
        if item not in _KEYS:
            known = nearest(item, _KEYS, "docs/suites.md")
            raise UserError(f"{key}.{item}={value}: no such key: {known}")
        is_whole = not isinstance(value, str) or is_text(value)
        require(is_whole, f"{key}.{item}", ascii(value), "a text without half a surrogate pair")
    given = {**description, "name": name, "suite": description.get("suite") or name}
    if isinstance(folder := description.get("folder"), dict):
        alike = {item: value for item, value in description.items() if item not in _OF_THE_HUB}
        given["folder"] = own_dataset(name, alike | folder, f"{key}.folder")
    try:
        return OwnDataset(**given)
    except ValidationError as error:
        fault = first_fault(error)
    if not fault.place:  # a rule that names its key
        raise UserError(f"{key}.{fault.expected}")
    place = ".".join(map(str, (key, *fault.place)))
    raise UserError(f"{place}={fault.given}: expected {fault.expected}")


def own_suite(name: str, datasets: Sequence[OwnDataset]) -> Suite:
    """Return the suite of these datasets: their scores are pooled with no other's."""
    return Suite(
        name=name,
        datasets=tuple(datasets),
        load=load,
        check=missing,
        cached=lambda settings: True,  # `missing` tells otherwise
    )


def _choose_source(dataset: Dataset, settings: DataSettings) -> OwnDataset:
    """The dataset whose rows are to be read: that of `data.dir` if given. Raises UserError."""
    assert isinstance(dataset, OwnDataset)
    if settings.dir is None:
        return dataset
    if not isinstance(dataset.folder, OwnDataset):
        lacks = f"the description of {dataset.name} names no files of a folder"
        raise UserError(f"data.dir={settings.dir}: expected no such key, as {lacks}")
    return replace(dataset.folder, file=str(settings.dir.expanduser() / dataset.folder.file))


def missing(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why the rows cannot be read; None if they can."""
    source = _choose_source(dataset, settings)
    if source.hub:
        _, reason = find_split(source.hub, source.configuration, source.split)
        files = source.folder.file if isinstance(source.folder, OwnDataset) else None
        instead = f"give data.dir=FOLDER with {files}" if files else "describe a file (file: FILE)"
        return reason and f"{reason}: {instead}, or run once with a network"
    if Path(source.file).is_file():
        return None
    if settings.dir is not None:
        return f"its file is not in {Path(source.file).parent}"
    return f"{source.file}: no such file; give another in its description"


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """Read the rows. Raises UserError for an unusable row (unless skipped) or file."""
    source = _choose_source(dataset, settings)
    rows = read_table(source.file) if source.file else _read_split(source, settings)
    meaning = {key: value for key, value in asdict(source).items() if key not in _NO_PROMPT}
    parse = partial(_make_example, source)
    return loaded(dataset, rows, parse, settings.on_error, source.max_new_tokens, [meaning])


def _read_split(source: OwnDataset, settings: DataSettings) -> Rows:
    """The rows of the hub that `where` chooses. Raises UserError."""
    if (reason := missing(source, settings)) is not None:
        raise UserError(f"{source.name}: {reason}")
    table, _ = find_split(source.hub, source.configuration, source.split)
    numbers = range(len(table))
    for column, wanted in source.where.items():
        if column not in table.column_names:
            known = ", ".join(table.column_names)
            raise UserError(f"where: no column {column!r}: the rows have {known}")
        values = list(table[column])
        numbers = [number for number in numbers if values[number] == wanted]
    place = ", ".join(filter(None, (source.hub, source.configuration)))
    rows = [(f"{place}, row {number + 1}", dict(table[number])) for number in numbers]
    content = b"\n".join(canonical(row) for _, row in rows)
    return rows, place, hashlib.sha256(content).hexdigest()


def _make_example(source: OwnDataset, row: Any, number: int) -> Example:
    check_fields(row, {})
    filled = {place: _read(row, place) for place in _places(source.template)}
    before, after = prompt_parts(source.template, filled, source.context)
    context = str(filled[source.context])
    if not context.strip():
        raise UserError(f"field {source.context!r}: its text is empty")
    if source.question:
        starts = [match.start() for match in re.finditer(source.question, context)]
        if not starts:
            lacks = f"no question is in it: expected {source.question!r}"
            raise UserError(f"field {source.context!r}: {lacks}")
        context, after = context[: starts[-1]], context[starts[-1] :] + after
    return Example(
        dataset=source.name,
        id=str(_read(row, source.id)) if source.id else sha256_of([number, row])[:48],
        instruction=before,
        context=context,
        input=after,
        answers=_read_answers(source, row),
        all_classes=source.classes,
        length=len(context.split()),
        answer_prefix=str(_read(row, source.answer_prefix)) if source.answer_prefix else "",
        official=row,
    )


def _read_answers(source: OwnDataset, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The gold answers of a row, of fields with a value or a list. Raises UserError."""
    found = list[str]()
    for name in source.answers:
        values = row.get(name)
        is_list = isinstance(values, list | tuple)
        holders = [{name: value} for value in values] if is_list else [row]
        found += [str(_read(holder, name)) for holder in holders]
    where, answers = f"field {', '.join(source.answers)!r}", tuple(found)
    if not any(map(str.strip, answers)):
        raise UserError(f"{where}: its text is empty, so there is nothing to score against")
    if needs_classes(source) and not {*answers} <= {*source.classes}:
        known = ", ".join(source.classes)
        raise UserError(f"{where}: {shortened(found)} is not in classes: {known}")
    check_gold(source, answers, source.classes)
    return answers


def _read(row: Mapping[str, Any], name: str) -> Any:
    """The value of a field: a text, a number or a date. Raises UserError."""
    value = row.get(name)
    if value is None:
        lack = "is null" if name in row else f"is missing; the row has {', '.join(map(str, row))}"
        raise UserError(f"field {name!r} {lack}")
    if isinstance(value, str) and not is_text(value):
        raise UserError(f"field {name!r} has half a surrogate pair, which no tokenizer takes")
    is_plain = isinstance(value, str | Number) or hasattr(value, "isoformat")
    if not is_plain or value != value:  # not a number
        raise UserError(f"field {name!r} must be a text or a number, got {shortened(value)}")
    return value
