"""A user's own rows, a suite of an own name: `dataset=mine.yaml`, or `dataset=mine` for conf/dataset/mine.yaml.

conf/dataset/example.yaml is an example, whose fields are those of `OwnDataset`. A path is relative to the YAML file,
and in conf/dataset to the working folder. Rows of the hub come through the package `datasets`, which guesses types: it
would take "0042" of a CSV file for 42.
"""

import logging
import string
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
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

    file: of the rows. hub, split, configuration: of a dataset of the hub instead. template: the prompt, with `{field}`
    of the rows. context: the field of the template that methods may shorten. answers: the field, or fields, of the gold
    answers. classes: the class names, for the metric `classification`. evidence: the field with the text, or texts, of
    the context that hold the answer. id: the field of an identity; "" for a hash of the row. prompt_tokens: the prompt
    length for which a target speedup is solved, such as the rows' mean; 0 if unknown. version: to be raised when the
    file's meaning changes. Others: as of `Dataset`.
    """

    task: str = TASK
    decode_halves: bool = False
    template: str
    context: str
    answers: str | tuple[str, ...]
    max_new_tokens: int
    file: str = ""
    hub: str = ""
    split: str = "test"
    configuration: str | None = None
    classes: tuple[str, ...] = ()
    evidence: str = ""
    id: str = ""
    prompt_tokens: int = 0
    version: int = 1


_TYPES: dict[Any, tuple[Callable[[Any], bool], str]] = {  # {type of a field: (check, description)}
    str: (is_text, "a text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: type(value) is int, "a whole number"),
    str | None: (lambda value: value is None or is_text(value), "a text or null"),
    tuple[str, ...]: (is_texts, "a list of texts"),
    str | tuple[str, ...]: (lambda value: is_text(value) or is_texts(value), "a text or a list of texts"),
}
_NOT_GIVEN = ("name", "task", "suite", "prompt_of", "protected")
_NO_PROMPT = ("name", "suite", "file", "prompt_tokens")  # these change no prompt, and no answer's score
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


def own_dataset(name: str, description: Mapping[str, Any]) -> OwnDataset:
    """The dataset of a description. Raises UserError for a key or value that is not allowed."""
    where = f"dataset.{name}"
    for key, value in description.items():
        if key not in _GIVEN:
            raise UserError(f"{where}.{key}={value}: no such key: {nearest(key, _GIVEN, 'docs/suites.md')}")
        accepts, expected = _TYPES[_GIVEN[key].type]
        require(accepts(value), f"{where}.{key}", value, expected)
    for key, item in _GIVEN.items():
        require(item.default is not MISSING or key in description, f"{where}.{key}", None, "a value")
    given: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in description.items()}
    own = OwnDataset(name=name, suite=name, **given)
    if own.metric not in METRICS:
        raise UserError(f"{where}.metric={own.metric}: {nearest(own.metric, METRICS, 'eval/benchmarks/metrics.py')}")
    is_scorable = bool(own.classes) or not needs_classes(own)
    require(is_scorable, f"{where}.classes", [], f"the class names, which metric={own.metric} needs")
    require(bool(own.answers), f"{where}.answers", own.answers, "a field of the rows, or several")
    try:
        places = _places(own.template)
    except ValueError as error:
        raise UserError(f"{where}.template={own.template!r}: {error}; a brace itself is written twice") from error
    is_one = places.count(own.context) == 1 and f"{{{own.context}}}" in own.template
    expected = f"a field of the template, once: {', '.join(places) or 'it has none'}"
    require(is_one, f"{where}.context", own.context, expected)
    require(own.max_new_tokens > 0, f"{where}.max_new_tokens", own.max_new_tokens, "1 or more")
    require(own.prompt_tokens >= 0, f"{where}.prompt_tokens", own.prompt_tokens, "0 or more")
    require(bool(own.file) != bool(own.hub), f"{where}.file", own.file, "a file, or hub: OWNER/NAME instead")
    readable = not own.file or kind_of(own.file) in KINDS
    require(readable, f"{where}.file", own.file, f"{', '.join(KINDS)}, also with .gz")
    return own


def _places(template: str) -> list[str]:
    return [place for _, place, _, _ in string.Formatter().parse(template) if place is not None]


def _hub(own: OwnDataset) -> HubDataset:
    return HubDataset(own.hub, f"its rows, named by dataset.{own.name}.file=FILE")


def missing(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why the rows cannot be read; None if they can."""
    assert isinstance(dataset, OwnDataset)
    if dataset.hub:
        return _hub(dataset).absent()
    return None if Path(dataset.file).is_file() else f"{dataset.file}: no such file; give another in its description"


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The rows. Warns of repeated ones. Raises UserError for an unusable row (unless skipped) or file."""
    assert isinstance(dataset, OwnDataset)
    if dataset.file:
        values, data_sha256 = read_table(dataset.file)
        rows = values, dataset.file, data_sha256
    else:
        rows = _hub(dataset).rows(settings, "", dataset.configuration, dataset.split)
    meaning = {key: value for key, value in asdict(dataset).items() if key not in _NO_PROMPT}
    parse = partial(_example, dataset)
    data = loaded(dataset, rows, parse, settings.on_error, dataset.max_new_tokens, [meaning])
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
    before, behind = prompt_parts(own.template, filled, own.context)
    context = str(filled[own.context])
    fields = [own.answers] if isinstance(own.answers, str) else own.answers
    answers = [str(value) for name in fields for value in values_of(name, many=True)]
    if not is_answers(answers):
        raise UserError(f"field {own.answers!r}: its text is empty, so there is nothing to score against")
    if needs_classes(own) and not {*answers} <= {*own.classes}:
        raise UserError(f"field {own.answers!r}: {shortened(answers)} is not in classes: {', '.join(own.classes)}")
    check_gold(own, answers, own.classes)
    texts = [*map(str, values_of(own.evidence, many=True))] if own.evidence else []
    for text in texts:
        times = context.count(text) if text else 0
        if times != 1:
            found = f"occurs {times} times" if text else "is empty"
            raise UserError(f"field {own.evidence!r}: {shortened(text)} {found} in {own.context!r}: expected once")
    spans = {(context.find(text), context.find(text) + len(text)) for text in texts}
    return Example(
        dataset=own.name,
        id=str(values_of(own.id)[0]) if own.id else sha256_of([number, row])[:48],
        instruction=before,
        context=context,
        input=behind,
        answers=tuple(answers),
        all_classes=own.classes,
        length=len(context.split()),
        evidence=tuple(sorted(spans)),
        official=row,
    )


def own_suite(own: OwnDataset) -> Suite:
    """The suite of this dataset alone, of its name: its scores are pooled with no other's."""
    return Suite(
        name=own.name,
        datasets=(own,),
        load=load,
        check=missing,
    )
