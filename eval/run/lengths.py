"""Lengths of a run's prompts and answers: counted if data and tokenizer are cached, else from published means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import NormalDist
from typing import TYPE_CHECKING

from eval.benchmarks.suite import Dataset
from eval.run.config import prompt_limit
from eval.run.resolved import Resolved
from lazyllm.errors import UserError
from lazyllm.models.load import load_config

if TYPE_CHECKING:
    from eval.run.measure import Case

# (rows, mean words a row, greatest tokens of an answer), from LongBench's README and its dataset2maxlen.json
_LONGBENCH = {
    "narrativeqa": (200, 18409, 128), "qasper": (200, 3619, 128), "multifieldqa_en": (150, 4559, 64),
    "hotpotqa": (200, 9151, 32), "2wikimqa": (200, 4887, 32), "musique": (200, 11214, 32),
    "gov_report": (200, 8734, 512), "qmsum": (200, 10614, 512), "multi_news": (200, 2113, 512),
    "trec": (200, 5177, 64), "triviaqa": (200, 8209, 32), "samsum": (200, 6258, 128),
    "passage_count": (200, 11141, 32), "passage_retrieval_en": (200, 9289, 32),
    "lcc": (500, 1235, 64), "repobench-p": (500, 4206, 64),
}  # fmt: skip
# Llama 2's, over 89 rows of LongBench; larger vocabularies give up to a fifth fewer tokens
_TOKENS_PER_WORD = {"text": 1.6, "code": 3.5}
_SPREAD = 0.5  # standard deviation of the logarithm of the lengths in a dataset


@dataclass(frozen=True)
class Lengths:
    """Tokens of each row's messages (the first is the prompt), and the greatest of an answer.

    guessed: why they were not counted, or None.
    """

    dataset: Dataset
    rows: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    guessed: str | None = None


_KNOWN: dict[str, tuple[Lengths, ...]] = {}  # by config: the jobs of a sweep share their prompts


def lengths_of(run: Resolved) -> tuple[Lengths, ...]:
    """The lengths of a run's datasets. Raises UserError if they can be neither counted nor guessed."""
    # the machine that plans may be another
    here = replace(run.config.model, device="cpu", quantise=None, device_map=None)
    any_method = run.changed(model=here, method={"name": "baseline"}, compare={}, only=None)
    key = repr(any_method.config)
    if key not in _KNOWN:
        _KNOWN[key] = _lengths_of(any_method)
    return _KNOWN[key]


def _lengths_of(run: Resolved) -> tuple[Lengths, ...]:
    from eval.run.prepare import prepare

    try:
        cases = prepare(run).cases
    except UserError as error:
        if any(dataset.name not in _LONGBENCH for dataset in run.datasets):
            raise
        return tuple(_guess(run, dataset, str(error)) for dataset in run.datasets)
    grouped = [list(group) for _, group in groupby(cases, lambda case: case.dataset)]
    return tuple(Lengths(group[0].dataset, _counted(group), group[0].max_new_tokens) for group in grouped)


def _counted(cases: Sequence[Case]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(len(message.token_ids) for message in (case.prompt, *case.prompt.turns)) for case in cases)


def _guess(run: Resolved, dataset: Dataset, why: str) -> Lengths:
    """Log-normal lengths around the published mean, cut to the model's limit."""
    config = run.config
    positions = load_config(replace(run.spec, load_format="dummy")).max_position_embeddings
    limit = config.model.max_prompt_tokens or prompt_limit(positions)
    words, most = _LONGBENCH[dataset.name][1:]
    center = math.log(words * _TOKENS_PER_WORD["code" if dataset.task == "code" else "text"]) - _SPREAD**2 / 2
    total = sum(_rows(run, other) for other in run.datasets)
    rows = round(_rows(run, dataset) * min(1.0, (config.sample or total) / total))
    drawn = [math.exp(center + _SPREAD * NormalDist().inv_cdf((row + 0.5) / rows)) for row in range(rows)]
    answer = min(most, config.max_new_tokens or most) + (config.model.thinking_tokens if dataset.chat_wrap else 0)
    return Lengths(dataset, tuple((min(limit, round(length)),) for length in drawn), answer, why)


def _rows(run: Resolved, dataset: Dataset) -> int:
    rows = _LONGBENCH[dataset.name][0]
    rows = min(rows, run.config.limit or rows)
    return rows if run.config.half is None else rows // 2
