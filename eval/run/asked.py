"""What the settings of a run ask for: its model, arms and datasets. Nothing here imports torch."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.benchmarks import SUITES
from eval.benchmarks.datasets import datasets_asked_for, load
from eval.benchmarks.subsets import SUBSETS, in_subset
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite
from eval.run.arms import arms_asked
from eval.run.config import QUIET
from eval.run.local import LocalModel, model_of
from eval.run.settings import DataConfig, RunConfig, check_unused
from lazyllm.errors import UserError, require
from lazyllm.methods import name_of
from lazyllm.models.tokenizers import chat_templates, tokenizer_file, tokenizer_of

log = logging.getLogger(__name__)

RUNS = Path("runs")  # and `hydra.sweep.dir` of conf/config.yaml


@dataclass(frozen=True)
class Asked:
    """A run as its settings ask for it; `eval.run.run.prepare` makes it ready to start.

    arms: {label: settings} in the order of tables, the baseline first. datasets: those of one suite whose rows can be
    loaded. data: the settings that determine the rows. runs: the folder of runs without `out`.
    """

    config: RunConfig
    subject: LocalModel
    arms: dict[str, dict[str, Any]]
    datasets: tuple[Dataset, ...]
    data: DataSettings
    runs: Path = RUNS

    @property
    def suite(self) -> Suite:
        return SUITES[self.datasets[0].suite]

    @property
    def limit(self) -> int | None:
        """The number of examples of each dataset; None for all."""
        return self.config.limit or self.suite.limit

    @property
    def baseline(self) -> str | None:
        """The label of the baseline's arm; None without one."""
        return next(iter(self.arms)) if self.config.baseline else None

    @property
    def name(self) -> str:
        """What it compares, for people: the label, or the method."""
        others = {name_of(settings["name"]) for label, settings in self.arms.items() if label != self.baseline}
        return self.config.label or ("comparison" if len(others) > 1 else min(others, default="baseline"))

    @property
    def data_name(self) -> str:
        """The data, for people: a dataset, a task or a suite, or the number of datasets, and a suite's own subset."""
        tasks, suites = ({getattr(dataset, key) for dataset in self.datasets} for key in ("task", "suite"))
        name, has_all_tasks = f"{len(self.datasets)}_datasets", len(tasks) == len(self.suite.all_tasks)
        if len(self.datasets) == 1:
            name = self.datasets[0].name
        elif (has_all_tasks and len(suites) == 1) or self.suite.whole in self.config.dataset:
            name = self.suite.whole
        elif len(tasks) == 1:
            name = min(tasks)
        return f"{name}_{self.data.subset}" if self.data.subset else name

    @property
    def folder(self) -> Path:
        """The folder in which it makes its own, or its own."""
        return Path(self.config.out or self.runs)

    def changed(self, **settings: Any) -> Asked:
        """The run with other settings."""
        return ask(replace(self.config, **settings), self.runs)

    def check(self) -> Asked:
        """Refuse what files and rows at hand rule out. Returns itself. Raises UserError.

        What takes torch to know is refused before rows are made (`eval.run.run.prepare`).
        """
        config, spec = self.config, self.subject.spec
        check_writable(self.folder)
        if config.tracker.mode == "online":
            require(config.tracker.name == "wandb", "tracker.mode", "online", "tracker=wandb with it")
            os.environ |= QUIET | os.environ
            import wandb  # not at the top: only if it is used

            has_key = wandb.login(prompt=False, verify=False)
            require(has_key, "tracker.mode", "online", "a key (wandb login, WANDB_API_KEY)")
        self.subject.check()
        thinks = config.model.thinking_tokens > 0 and self.subject.chat.from_tokenizer
        if spec.tokenizer is None and self.suite.tokenizer is None and spec.is_local:
            tokenizer_file(*tokenizer_of(spec))  # refuses what is no tokenizer
        if spec.tokenizer is not None or thinks:  # refuse what is no tokenizer, and thoughts that no prompt asks for
            template = chat_templates(*tokenizer_of(spec))
            require(
                not thinks or not template or "think" in f"{template}{config.model.system}".lower(),
                "model.thinking_tokens",
                config.model.thinking_tokens,
                f"0, as the chat template of {self.subject.name} knows no thoughts (model.system can ask for them)",
            )
        if self.suite.rows_here or (self.suite.length(self.data) is None and self.data.dir is not None):
            read_rows(self)
        return self


