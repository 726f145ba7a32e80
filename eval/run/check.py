"""What settings, files and rows at hand rule out, before torch is imported: all else is in
`eval.run.prepare`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from pathlib import Path

from eval.arms import Arm, expand
from eval.benchmarks import SUITES
from eval.benchmarks.chat_format import ChatFormat, chat_format
from eval.benchmarks.datasets import choose, load, reads_length
from eval.benchmarks.subsets import SUBSETS, in_subset
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite
from eval.config import DataConfig, RunConfig
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError, require
from lazyllm.methods import about_the_method
from lazyllm.models.checkpoint import HubError, read_config
from lazyllm.models.tokenizers import chat_templates, tokenizer_file, tokenizer_of
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec

log = logging.getLogger(__name__)

RUNS = Path("runs")  # and `hydra.sweep.dir` of conf/config.yaml
# environment; W&B reports even if offline
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


def check(config: RunConfig, folder: Path) -> None:
    """Refuse what settings, files and rows at hand rule out. folder: where the run makes its
    own. Raises UserError.
    """
    datasets, data = choose_data(config)
    suite, spec, arms = suite_of(datasets), spec_of(config), expand(config)
    chat = chat_of(config, suite)
    check_writable(Path(config.out or folder))
    _check_tracker(config)
    _check_models(spec, arms)
    _check_tokenizer(config, spec, chat, suite)
    if suite.length(data) is None and (data.dir is not None or suite.cached is None):
        read_rows(config, datasets, data)


def spec_of(config: RunConfig) -> ModelSpec:
    """The model that the settings name. Raises UserError for settings that cannot be."""
    model = config.model
    keys = [field.name for field in fields(ModelSpec) if field.name != "seed"]
    spec = ModelSpec(**{key: getattr(model, key) for key in keys}, seed=config.seed)
    spec.check()
    if spec.name not in PRESETS:  # the files of a preset are looked for later
        _ = spec.source  # refuses a name that is no model
    return spec


def chat_of(config: RunConfig, suite: Suite) -> ChatFormat:
    """The format of prompts and answers. Raises UserError for an unknown one, or settings that
    do not fit it.
    """
    model = config.model
    return chat_format(
        model.chat if suite.tokenizer is None else "none",
        args=model.chat_args or {},
        system=model.system,
        today=model.today,
        thinking_tokens=model.thinking_tokens,
    )


def suite_of(datasets: tuple[Dataset, ...]) -> Suite:
    """The suite that all of these are of."""
    return SUITES[datasets[0].suite]


def limit_of(config: RunConfig, suite: Suite) -> int | None:
    """The number of examples of each dataset; None for all."""
    return config.limit or suite.limit


def choose_data(
    config: RunConfig, check_rows: bool = True, quiet: bool = False
) -> tuple[tuple[Dataset, ...], DataSettings]:
    """The datasets whose rows can be loaded, and the settings that determine the rows. Raises
    UserError.

    check_rows: if False, return all named datasets without asking whether their rows are there.
    quiet: whether a log line has named the datasets that are left out, as `check` does.
    """
    named = choose(config.dataset, config.model.name, config.data.length)
    suite = suite_of(named)
    has_length = config.data.length == DataConfig().length or reads_length(config.dataset)
    require(
        has_length,
        "data.length",
        config.data.length,
        "dataset=ruler, or other rows that are described with it",
    )
    for other in SUITES.values():
        if (
            other.options is not None
            and other is not suite
            and getattr(config, other.name) != other.options()
        ):
            changed = getattr(config, other.name).model_dump(exclude_defaults=True)
            key, value = next(iter(changed.items()))
            instead = f"dataset={other.whole} with it: {named[0].name} is of {suite.name}"
            raise UserError(f"{other.name}.{key}={value}: expected {instead}")
    data = _data_settings(config, suite)
    return (_with_rows(config, named, data, quiet) if check_rows else named), data


def _data_settings(config: RunConfig, suite: Suite) -> DataSettings:
    limit, is_own = limit_of(config, suite), config.subset in suite.subsets
    expected = f"{' or '.join(SUBSETS)}, as {suite.name} has no such rows"
    require(is_own or config.subset in SUBSETS, "subset", config.subset, expected)
    is_counted = is_own or config.subset == "first" or limit is not None
    require(is_counted, "subset", config.subset, "limit=50 or so with it")
    expected = f"dataset=NAME with it, as {suite.name} has rows of its own"
    require(
        config.data.dir is None or suite.cached is not None, "data.dir", config.data.dir, expected
    )
    return DataSettings(
        dir=None if config.data.dir is None else Path(config.data.dir),
        on_error=config.data.on_error,
        limit=limit if config.subset == "first" else None,
        options=None if suite.options is None else getattr(config, suite.name),
        model=spec_of(config),
        chat=chat_of(config, suite),
        subset=config.subset if is_own else None,
    )


def _with_rows(
    config: RunConfig, named: tuple[Dataset, ...], data: DataSettings, quiet: bool
) -> tuple[Dataset, ...]:
    """The datasets whose rows can be loaded. Of a whole suite the others are left out, with a
    log line.
    """
    suite = suite_of(named)
    reasons = {
        dataset: reason for dataset in named if (reason := suite.check(dataset, data)) is not None
    }
    is_whole = len(named) == len(suite.datasets) or suite.whole in config.dataset
    if reasons and (not is_whole or len(reasons) == len(named)):
        dataset, reason = next(iter(reasons.items()))
        raise UserError(f"{dataset.name}: {reason}")
    for reason in () if quiet else dict.fromkeys(reasons.values()):
        left_out = ", ".join(dataset.name for dataset in reasons if reasons[dataset] == reason)
        log.warning("left out: %s: %s", left_out, reason)
    return tuple(dataset for dataset in named if dataset not in reasons)


def read_rows(
    config: RunConfig, datasets: tuple[Dataset, ...], data: DataSettings
) -> list[LoadedDataset]:
    """The datasets with their examples after `limit` and `subset`; total: the rows before that.
    Raises UserError.
    """
    chosen, limit = list[LoadedDataset](), limit_of(config, suite_of(datasets))
    for dataset in datasets:
        loaded = load(dataset, data)
        examples = in_subset(loaded.examples, limit, config.subset, config.seed)
        chosen.append(loaded.with_examples(examples))
    return chosen


def models_of(config: RunConfig) -> tuple[ModelSpec, ...]:
    """The models whose files a run reads, each once."""
    others = [spec for arm in expand(config) for spec in arm.sample().models()]
    return tuple(dict.fromkeys([spec_of(config), *others]))


def _check_tracker(config: RunConfig) -> None:
    if config.tracker.mode == "online" and config.tracker.name == "wandb":
        os.environ |= QUIET | os.environ
        import wandb  # not at the top: only if it is used

        has_key = wandb.login(prompt=False, verify=False)
        require(has_key, "tracker.mode", "online", "a key (wandb login, WANDB_API_KEY)")


def _check_models(spec: ModelSpec, arms: tuple[Arm, ...]) -> None:
    """Refuse models whose configs are not here, and methods that do not fit the model's depth."""
    # of a nested config, transformers finds it
    layers: int | None = read_config(spec).get("num_hidden_layers")
    for arm in arms:
        for other in arm.sample().models():
            try:
                read_config(other)
            except UserError as error:
                keys = [key for key, value in arm.hyperparameters.items() if value == other.name]
                given = (
                    f"{arm.label}: {keys[0]}={other.name}"
                    if keys
                    else f"{arm.label} needs {other.name}"
                )
                if not isinstance(error, HubError):
                    raise UserError(f"{given}: {error}") from error
                reason = error.reason.removeprefix(f"{other.name}: ")
                raise UserError(f"{given}: {reason}; give a folder with the checkpoint") from error
        if layers is not None:
            # without windows, which may not be in the file: what it refuses, they do too
            depth = Depth(layers)
            with about_the_method(arm.label):
                arm.at(depth).sample().tokens_per_layer(depth, 1)


