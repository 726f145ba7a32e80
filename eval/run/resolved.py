"""One value for a run: its settings, and all that follows from them without torch, a model or data."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from eval.benchmarks import SUITES
from eval.benchmarks.chat_format import ChatFormat, chat_format
from eval.benchmarks.datasets import check_rows, datasets_asked_for, missing_rows
from eval.benchmarks.suite import Dataset, DataSettings, Suite
from eval.run import targets
from eval.run.config import RunConfig
from lazyllm.engine.inputs import TURNS
from lazyllm.errors import UserError
from lazyllm.methods import Method, make
from lazyllm.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """A run, or a comparison of several methods (`runs` gives its runs). Made by `resolve`.

    config: the settings. spec: the model. chat: the format of prompts and answers. datasets: those whose rows can be
    loaded, all of `suite`. data: the settings that determine their rows.
    """

    config: RunConfig
    spec: ModelSpec
    chat: ChatFormat
    suite: Suite
    datasets: tuple[Dataset, ...]
    data: DataSettings

    @property
    def method(self) -> dict[str, Any]:
        """The method's `name` and hyperparameters, targets included."""
        return self.config.method

    @property
    def runs(self) -> dict[str, Resolved]:
        """{label: run}: those of a comparison (one with `only`), or this run under its method's name."""
        config = self.config
        methods = config.compare or {config.method["name"]: config.method}
        return {
            label: replace(self, config=replace(config, method=method, compare={}, only=None))
            for label, method in methods.items()
            if config.only in (None, label)
        }

    def other_models(self) -> tuple[ModelSpec, ...]:
        """The models that the run's method needs besides `spec`."""
        return tuple(build_method(targets.check(self.method)).models())

    def changed(self, **settings: Any) -> Resolved:
        """The run with other settings. Raises UserError."""
        return resolve(replace(self.config, **settings))


def resolve(config: RunConfig) -> Resolved:
    """The run of these settings, checked as far as possible without a model.

    Raises UserError for a model, method or dataset that cannot be used. Datasets of a whole suite without rows are left
    out, with a line in the log.
    """
    model = config.model
    keys = [setting.name for setting in fields(ModelSpec) if setting.name != "seed"]
    spec = ModelSpec(**{key: getattr(model, key) for key in keys}, seed=config.seed)
    spec.check()
    _ = spec.source  # raises for a name that is neither a folder nor a hub id
    chat = chat_format(
        model.chat,
        args=model.chat_args or {},
        system=model.system,
        today=model.today,
        thinking_tokens=model.thinking_tokens,
    )
    methods = [config.compare[config.only]] if config.only else list(config.compare.values()) or [config.method]
    for settings in methods:
        build_method(targets.check(settings))
        later_turns(settings)
    named = datasets_asked_for(config.dataset, model.name)
    suite = SUITES[named[0].suite]
    data = DataSettings(
        dir=Path(config.data.dir) if config.data.dir is not None else None,
        on_error="skip" if config.data.on_error == "skip" else "raise",
        limit=config.limit,
        options=getattr(config, suite.name, None),
        model=spec,
        chat=chat,
        turns=config.turns,
    )
    _check_options(config, suite, named)
    return Resolved(config, spec, chat, suite, _with_rows(config, suite, named, data), data)


def build_method(settings: dict[str, Any]) -> Method:
    """A method from its config: `name` and hyperparameters. Raises UserError."""
    return make(settings.get("name", ""), {key: settings[key] for key in settings if key not in ("name", "turns")})


def later_turns(settings: dict[str, Any]) -> str:
    """What later turns of a conversation do with a method's config (`lazyllm.start`). Raises UserError."""
    turns = settings.get("turns", "continue")
    if turns not in TURNS:
        raise UserError(f"method.turns={turns}: give {' or '.join(TURNS)}")
    return turns


def _with_rows(config: RunConfig, suite: Suite, named: tuple[Dataset, ...], data: DataSettings) -> tuple[Dataset, ...]:
    """The datasets whose rows can be loaded. Raises UserError if one is missing that is not just part of a suite."""
    for dataset in named:
        suite.check(dataset, data)
    reasons = {dataset: reason for dataset in named if (reason := missing_rows(dataset, data)) is not None}
    is_whole = not config.dataset or config.dataset.get(suite.whole)
    for dataset, reason in reasons.items():
        if not is_whole or len(reasons) == len(named):
            raise UserError(f"{dataset.name}: {reason}")
    for reason in dict.fromkeys(reasons.values()):
        log.warning(
            "left out: %s: %s", ", ".join(dataset.name for dataset in reasons if reasons[dataset] == reason), reason
        )
    for dataset in (with_rows := tuple(dataset for dataset in named if dataset not in reasons)):
        check_rows(dataset, data)
    return with_rows


def _check_options(config: RunConfig, suite: Suite, named: tuple[Dataset, ...]) -> None:
    """Refuse settings of another suite, which would change nothing. Raises UserError."""
    for other in SUITES.values():
        options = getattr(config, other.name, None)
        for item in fields(options) if options is not None and other is not suite else ():
            value = getattr(options, item.name)
            if value != getattr(type(options)(), item.name):
                raise UserError(
                    f"{other.name}.{item.name}={value}: expected dataset={other.whole} with it: {named[0].name} is of "
                    f"{suite.name}"
                )
