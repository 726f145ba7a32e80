"""A user's own rows, a suite of an own name: `dataset=mine.yaml`, or `dataset=mine` for conf/dataset/mine.yaml.

conf/dataset/example.yaml is an example, whose fields are those of `OwnDataset`. A path is relative to the YAML file,
and in conf/dataset to the working folder. Rows of the hub come through the package `datasets`, which guesses types: it
would take "0042" of a CSV file for 42. RULER, BABILong and GraphWalks are such descriptions.
"""

import logging
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any

import yaml

from eval.benchmarks.downloads import HubDataset
from eval.benchmarks.metrics import METRICS, check_gold, needs_classes
from eval.benchmarks.rows import check_fields, is_answers, is_text, is_texts, loaded, prompt_parts, sha256_of, shortened
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite
from eval.benchmarks.tables import KINDS, kind_of, read_table
from lazyllm.errors import UserError, nearest, reason_of, require

log = logging.getLogger(__name__)

TASK = "own"


@dataclass(frozen=True, kw_only=True)
class OwnDataset(Dataset):
    """A dataset that a YAML file describes.

    suite: datasets that share one are a suite, whose score is their mean; "" for the dataset's own name.
    file: of the rows. hub, split, configuration: of a dataset of the hub instead. where: {column: value} of the hub's
        rows to take; all without it.
    folder: the dataset as files in `data.dir` hold it, whose rows may have other columns; None if there are no such.
    template: the prompt, with `{field}` of the rows. context: the field of the template that methods may shorten.
    question: a pattern; the context field's text from its last match on is the question, which no method shortens; ""
        if the context is all of the field.
    answer_prefix: the field of the text after the chat template, which the answer continues; "" for none.
    answers: the field, or fields, of the gold answers. classes: the class names, for the metric `classification`.
    id: the field of an identity; "" for a hash of the row.
    prompt_tokens: the prompt length for which a target speedup is solved, such as the rows' mean; 0 if unknown.
    version: to be raised when the file's meaning changes.
    Others: as of `Dataset`.
    """

    task: str = TASK
    suite: str = ""
    decode_halves: bool = False
    template: str
    context: str
    question: str = ""
    answer_prefix: str = ""
    answers: str | tuple[str, ...]
    max_new_tokens: int
    file: str = ""
    hub: str = ""
    split: str = "test"
    configuration: str | int | None = None
    where: Mapping[str, Any] = field(default_factory=dict, hash=False)
    folder: "OwnDataset | None" = None
    classes: tuple[str, ...] = ()
    id: str = ""
    prompt_tokens: int = 0
    version: int = 1


