"""LongBench v2 (arXiv 2412.15204): 503 multiple-choice questions on texts of 8,000 to 2 million words.

A folder (`data.dir=FOLDER`) holds the official `data.json` and `prompts/0shot.txt`. Without one, rows come from the
package `datasets` (`THUDM/LongBench-v2`), and the prompt from LongBench's repository, pinned by commit and sha256.
Prompt, truncation and scoring are those of `pred.py` (commit 2e00731), without chain of thought.

Ours: answers are greedy, officially sampled at temperature 0.1; an empty answer scores 0, officially it is left out of
the results. The table `groups` shows both scores.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

from eval.benchmarks.downloads import fetched_once, file_sha256, is_cached, missing_from_hub, rows_from_hub
from eval.benchmarks.longbench import TemplateWarning
from eval.benchmarks.metrics import score_example
from eval.benchmarks.rows import Field, check_fields, is_filled, is_text, sha256_of, shortened, usable
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite
from lazyllm.errors import UserError
from lazyllm.files import cache_folder

REPOSITORY = "THUDM/LongBench-v2"
ROWS, PROMPT = "data.json", "prompts/0shot.txt"
PROMPT_URL = f"https://raw.githubusercontent.com/THUDM/LongBench/2e00731f8d0bff23dc4325161044d0ed8af94c1e/{PROMPT}"
PROMPT_SHA256 = "68a162252bc9ff71d5d7abca3d69bb31aac3c35f832d657a2866f2018b8a6950"
MAX_NEW_TOKENS = 128
TEMPLATE = "{instruction}{context}{input}"
"""A row's official prompt, split before and after the context."""

LENGTHS = {"short": "short (0-32k words)", "medium": "medium (32-128k words)", "long": "long (128k-2M words)"}
"""A row's `length`, and the group of these rows."""

_CONTENT = f"the folder must hold {ROWS} and {PROMPT}, as LongBench v2 has them"
_GIVE = f"data.dir=FOLDER with LongBench v2's {ROWS} and {PROMPT}"
_PLACES = {"$Q$": "question", "$C_A$": "choice_A", "$C_B$": "choice_B", "$C_C$": "choice_C", "$C_D$": "choice_D"}
_LETTERS = ("A", "B", "C", "D")


def _one_of(name: str, values: Iterable[str]) -> Field:
    return name, lambda value: value in values, f"one of {', '.join(values)}"


_FIELDS: tuple[Field, ...] = (
    ("_id", lambda value: is_text(value) and bool(value), "a string that is not empty"),
    ("domain", is_text, "a string"),
    ("sub_domain", is_text, "a string"),
    _one_of("difficulty", ("easy", "hard")),
    _one_of("length", tuple(LENGTHS)),
    *((field, is_text, "a string") for field in _PLACES.values()),
    _one_of("answer", _LETTERS),
    ("context", is_filled, "a string that is not empty"),
)


def missing(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why the rows cannot be loaded; None if they can."""
    return None if settings.dir is not None else missing_from_hub(REPOSITORY, _GIVE)


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The rows, from a folder or from `datasets`.

    Raises UserError as `longbench.load`. Warns (TemplateWarning) if the folder's prompt is not the official one.
    """
    template = _template(settings)
    rows, source, sha256 = _rows(settings)
    expected = "an array of rows, as LongBench v2 has them"
    examples, skipped = usable(
        rows, lambda row, number: _example(dataset, row, template), source, settings.on_error, expected
    )
    return LoadedDataset(
        dataset=dataset,
        examples=examples,
        template=TEMPLATE,
        max_new_tokens=MAX_NEW_TOKENS,
        data_sha256=sha256,
        config_sha256=sha256_of([template, MAX_NEW_TOKENS]),
        source=source,
        skipped=skipped,
    )


def official_rows(dataset: Dataset, settings: DataSettings) -> Iterable[dict[str, Any]]:
    """The rows in the format of `data.json`. Raises UserError as `load`."""
    known = {example.id for example in load(dataset, settings).examples[: settings.limit]}
    return (row for _, row in _rows(settings)[0] if isinstance(row, dict) and row.get("_id") in known)


SUITE = Suite(
    name="longbench_v2",
    version=1,
    datasets=(
        Dataset("longbench_v2", "multiple_choice", "multiple_choice", suite="longbench_v2", decode_halves=False),
    ),
    load=load,
    score=score_example,
    whole="longbench_v2",
    rows_in_dir=True,
    missing=missing,
    cached=partial(is_cached, REPOSITORY),
    rows=official_rows,
)


def _template(settings: DataSettings) -> str:
    """The official prompt, from the folder or downloaded. Raises UserError."""
    folder = settings.dir.expanduser() if settings.dir is not None else cache_folder() / "longbench_v2"
    file = folder / PROMPT
    if settings.dir is None:
        ways_out = f"Either give {_GIVE}, or run once with a network, which fills {folder}"
        fetched_once(file, PROMPT_URL, PROMPT_SHA256, "LongBench", "LongBench v2's prompt", ways_out)
    elif not file.is_file():
        raise UserError(f"data.dir={folder}: {PROMPT} is missing; {_CONTENT}")
    elif file_sha256(file) != PROMPT_SHA256:
        message = f"{file}: differs from LongBench v2's own, so scores are not comparable with published ones"
        warnings.warn(message, TemplateWarning, stacklevel=4)
    try:
        template = file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error})") from error
    absent = [place for place in ("$DOC$", *_PLACES) if place not in template]
    if absent:
        raise UserError(f"{file}: expected LongBench v2's prompt, with the place {absent[0]}")
    return template


def _rows(settings: DataSettings) -> tuple[list[tuple[str, Any]], str, str]:
    """(place, parsed value or UserError) of each row; the source of all, and their hash. Raises UserError."""
    if settings.dir is None:
        return rows_from_hub(REPOSITORY, None, "train", _GIVE)
    file = settings.dir.expanduser() / ROWS
    if not file.is_file():
        raise UserError(f"data.dir={settings.dir}: {ROWS} is missing; {_CONTENT}")
    data = file.read_bytes()
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON in UTF-8 ({error})") from error
    if not isinstance(values, list):
        raise UserError(f"{file}: expected an array of rows, as LongBench v2 has them, got {shortened(values)}")
    rows = [(f"{file}, row {number}", row) for number, row in enumerate(values, 1)]
    return rows, str(file), hashlib.sha256(data).hexdigest()


def _example(dataset: Dataset, row: Any, template: str) -> Example:
    """The row's example. Raises UserError with the reason if the row cannot be used."""
    check_fields(row, _FIELDS)
    instruction, _, question = template.partition("$DOC$")
    parts = [instruction, row["context"].strip(), question]
    # one after the other in all of the prompt, as officially: texts may hold "$Q$"
    for place, field in _PLACES.items():
        parts = [part.replace(place, row[field].strip()) for part in parts]
    return Example(
        dataset=dataset.name,
        id=row["_id"],
        input=parts[2],
        context=parts[1],
        answers=(row["answer"],),
        all_classes=_LETTERS,
        length=len(row["context"]),
        language="en",
        instruction=parts[0],
        groups=(f"difficulty={row['difficulty']}", f"length={LENGTHS[row['length']]}"),
    )
