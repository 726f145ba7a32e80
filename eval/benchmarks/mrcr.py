"""MRCR (`openai/mrcr`, MIT): long conversations in which one of several like requests must be answered again, verbatim.

A row is a conversation; its last message asks for the answer to, for example, the second poem about tapirs, after a
random string. So an answer is a copy of up to a thousand tokens. The messages enter the model's chat template as they
are.

Rows come through the package `datasets`, or from its parquet files in `data.dir`. Official bins hold rows by their
o200k_base tokens, those of all messages and the answer; they are counted by tiktoken, or by the model's tokenizer if
tiktoken or its file is missing (the run's source then says so).
"""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eval.benchmarks.downloads import HubDataset
from eval.benchmarks.prompts import tokenizer_for_rows
from eval.benchmarks.rows import FILLED, check_fields, is_filled, loaded, one_of, sha256_of, shortened
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite, check_lengths, setting
from lazyllm.errors import UserError

MAX_NEW_TOKENS = 2048
NEEDLES = (2, 4, 8)
BINS = tuple(2**power for power in range(13, 21))  # upper ends; each begins above half of its end
_HUB = HubDataset("openai/mrcr", "its parquet files")
_CHARACTERS = 16  # of a token, at most, on average over a conversation: rows beyond it are not counted
_FIELDS = {"prompt": FILLED, "answer": FILLED, "random_string_to_prepend": FILLED, "n_needles": one_of(NEEDLES)}


@dataclass
class MrcrConfig:
    lengths: list[int] = setting(
        [BINS[0]], "upper ends of bins, in tokens of messages and answer: 8192, 16384, ... 1048576"
    )


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The rows with one number of needles, in the bins. Raises UserError for an unusable row or file, and for none."""
    rows, source, sha256 = _HUB.rows(settings, "**/*.parquet")
    counted_by, count = _counter(settings)
    lengths, others = settings.options.lengths, {*NEEDLES} - {int(dataset.name.removeprefix("mrcr_"))}
    mine = [(where, row) for where, row in rows if row.get("n_needles") not in others]
    rows = mine, f"{source}, tokens by {counted_by}", sha256_of([sha256, lengths, counted_by])
    parse = partial(_example, dataset, count, lengths)
    return loaded(dataset, rows, parse, settings.on_error, MAX_NEW_TOKENS, instead=f"other mrcr.lengths than {lengths}")


def _counter(settings: DataSettings) -> tuple[str, Callable[[str], int]]:
    """The name of what counts tokens, and the function that counts those of a text."""
    try:
        encoding = importlib.import_module("tiktoken").get_encoding("o200k_base")
        return "o200k_base", lambda text: len(encoding.encode(text, disallowed_special=()))
    except (ImportError, OSError):  # not installed, or its file is neither cached nor reachable
        tokenizer: Any = tokenizer_for_rows(settings.model, "mrcr")
        return "the model's tokenizer", lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _example(
    dataset: Dataset, count: Callable[[str], int], lengths: Sequence[int], row: Any, number: int
) -> Example | None:
    """The example of a row, in the group of its bin; None if that is none of `lengths`."""
    check_fields(row, _FIELDS)
    if len(row["prompt"]) > _CHARACTERS * max(lengths):
        return None
    answer, prefix = row["answer"], row["random_string_to_prepend"]
    try:
        roles, texts = zip(*((one["role"], one["content"]) for one in json.loads(row["prompt"])), strict=True)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"prompt is not a list of messages with role and content ({error})") from error
    if roles != ("user", "assistant") * (len(roles) // 2) + ("user",) or not all(map(is_filled, texts)):
        raise UserError(f"prompt has messages of {shortened(roles)}: expected user, assistant, ..., user")
    if not answer.startswith(prefix):
        raise UserError("answer does not start with random_string_to_prepend")
    tokens = sum(map(count, (*texts, answer)))
    bins = [end for end in lengths if end // 2 < tokens <= end]
    if not bins:
        return None
    return Example(
        dataset=dataset.name,
        id=f"{dataset.name}-{number}",
        input=texts[-1],
        context="",
        answers=(answer, prefix),
        length=tokens,
        groups=(f"length={bins[0]}",),
        earlier=texts[:-1],
        official=row,
    )


SUITE = Suite(
    name="mrcr",
    version=2,
    datasets=tuple(
        Dataset(f"mrcr_{needles}", "coreference", "sequence_ratio", suite="mrcr", truncate=False) for needles in NEEDLES
    ),
    load=load,
    options=MrcrConfig,
    check=partial(check_lengths, BINS),
    missing=_HUB.missing,
    length=lambda settings: max(settings.options.lengths),
    shorter="give smaller mrcr.lengths",
)
