"""MRCR (`openai/mrcr`, MIT): long conversations in which one of several like requests must be answered again, verbatim.

A row is a conversation; its last message asks for the answer to, for example, the second poem about tapirs, after a
random string. So an answer is a copy of up to a thousand tokens. The messages enter the model's chat template as they
are. The score is the dataset's: 0 unless the answer starts with the random string, else the ratio of
`difflib.SequenceMatcher` without it.

Rows come through the package `datasets`, or from its parquet files in `data.dir`. Official bins hold rows by their
o200k_base tokens, those of all messages and the answer; they are counted by tiktoken, or by the model's tokenizer if
tiktoken or its file is missing (the run's source then says so).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from eval.benchmarks.downloads import is_cached, missing_from_hub, rows_from_files, rows_from_hub
from eval.benchmarks.prompts import tokenizer_for_rows
from eval.benchmarks.rows import check_fields, is_filled, loaded, sha256_of
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite
from lazyllm.errors import UserError

REPOSITORY = "openai/mrcr"
MAX_NEW_TOKENS = 2048
NEEDLES = (2, 4, 8)
BINS = tuple(2**power for power in range(13, 21))
"""Upper ends; each bin begins above half of its end."""

_GIVE = "its parquet files"
_CHARACTERS = 16  # of a token, at most, on average over a conversation: rows beyond it are not counted
_FIELDS = (
    ("prompt", is_filled, "a conversation as JSON"),
    ("answer", is_filled, "a string that is not empty"),
    ("random_string_to_prepend", is_filled, "a string that is not empty"),
    ("n_needles", lambda value: value in NEEDLES, f"one of {', '.join(map(str, NEEDLES))}"),
)


@dataclass
class MrcrConfig:
    """lengths: upper ends of bins, in tokens of messages and answer: 8192, 16384, ... 1048576."""

    lengths: list[int] = field(default_factory=lambda: [BINS[0]])


def score(dataset: Dataset, answer: str, answers: Sequence[str], all_classes: Sequence[str] | None = None) -> float:
    """The ratio of the answer and the gold one. answers: the gold answer, and the random string that it starts with."""
    gold, prefix = answers
    if not answer.startswith(prefix):
        return 0.0
    return float(SequenceMatcher(None, answer.removeprefix(prefix), gold.removeprefix(prefix)).ratio())


def check(dataset: Dataset, settings: DataSettings) -> None:
    """Refuse unknown bins. Raises UserError."""
    lengths = settings.options.lengths
    if not lengths or not set(lengths) <= set(BINS):
        raise UserError(f"mrcr.lengths={lengths}: expected a list of {', '.join(map(str, BINS))}")


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The rows with one number of needles, in the bins. Raises UserError for an unusable row or file, and for none."""
    rows, source, sha256 = (
        rows_from_hub(REPOSITORY, None, "train", _GIVE)
        if settings.dir is None
        else rows_from_files(settings.dir, "**/*.parquet")
    )
    counted_by, count = _counter(settings)
    lengths, others = settings.options.lengths, {*NEEDLES} - {int(dataset.name.removeprefix("mrcr_"))}
    mine = [
        (where, row)
        for where, row in rows
        if row.get("n_needles") not in others and len(str(row.get("prompt"))) <= _CHARACTERS * max(lengths)
    ]
    sha256 = sha256_of([sha256, lengths, counted_by])
    rows = mine, f"{source}, tokens by {counted_by}", sha256
    whole = loaded(dataset, rows, partial(_example, dataset, count), settings.on_error, "conversations", MAX_NEW_TOKENS)
    groups = {f"length={length}" for length in lengths}
    in_bins = tuple(example for example in whole.examples if groups & {*example.groups})
    if not in_bins:
        raise UserError(f"{dataset.name}: no row has {lengths} tokens by {counted_by}: give other mrcr.lengths")
    return replace(whole, examples=in_bins)


SUITE = Suite(
    name="mrcr",
    version=1,
    datasets=tuple(
        Dataset(f"mrcr_{needles}", "coreference", "sequence_ratio", suite="mrcr", truncate=False) for needles in NEEDLES
    ),
    load=load,
    score=score,
    whole="mrcr",
    options=MrcrConfig,
    check=check,
    missing=lambda dataset, settings: None if settings.dir is not None else missing_from_hub(REPOSITORY, _GIVE),
    cached=partial(is_cached, REPOSITORY),
    length=lambda settings: max(settings.options.lengths),
    shorter="give smaller mrcr.lengths",
)


def _counter(settings: DataSettings) -> tuple[str, Callable[[str], int]]:
    """What counts tokens, for people, and the function that counts those of a text."""
    try:
        encoding = importlib.import_module("tiktoken").get_encoding("o200k_base")
        return "o200k_base", lambda text: len(encoding.encode(text, disallowed_special=()))
    except (ImportError, OSError):  # not installed, or its file is neither cached nor reachable
        tokenizer: Any = tokenizer_for_rows(settings.model, "mrcr")
        return "the model's tokenizer", lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _example(dataset: Dataset, count: Callable[[str], int], row: Any, number: int) -> Example:
    """The example of a row, in the group of its bin. Raises UserError."""
    check_fields(row, _FIELDS)
    messages = _messages(row["prompt"])
    if not row["answer"].startswith(row["random_string_to_prepend"]):
        raise UserError("answer does not start with random_string_to_prepend")
    tokens = sum(map(count, messages)) + count(row["answer"])
    return Example(
        dataset=dataset.name,
        id=f"{dataset.name}-{number}",
        input=messages[-1],
        context="",
        answers=(row["answer"], row["random_string_to_prepend"]),
        all_classes=(),
        length=tokens,
        language="en",
        groups=tuple(f"length={end}" for end in BINS if end // 2 < tokens <= end),
        earlier=tuple(messages[:-1]),
        official=row,
    )


def _messages(prompt: str) -> list[str]:
    """The contents of a conversation's messages: of the user and the assistant in turns. Raises UserError."""
    try:
        messages = [(message["role"], message["content"]) for message in json.loads(prompt)]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"prompt is not a list of messages with role and content ({error})") from error
    roles = [role for role, _ in messages]
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"] or not all(
        is_filled(text) for _, text in messages
    ):
        raise UserError(f"prompt has messages of {', '.join(roles[:4])}...: expected user, assistant, ..., user")
    return [text for _, text in messages]
