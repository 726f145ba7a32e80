"""A run, ready to start: RunConfig -> Asked -> Run -> Visit -> Results -> Table."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eval.run.arms import Arm
from eval.run.asked import Asked, read_rows
from eval.run.case import Case
from eval.run.cases import limit_of_answers, limit_of_prompts, make_cases
from eval.run.identity import identity_of, provenance_of
from eval.store.folder import fingerprint

log = logging.getLogger(__name__)

DEFAULT_THREADS = torch.get_num_threads()  # restored in a sweep, where an earlier job may have set its own number


@dataclass(frozen=True)
class Run:
    """A run with its arms and prompts, before anything is measured.

    arms: in order, the baseline first. batch_size: answers that decode together. cases: all examples with their
    prompts, in order. skipped: (place, reason) of invalid rows that were left out. identity: what must agree for two
    visits to share a folder. about: config and provenance, for run.json.
    """

    asked: Asked
    arms: tuple[Arm, ...]
    batch_size: int
    cases: tuple[Case, ...]
    skipped: tuple[tuple[str, str], ...]
    identity: dict[str, Any]
    about: dict[str, Any]

    @property
    def folder(self) -> Path:
        if self.asked.config.out is not None:
            return self.asked.folder
        parts = (self.asked.subject.name, self.asked.name, self.asked.data_name, fingerprint(self.identity)[:8])
        return self.asked.folder / "-".join(parts).replace("/", "-")

    @property
    def title(self) -> str:
        """What it compares, and on which data."""
        return f"{self.asked.name}, {self.asked.data_name}"


def prepare(asked: Asked) -> Run:
    """The run that was asked for. Sets torch's threads.

    Raises UserError for what cannot be run; what is known without rows is refused first, as making them may take
    minutes.
    """
    config, subject = asked.config, asked.subject
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    limit = limit_of_prompts(asked, subject.positions)
    subject.chat.uses_template(subject.tokenizer)  # refuses a template that is not there
    log.info("reading %s", ", ".join(dataset.name for dataset in asked.datasets))
    rows = read_rows(asked)
    arms = subject.arms(asked.datasets, asked.suite.length(asked.data), limit)
    new_tokens = max(limit_of_answers(asked, data.dataset, data.max_new_tokens) for data in rows)
    batch_size = subject.batch_size(arms, limit, new_tokens)
    model = replace(config.model, dtype=subject.loaded_spec.dtype)  # what `auto` is here
    about = {
        "config": asdict(replace(config, model=model)),
        "provenance": provenance_of(subject.device),
        "examples": {data.dataset.name: data.total for data in rows},  # `limit` chooses from these
    }
    return Run(
        asked=asked,
        arms=arms,
        batch_size=batch_size,
        cases=tuple(make_cases(asked, arms, rows, limit)),
        skipped=tuple(row for data in rows for row in data.skipped),
        identity=identity_of(asked, arms, rows, limit, batch_size),
        about=about,
    )