_TYPES: dict[Any, tuple[Callable[[Any], bool], str]] = {  # {type of a field: (check, description)}
    str: (is_text, "a text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: type(value) is int, "a whole number"),
    str | int | None: (lambda value: value is None or type(value) is int or is_text(value), "a text, number or null"),
    tuple[str, ...]: (is_texts, "a list of texts"),
    str | tuple[str, ...]: (lambda value: is_text(value) or is_texts(value), "a text or a list of texts"),
    Mapping[str, Any]: (lambda value: isinstance(value, dict), "a mapping"),
    "OwnDataset | None": (lambda value: isinstance(value, dict), "a mapping of the keys that differ in data.dir"),
}
_NOT_GIVEN = ("name", "task", "prompt_of", "protected")
_OF_THE_HUB = ("hub", "split", "configuration", "where", "folder")
_NO_PROMPT = ("name", "suite", "file", "folder", "prompt_tokens")  # these change no prompt, and no answer's score
_GIVEN = {item.name: item for item in fields(OwnDataset) if item.name not in _NOT_GIVEN}


def described(file: Path) -> dict[str, dict[str, Any]]:
    """{name: description} of a YAML file, paths of rows made absolute. Raises UserError if it has no descriptions."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"dataset={file}: cannot be read ({reason_of(error)})") from error
    fits = isinstance(content, dict) and [is_text(name) and isinstance(content[name], dict) for name in content]
    if not fits or not all(fits):
        raise UserError(f"dataset={file}: expected NAME: with {', '.join(_GIVEN)} below it")
    for value in content.values():
        if value.get("file"):
            value["file"] = str((file.parent / str(value["file"])).absolute())
    return content


def own_dataset(name: str, description: Mapping[str, Any], key: str = "") -> OwnDataset:
    """Make the dataset of a description. Raises UserError for a key or value that is not allowed.

    key: of the description in the config, for messages.
    """
    key = key or f"dataset.{name}"
    for item, value in description.items():
        if item not in _GIVEN:
            raise UserError(f"{key}.{item}={value}: no such key: {nearest(item, _GIVEN, 'docs/suites.md')}")
        accepts, expected = _TYPES[_GIVEN[item].type]
        require(accepts(value), f"{key}.{item}", value, expected)
    for item in _GIVEN.values():
        has_default = (item.default, item.default_factory) != (MISSING, MISSING)
        require(has_default or item.name in description, f"{key}.{item.name}", None, "a value")
    given: Any = {item: tuple(value) if isinstance(value, list) else value for item, value in description.items()}
    if "folder" in given:
        alike = {item: value for item, value in description.items() if item not in _OF_THE_HUB}
        given["folder"] = own_dataset(name, alike | description["folder"], f"{key}.folder")
    own = OwnDataset(**given | {"name": name, "suite": given.get("suite") or name})
    _check(own, key)
    return own


def _check(own: OwnDataset, key: str) -> None:
    """Refuse values that do not go together. Raises UserError."""
    if own.metric not in METRICS:
        raise UserError(f"{key}.metric={own.metric}: {nearest(own.metric, METRICS, 'eval/benchmarks/metrics.py')}")
    is_scorable = bool(own.classes) or not needs_classes(own)
    require(is_scorable, f"{key}.classes", [], f"the class names, which metric={own.metric} needs")
    require(bool(own.answers), f"{key}.answers", own.answers, "a field of the rows, or several")
    try:
        places = _places(own.template)
    except ValueError as error:
        raise UserError(f"{key}.template={own.template!r}: {error}; a brace itself is written twice") from error
    is_one = places.count(own.context) == 1 and f"{{{own.context}}}" in own.template
    expected = f"a field of the template, once: {', '.join(places) or 'it has none'}"
    require(is_one, f"{key}.context", own.context, expected)
    try:
        re.compile(own.question)
    except re.error as error:
        raise UserError(f"{key}.question={own.question}: {error}; expected a regular expression") from error
    require(own.max_new_tokens > 0, f"{key}.max_new_tokens", own.max_new_tokens, "1 or more")
    require(own.prompt_tokens >= 0, f"{key}.prompt_tokens", own.prompt_tokens, "0 or more")
    require(bool(own.file) != bool(own.hub), f"{key}.file", own.file, "a file, or hub: OWNER/NAME instead")
    for item in ("where", "folder"):
        require(bool(own.hub) or not getattr(own, item), f"{key}.{item}", getattr(own, item), "hub: OWNER/NAME with it")
    readable = not own.file or kind_of(own.file) in KINDS
    require(readable, f"{key}.file", own.file, f"{', '.join(KINDS)}, also with .gz")


def _places(template: str) -> list[str]:
    return [place for _, place, _, _ in string.Formatter().parse(template) if place is not None]


def _hub(own: OwnDataset) -> HubDataset:
    files = f"its rows, named by dataset.{own.name}.file=FILE" if own.folder is None else own.folder.file
    return HubDataset(own.hub, files)


def _choose_source(dataset: Dataset, settings: DataSettings) -> OwnDataset:
    """Return the dataset whose rows are to be read: that of `data.dir` if given. Raises UserError if it has none."""
    assert isinstance(dataset, OwnDataset)
    if settings.dir is None:
        return dataset
    expected = f"no such key, as the description of {dataset.name} names no files of a folder"
    require(dataset.folder is not None, "data.dir", settings.dir, expected)
    assert dataset.folder is not None
    return replace(dataset.folder, file=str(settings.dir.expanduser() / dataset.folder.file))


def missing(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why the rows cannot be read; None if they can."""
    own = _choose_source(dataset, settings)
    if own.hub:
        return _hub(own).absent()
    if Path(own.file).is_file():
        return None
    if settings.dir is not None:
        return f"its file is not in {Path(own.file).parent}"
    return f"{own.file}: no such file; give another in its description"


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The rows. Warns of repeated ones. Raises UserError for an unusable row (unless skipped) or file."""
    own = _choose_source(dataset, settings)
    if own.file:
        values, data_sha256 = read_table(own.file)
        rows = values, own.file, data_sha256
    else:
        configuration = None if own.configuration is None else str(own.configuration)
        rows = _hub(own).rows(settings, "", configuration, own.split, own.where)
    meaning = {key: value for key, value in asdict(own).items() if key not in _NO_PROMPT}
    parse = partial(_example, own)
    data = loaded(dataset, rows, parse, settings.on_error, own.max_new_tokens, [meaning])
    different = {(one.instruction, one.context, one.input, one.answers) for one in data.examples}
    if repeated := len(data.examples) - len(different):
        log.warning("%s: %d of %d rows repeat others, but count as independent", rows[1], repeated, len(data.examples))
    return data


def _example(own: OwnDataset, row: Any, number: int) -> Example:
    check_fields(row, {})

    def values_of(name: str, many: bool = False) -> list[Any]:
        if row.get(name) is None:
            lack = "is null" if name in row else f"is missing; the row has {', '.join(map(str, row))}"
            raise UserError(f"field {name!r} {lack}")
        values = row[name] if many and isinstance(row[name], list | tuple) else [row[name]]
        for value in values:
            if isinstance(value, str) and not is_text(value):
                raise UserError(f"field {name!r} has half a surrogate pair, which no tokenizer takes")
            is_plain = isinstance(value, str | Number) or hasattr(value, "isoformat")
            if not is_plain or value != value:  # not a number
                raise UserError(f"field {name!r} must be a text or a number, got {shortened(value)}")
        return values

    filled = {place: values_of(place)[0] for place in _places(own.template)}
    before, after = prompt_parts(own.template, filled, own.context)
    context = str(filled[own.context])
    if own.question:
        *_, start = (None, *(match.start() for match in re.finditer(own.question, context)))
        if start is None:
            raise UserError(f"field {own.context!r}: no question is in it: expected {own.question!r}")
        context, after = context[:start], context[start:] + after
    fields = [own.answers] if isinstance(own.answers, str) else own.answers
    answers = [str(value) for name in fields for value in values_of(name, many=True)]
    if not is_answers(answers):
        raise UserError(f"field {own.answers!r}: its text is empty, so there is nothing to score against")
    if needs_classes(own) and not {*answers} <= {*own.classes}:
        raise UserError(f"field {own.answers!r}: {shortened(answers)} is not in classes: {', '.join(own.classes)}")
    check_gold(own, answers, own.classes)
    return Example(
        dataset=own.name,
        id=str(values_of(own.id)[0]) if own.id else sha256_of([number, row])[:48],
        instruction=before,
        context=context,
        input=after,
        answers=tuple(answers),
        all_classes=own.classes,
        length=len(context.split()),
        answer_prefix=str(values_of(own.answer_prefix)[0]) if own.answer_prefix else "",
        official=row,
    )


def own_suite(name: str, datasets: Sequence[OwnDataset]) -> Suite:
    """The suite of these datasets: their scores are pooled with no other's."""
    return Suite(name=name, datasets=tuple(datasets), load=load, check=missing)