def _check_tokenizer(config: RunConfig, spec: ModelSpec, chat: ChatFormat, suite: Suite) -> None:
    """Refuse what is no tokenizer, and thoughts that no prompt asks for."""
    if spec.is_dummy and spec.tokenizer is None and suite.tokenizer is None and not spec.is_local:
        raise UserError(
            "random weights (model.load_format=dummy) download nothing, so the tokenizer must be "
            "given: model.tokenizer=FOLDER (with tokenizer.json or tokenizer.model) or "
            "model.tokenizer=HUB_ID"
        )
    thinks = config.model.thinking_tokens > 0 and chat.from_tokenizer
    if spec.tokenizer is None and suite.tokenizer is None and spec.is_local:
        tokenizer_file(*tokenizer_of(spec))  # refuses what is no tokenizer
    if spec.tokenizer is None and not thinks:
        return
    template = chat_templates(*tokenizer_of(spec))
    require(
        not thinks or not template or "think" in f"{template}{config.model.system}".lower(),
        "model.thinking_tokens",
        config.model.thinking_tokens,
        f"0, as the chat template of {Path(config.model.name).name} knows no thoughts "
        "(model.system can ask for them)",
    )


def check_writable(folder: Path) -> None:
    """Raise UserError if a folder cannot be written, or made."""
    exists = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        raise UserError(
            f"{folder}: cannot be written ({exists}): give another with out=FOLDER, or start "
            "elsewhere"
        )
