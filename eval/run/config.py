"""What a run is told: the schema that Hydra checks every key against, and the checks that need more than a type."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING as MISSING_VALUE
from omegaconf import MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eval.benchmarks.datasets import register_configs, resolve_datasets
from eval.benchmarks.prompts import chat_format
from eval.benchmarks.split import HALVES, parse_shard
from eval.benchmarks.suite import Dataset
from eval.run import speedup_targets
from eval.run.tracking import MODES, TRACKERS, TrackerConfig
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, Method, by_name, known, make, settings_of
from lazyllm.models.spec import ModelSpec

# Launcher -> (the plugin's package, the extra of pyproject.toml that installs it)
LAUNCHERS = {
    "joblib": ("hydra-joblib-launcher", "joblib"),
    "ray": ("hydra-ray-launcher", "ray"),
    "submitit_local": ("hydra-submitit-launcher", "slurm"),
    "submitit_slurm": ("hydra-submitit-launcher", "slurm"),
}

# The files in eval/conf/hydra/launcher have the names of the plugins' own configs and are checked against those
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


DEFAULT_LABEL = "comparison"  # of an experiment that names none


@dataclass
class ModelConfig:
    """name: preset, folder or hub id. load_format: "auto" or "dummy" (random weights, nothing downloaded).

    dtype, device, revision, attn_implementation, quantise, device_map: as in `ModelSpec`. tokenizer: folder or
    hub id where it is not the model's own. max_prompt_tokens: LongBench's limit, beyond which the middle of a prompt is
    cut out; null for none. chat: how prompts are wrapped: none, llama2, xgen or auto (the tokenizer's own template).
    paper: the column of the paper's tables that the model is compared with: llama2, xgen or null.
    """

    name: str = MISSING_VALUE
    load_format: str = "auto"
    dtype: str = "bfloat16"
    device: str = "auto"
    revision: str | None = None
    tokenizer: str | None = None
    attn_implementation: str = "sdpa"
    quantise: str | None = None
    device_map: Any = None
    max_prompt_tokens: int | None = None
    chat: str = "none"
    paper: str | None = None


@dataclass
class DataConfig:
    """dir: folder with <dataset>.jsonl and config/; null fetches LongBench once. on_error: raise, or skip bad rows."""

    dir: str | None = None
    on_error: str = "raise"


@dataclass
class TimingConfig:
    """paired: run the baseline on each example too, in alternation. warmup: runs of each before the first example."""

    paired: bool = True
    warmup: int = 5


@dataclass
class RunConfig:
    """Everything a run is told. `dataset` maps names to true (`eval.benchmarks.datasets.CHOICES`).

    limit: the first so many examples of each dataset. max_new_tokens: fewer than the dataset allows, for a quick look.
    seed: of random weights, and of a method that draws lots (its `seed` is this one unless set).
    threads: CPU threads; null leaves torch's choice.
    out: the run folder; null makes one below `runs/` whose name ends in the run's fingerprint.
    sample: so many examples, drawn by `seed` from all that the datasets, `limit` and `half` leave.
    half: tuning or held-out: of what `limit` leaves, the half that schedules are searched on, or the other one
        (`eval.benchmarks.split`); null for both.
    trace: of the first so many examples of each dataset, keep what happened inside (`eval.run.tracing`).
    compare: several methods, {label: settings like `method`'s}, run one after the other and put into one table, which
        is also written to runs/<label>-<model>.md and .csv; then `method` is not used.
    only: run one of them only, by its label; a sweep (-m) makes a job of each.
    label: the comparison's name.
    shard: i/n, the i-th (from 1) of n jobs that share the run's examples (`eval.benchmarks.split`); null for a run
        in one job.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    method: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, bool] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    limit: int | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    threads: int | None = None
    out: str | None = None
    sample: int | None = None
    half: str | None = None
    trace: int = 0
    only: str | None = None
    compare: dict[str, dict[str, Any]] = field(default_factory=dict)
    label: str = DEFAULT_LABEL
    shard: str | None = None


def register_schema() -> None:
    """Make the schema known to Hydra, so that an unknown key or a value of another type is refused.

    Also `${keys:${compare}}`: the labels of a mapping, as a sweep wants its choices. And the methods that installed
    packages add, as if each had a file in eval/conf/method; one that cannot be used is refused when it is asked for.
    """
    OmegaConf.register_new_resolver("keys", lambda mapping: ",".join(mapping), replace=True)
    ConfigStore.instance().store(name="schema", node=RunConfig)
    register_configs()
    for name in known():
        if name not in METHODS:
            ConfigStore.instance().store(group="method", name=name, node=_config_of(name))


def _config_of(name: str) -> dict[str, Any]:
    """What a file in eval/conf/method would hold: the method's name and the defaults of its hyperparameters.

    A `seed` is the run's, as everywhere. Of a method that cannot be used the name alone: `check_choice` says why.
    """
    try:
        return {"name": name, **_defaults(name)}
    except UserError:
        return {"name": name}


def _defaults(name: str) -> dict[str, Any]:
    """{hyperparameter: default} as configs write it. Raises UserError."""
    defaults: dict[str, Any] = {}
    for key, default in settings_of(by_name(name)).items():
        written = MISSING_VALUE if default is MISSING else default
        try:
            OmegaConf.create({key: written})
        except OmegaConfBaseException as error:
            raise UserError(
                f"method {name!r} has {default!r} as the default of {key!r}: a config holds only numbers, texts, true, "
                "false, null, and lists and mappings of these"
            ) from error
        defaults[key] = "${seed}" if key == "seed" else written
    return defaults


def check_choice(arguments: Sequence[str]) -> None:
    """Refuse an installed package's method that cannot be used, before Hydra says no more than that a key is unknown.

    arguments: the command line without the program's name. Raises UserError.
    """
    chosen = [one.partition("=")[2] for one in arguments if one.startswith("method=")]
    for name in [part for one in chosen for part in one.split(",")]:
        if name in known():
            try:
                _defaults(name)
            except UserError as error:
                raise UserError(str(error)) from error


def check_launcher(arguments: Sequence[str]) -> None:
    """Refuse a launcher that Hydra cannot use, before it says no more than that it knows no such plugin.

    arguments: the command line without the program's name. Raises UserError.
    """
    asked = [one.partition("=")[2] for one in arguments if one.startswith("hydra/launcher=")]
    for launcher in [one for one in asked if one in LAUNCHERS]:
        package, extra = LAUNCHERS[launcher]
        try:
            version(package)
        except PackageNotFoundError as error:
            raise UserError(
                f"hydra/launcher={launcher} needs the package {package}: install it with "
                f"pip install --editable '.[{extra}]', in the repository's folder"
            ) from error
        if not {"-m", "--multirun", "--cfg", "-c", "--info", "-i"} & set(arguments):
            raise UserError(f"hydra/launcher={launcher} starts the jobs of a sweep: give -m too")


def to_run_config(config: Any) -> RunConfig:
    """The composed config as plain dataclasses, checked as far as that goes without a model. Raises UserError."""
    try:
        plain = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        value = "FOLDER_OR_HUB_ID" if error.full_key == "model.name" else "VALUE"
        raise UserError(
            f"{error.full_key} has no default: give it on the command line, {error.full_key}={value}"
        ) from error
    assert isinstance(plain, RunConfig)
    _require(
        plain.model.load_format in ("auto", "dummy"), "model.load_format", plain.model.load_format, "auto or dummy"
    )
    _require(plain.data.on_error in ("raise", "skip"), "data.on_error", plain.data.on_error, "raise or skip")
    _require(plain.timing.warmup >= 0, "timing.warmup", plain.timing.warmup, "0 or more runs")
    for key in ("limit", "sample", "max_new_tokens", "threads"):
        value = getattr(plain, key)
        _require(value is None or value >= 1, key, value, "1 or more, or null")
    _require(plain.half in (None, *HALVES), "half", plain.half, f"{' or '.join(HALVES)}, or null")
    _require(plain.tracker.name in TRACKERS, "tracker.name", plain.tracker.name, " or ".join(TRACKERS))
    _require(plain.tracker.mode in MODES, "tracker.mode", plain.tracker.mode, ", ".join(MODES))
    model_spec(plain).check()
    chat_format(plain.model.chat)
    _require(plain.only is None or plain.only in plain.compare, "only", plain.only, ", ".join(plain.compare) or "null")
    compared = {plain.only: plain.compare[plain.only]} if plain.only is not None else plain.compare
    for settings in compared.values() if compared else [plain.method]:
        check_method(settings)
    _require(plain.model.paper in (None, "llama2", "xgen"), "model.paper", plain.model.paper, "llama2, xgen or null")
    _require(plain.trace >= 0, "trace", plain.trace, "0 or more examples")
    one_run = not plain.compare or plain.only is not None
    _require(plain.out is None or one_run, "out", plain.out, "no out= beside compare: each run has its own")
    _require(plain.shard is None or one_run, "shard", plain.shard, "only=LABEL beside it: it divides one run")
    if plain.shard is not None:
        parse_shard(plain.shard)
    datasets_of(plain)
    return plain


def model_spec(config: RunConfig) -> ModelSpec:
    """The model that a run loads, and how."""
    keys = [setting.name for setting in fields(ModelSpec) if setting.name != "seed"]
    return ModelSpec(**{key: getattr(config.model, key) for key in keys}, seed=config.seed)


def datasets_of(config: RunConfig) -> tuple[Dataset, ...]:
    """The datasets that the run covers; where none is named, the embedded suite for `tiny` and LongBench for others.

    Raises UserError where none is left or one is unknown.
    """
    names = [name for name, wanted in config.dataset.items() if wanted]
    if not config.dataset:  # nothing was said: what the model is there for
        names = ["embedded" if config.model.name == "tiny" else "all"]
    if not names:
        raise UserError("no dataset is left: write dataset=hotpotqa, a task's name, or dataset=all")
    try:
        datasets = resolve_datasets(names)
    except UserError as error:
        raise UserError(str(error)) from error
    if len({dataset.suite for dataset in datasets}) > 1:
        raise UserError("LongBench's and the embedded datasets share no table: run them apart")
    return datasets


def check_method(settings: dict[str, Any]) -> None:
    """Refuse a method's config as far as that goes without a model. Raises UserError."""
    try:
        build_method(speedup_targets.check(settings))
    except UserError as error:
        raise UserError(str(error)) from error


def canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as they are written down: the same for all ways to ask for the same method.

    Hyperparameters at their default are left out, except the method's dial and those that it names.
    """
    method = build_method(speedup_targets.check(settings))
    written = {"name": settings["name"]}
    for key, default in settings_of(type(method)).items():
        value = settings.get(key, default)
        if key in (method.dial, *method.named) or value != default:
            written[key] = value
    return written


def build_method(settings: dict[str, Any]) -> Method:
    """A method from its config: `name`, and its dataclass's fields. Raises UserError, naming what is known."""
    try:
        return make(settings.get("name", ""), {key: value for key, value in settings.items() if key != "name"})
    except UserError as error:
        raise UserError(str(error)) from error


def _require(holds: bool, key: str, value: Any, expected: str) -> None:
    if not holds:
        raise UserError(f"{key}={value}: expected {expected}")