def ask(config: RunConfig, runs: Path = RUNS, check_rows: bool = True) -> Asked:
    """What the settings ask for, checked as far as that needs no files of models. Raises UserError.

    check_rows: whether the rows of at least one dataset must be there.
    """
    named = datasets_asked_for(config.dataset, config.model.name)
    has_length = config.data.length == DataConfig().length or str(config.data.length) in str(config.dataset)
    require(has_length, "data.length", config.data.length, "dataset=ruler, or other rows that are described with it")
    arms = arms_asked(config)
    subject = model_of(config, arms)
    data = _data_settings(config, SUITES[named[0].suite], subject)
    for suite in SUITES.values():
        if suite.options is not None and suite.name != named[0].suite:
            instead = f"dataset={suite.whole} with it: {named[0].name} is of {named[0].suite}"
            check_unused(suite.name, getattr(config, suite.name), instead)
    return Asked(config, subject, arms, _with_rows(config, named, data) if check_rows else named, data, runs)


def _data_settings(config: RunConfig, suite: Suite, subject: LocalModel) -> DataSettings:
    limit, is_own = config.limit or suite.limit, config.subset in suite.subsets
    expected = f"{' or '.join(SUBSETS)}, as {suite.name} has no such rows"
    require(is_own or config.subset in SUBSETS, "subset", config.subset, expected)
    is_counted = is_own or config.subset == "first" or limit is not None
    require(is_counted, "subset", config.subset, "limit=50 or so with it")
    expected = f"dataset=NAME with it, as {suite.name} has rows of its own"
    require(config.data.dir is None or not suite.rows_here, "data.dir", config.data.dir, expected)
    return DataSettings(
        dir=None if config.data.dir is None else Path(config.data.dir),
        on_error="skip" if config.data.on_error == "skip" else "raise",
        limit=limit if config.subset == "first" else None,
        options=None if suite.options is None else getattr(config, suite.name),
        model=subject.spec,
        chat=subject.chat,
        subset=config.subset if is_own else None,
    )


def _with_rows(config: RunConfig, named: tuple[Dataset, ...], data: DataSettings) -> tuple[Dataset, ...]:
    """The datasets whose rows can be loaded. Of a whole suite the others are left out, with a log line."""
    suite = SUITES[named[0].suite]
    reasons = {dataset: reason for dataset in named if (reason := suite.check(dataset, data)) is not None}
    is_whole = len(named) == len(suite.datasets) or config.dataset.get(suite.whole)
    if reasons and (not is_whole or len(reasons) == len(named)):
        dataset, reason = next(iter(reasons.items()))
        raise UserError(f"{dataset.name}: {reason}")
    for reason in dict.fromkeys(reasons.values()):
        left_out = ", ".join(dataset.name for dataset in reasons if reasons[dataset] == reason)
        log.warning("left out: %s: %s", left_out, reason)
    return tuple(dataset for dataset in named if dataset not in reasons)


def read_rows(asked: Asked) -> list[LoadedDataset]:
    """The datasets with their examples after `limit` and `subset`; total: the rows before that. Raises UserError."""
    config, chosen = asked.config, list[LoadedDataset]()
    for dataset in asked.datasets:
        data = load(dataset, asked.data)
        subset = in_subset(data.examples, asked.limit, config.subset, config.seed)
        chosen.append(replace(data, examples=tuple(subset), total=data.total or len(data.examples)))
    return chosen


def check_writable(folder: Path) -> None:
    """Raise UserError if a folder cannot be written, or made."""
    exists = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        raise UserError(f"{folder}: cannot be written ({exists}): give another with out=FOLDER, or start elsewhere")
