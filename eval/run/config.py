"""A run's settings: the schema, and every check that needs neither torch nor a model."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING as MISSING_VALUE
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eval.benchmarks.chat_format import TODAY
from eval.benchmarks.datasets import SuiteSettings, register_configs
from eval.benchmarks.subsets import HALVES, parse_shard
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, by_name, known, settings_of
from lazyllm.presets import PRESETS

CONF = Path(__file__).resolve().parents[1] / "conf"  # a link to the folder at the top level; a wheel holds it here

# Launcher -> (the plugin's package, the extra of pyproject.toml that installs it)
LAUNCHERS = {
    "joblib": ("hydra-joblib-launcher", "joblib"),
    "ray": ("hydra-ray-launcher", "ray"),
    "submitit_local": ("hydra-submitit-launcher", "slurm"),
    "submitit_slurm": ("hydra-submitit-launcher", "slurm"),
}
TRACKERS = ("none", "wandb")
TRACKER_MODES = ("auto", "online", "offline", "disabled")
DEFAULT_LABEL = "comparison"  # of an experiment without a label

# Config groups whose choice is an argument, and keys whose subkeys the schema leaves open
_GROUPS = ("model", "method", "dataset", "tracker", "experiment")
_COUNTS = ("limit", "sample", "max_new_tokens", "threads", "turns")
_MAY_BE_0 = ("timing.warmup", "trace", "model.thinking_tokens")
_OPEN = ("dataset", "compare", "model.device_map", "model.chat_args")

# The files in conf/hydra/launcher have the names of the plugins' configs, and Hydra checks them against these
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


@dataclass
class ModelConfig:
    """name: preset, folder or hub id. load_format: "auto" or "dummy" (random weights, nothing downloaded).

    dtype, device, revision, attn_implementation, quantise, device_map: as in `ModelSpec`. tokenizer: folder or
    hub id of another tokenizer than the model's. max_prompt_tokens: longer prompts lose their middle, as in LongBench;
    null for LongBench's share of the model's positions (`prompt_limit`).
    chat: format of prompts: none, llama2, xgen, auto (the tokenizer's template), or null: auto if there is a template.
    chat_args, system, today, thinking_tokens: `args`, `system`, `today` and `thinking_tokens` of `ChatFormat`.
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
    chat: str | None = "none"
    chat_args: Any = None
    system: str | None = None
    today: str = TODAY
    thinking_tokens: int = 0
    paper: str | None = None


@dataclass
class DataConfig:
    """dir: folder with the suite's files; null downloads them once. on_error: raise, or skip bad rows."""

    dir: str | None = None
    on_error: str = "raise"


@dataclass
class TimingConfig:
    """paired: also run the baseline on each example, in alternation. warmup: runs of each before the first example."""

    paired: bool = True
    warmup: int = 5


@dataclass
class TrackerConfig:
    """name: none or wandb. project, entity, tags: W&B's; entity null is the key's owner.

    group: W&B's group; null takes the experiment's label.
    mode: online, offline, disabled, or auto: online if a key is configured (WANDB_API_KEY, or `wandb login`) and
    WANDB_MODE is not set, else offline.
    """

    name: str = "none"
    project: str = "lazyllm-bench"
    entity: str | None = None
    group: str | None = None
    mode: str = "auto"
    tags: list[str] = field(default_factory=list)


@dataclass
class RunConfig(SuiteSettings):
    """All settings of a run, with those of each suite under its name. `dataset` maps dataset names to true.

    limit: the first N examples of each dataset. max_new_tokens: fewer than the dataset allows, for a quick look.
    seed: of random weights, and the default of methods with a `seed`.
    threads: CPU threads; null takes torch's choice.
    out: the run folder; null makes one in `runs/` whose name ends in the run's fingerprint.
    sample: draw N examples at random (by `seed`), after `dataset`, `limit` and `half`.
    half: tuning (the half of the examples that schedules are searched on) or held-out (the other half), after `limit`
        (`eval.benchmarks.subsets`); null for both.
    turns: questions asked of each row, in turns of one conversation: N makes rows of N (embedded), or takes the first
        N of rows that hold more; null for all that a row holds (embedded: one).
    trace: keep traces of the first N examples of each dataset (`eval.store.record`).
    fidelity: answer: after each example feed the baseline's answer, and the gold one, to the method and to the baseline
        (`eval.run.measure`); null: compare the first tokens and the two answers only.
    evidence: record which tokens of the evidence each layer computes, for rows that name their evidence.
    compare: several methods, {label: settings as in `method`}, run one after the other and shown in one table, which is
        also written to runs/<label>-<model>.md and .csv; `method` is then ignored.
    only: run only the method of `compare` with this label; a sweep (-m) makes a job of each.
    speedup: the ideal TTFT speedup, such as `2x`, at which `experiment=field` compares methods.
    draft: SpecPrefill's draft model in `experiment=field` (folder, hub id or preset).
        Of both: a method refers to them as `${speedup}` and `${draft}`; without such a method they are refused.
    label: the comparison's name.
    shard: i/n, the i-th (from 1) of n jobs that share the run's examples (`eval.benchmarks.subsets`); null: one job.
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
    turns: int | None = None
    trace: int = 0
    fidelity: str | None = None
    evidence: bool = True
    only: str | None = None
    speedup: str | None = None
    draft: str | None = None
    compare: dict[str, dict[str, Any]] = field(default_factory=dict)
    label: str = DEFAULT_LABEL
    shard: str | None = None


def register_schema(schema: type[RunConfig] = RunConfig) -> None:
    """Register the schema with Hydra, which then refuses unknown keys and values of another type.

    Also registers `${keys:${compare}}`, the labels of a mapping as a sweep's choices, and a config for each method of
    an installed package. A method that cannot be used is refused only if it is chosen (`check_arguments`).
    """
    OmegaConf.register_new_resolver("keys", lambda mapping: ",".join(mapping), replace=True)
    ConfigStore.instance().store(name="schema", node=schema)
    register_configs()
    for name, node in model_nodes().items():
        ConfigStore.instance().store(group="model", name=name, node=node)
    for name in known():
        if name not in METHODS:
            ConfigStore.instance().store(group="method", name=name, node=_config_of(name))


def prompt_limit(positions: int) -> int:
    """LongBench's limit for prompts of a model with N positions (its model2maxlen.json: 3500 of 4096, 31500 of 32768).

    The remaining positions are for answers.
    """
    known = {4096: 3500, 8192: 7500, 16_384: 15_500, 32_768: 31_500}
    return known.get(positions) or max(positions // 2, (positions - 596) // 500 * 500)


def model_nodes() -> dict[str, dict[str, Any]]:
    """The config of each preset without a file in conf/model; all of these are chat models."""
    return {
        name: {
            "name": name,
            "max_prompt_tokens": prompt_limit(preset.architecture["max_position_embeddings"]),
            "chat": "auto",
            # SDPA cannot cap attention logits, which Gemma 2 does
            "attn_implementation": "eager" if preset.architecture["model_type"] == "gemma2" else "sdpa",
        }
        for name, preset in PRESETS.items()
        if preset.architecture is not None and not (CONF / "model" / f"{name}.yaml").is_file()
    }


def _config_of(name: str) -> dict[str, Any]:
    """The config of an installed package's method: its name and defaults; only the name if it cannot be used."""
    try:
        return {"name": name, **_defaults(name)}
    except UserError:
        return {"name": name}


def _defaults(name: str) -> dict[str, Any]:
    """{setting: default} in a config's syntax, `turns` included; a `seed` is the run's. Raises UserError."""
    defaults: dict[str, Any] = {}
    for key, default in settings_of(by_name(name)).items():
        written = MISSING_VALUE if default is MISSING else default
        try:
            OmegaConf.create({key: written})
        except OmegaConfBaseException as error:
            raise UserError(
                f"method {name!r} has the default {default!r} of {key!r}: expected a number, text, true, false, null, "
                "or a list or mapping of these"
            ) from error
        defaults[key] = "${seed}" if key == "seed" else written
    return defaults | {"turns": "continue"}


# ------------------------------------------------------------------------------------------------------- command line


def check_arguments(arguments: Sequence[str], schema: type[RunConfig] = RunConfig) -> None:
    """Refuse a command line with an unknown key, an unusable method or an unusable launcher. Raises UserError.

    arguments: the command line without the program's name. `+compare.NAME={...}` adds a method to an experiment.
    """
    check_launcher(arguments)
    methods = [
        name
        for argument in arguments
        if argument.startswith("method=")
        for name in argument.partition("=")[2].split(",")
    ]
    for name in methods:
        if name in known():
            _defaults(name)  # of an installed package's method that cannot be used, Hydra would call the keys unknown
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise one_line(error) from error
    for override in parsed:
        _check_key(override.key_or_group, methods or ["lazy"], schema)


def _check_key(key: str, methods: Sequence[str], schema: type[RunConfig]) -> None:
    """Refuse a key that neither the schema nor one of the methods has."""
    if key.startswith(("hydra/", "hydra.", *(f"{name}." for name in _OPEN))):
        return
    top, _, below = key.partition(".")
    of_method = top == "method" and bool(below)
    if of_method and not set(methods) <= set(known()):
        return  # an unusable method, refused elsewhere
    if of_method:
        settings = (setting for name in methods for setting in settings_of(by_name(name)))
        choices = ["name", *dict.fromkeys(settings), "turns"]
        listed, where, key = choices[1:], f" of method {' or '.join(methods)}", below
    else:
        choices = [*_GROUPS, *_keys_of(schema())]
        listed, where = [choice for choice in choices if "." not in choice], ""
    if key in choices:
        return
    near = [choice for choice in choices if choice.startswith(key)] or difflib.get_close_matches(key, choices, 1)
    hint = f"did you mean {near[0]}? Known" if near else "known"
    raise UserError(f"unknown key {key}{where}: {hint} are {', '.join(dict.fromkeys(listed)) or 'none'}")


def _keys_of(node: Any) -> Iterator[str]:
    """The dotted keys of a config's dataclass."""
    for item in fields(node):
        value = getattr(node, item.name)
        yield item.name
        if is_dataclass(value):
            yield from (f"{item.name}.{key}" for key in _keys_of(value))


def check_launcher(arguments: Sequence[str]) -> None:
    """Refuse a launcher that is not installed, and Hydra's own keys without a sweep. Raises UserError.

    arguments: the command line without the program's name.
    """
    sweep = {"-m", "--multirun", "--cfg", "-c", "--info", "-i"} & set(arguments)
    for argument in arguments:
        key, _, launcher = argument.partition("=")
        if key == "hydra/launcher" and launcher in LAUNCHERS:
            package, extra = LAUNCHERS[launcher]
            try:
                version(package)
            except PackageNotFoundError as error:
                raise UserError(
                    f"hydra/launcher={launcher} needs the package {package}: run pip install --editable '.[{extra}]' "
                    "in the repository's folder"
                ) from error
        if key.startswith(("hydra/", "hydra.")) and launcher != "basic" and not sweep:
            raise UserError(f"{argument} configures the jobs of a sweep: give -m too")


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """The config of one run: the defaults in conf with the overrides. Raises UserError."""
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise one_line(error) from error


def jobs_of(arguments: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a run or a sweep. Raises UserError for arguments that neither takes."""
    register_schema()
    overrides = [
        word for word in arguments if not word.startswith(("hydra/", "hydra.")) and word not in ("-m", "--multirun")
    ]
    check_arguments(overrides)
    parser = OverridesParser.create()
    try:
        parsed = parser.parse_overrides(overrides)
        fixed = [override.input_line or "" for override in parsed if not override.is_sweep_override()]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            swept = compose("config", fixed, return_hydra_config=True).hydra.sweeper.params or {}  # an experiment's
        overrides = [*(f"{key}={value}" for key, value in swept.items()), *overrides]
        (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(overrides), None)
    except HydraException as error:
        raise one_line(error) from error
    return jobs


def one_line(error: Exception) -> UserError:
    """Hydra's or OmegaConf's error as one short message."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        near = difflib.get_close_matches(name, error.options, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        return UserError(f"{group}={name}: {hint}expected one of {', '.join(error.options)}")
    added = re.search(r"To append to your config use \+(.+)", str(error))
    if added:
        return UserError(f"{added[1]}: expected +{added[1]}, as it adds to the settings")
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()]
    lines = [line for line in lines if line and not line.startswith(("full_key:", "object_type=", "reference_type="))]
    message = ": ".join(dict.fromkeys(lines[:2])).removeprefix("Error merging override ")
    if message.partition("at input '")[2].startswith(("{'", '{"')):
        message = f"the keys of a mapping take no quotes, as in {{2: 0.5}}: {message}"
    return UserError(message)


# ------------------------------------------------------------------------------------------------------------- checks


def to_run_config(config: DictConfig) -> RunConfig:
    """The composed config as plain dataclasses, with allowed values (`resolve` checks the rest). Raises UserError."""
    try:
        plain = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        value = "FOLDER_OR_HUB_ID" if error.full_key == "model.name" else "VALUE"
        raise UserError(
            f"{error.full_key} has no default: give it on the command line, {error.full_key}={value}"
        ) from error
    assert isinstance(plain, RunConfig)
    one_run = not plain.compare or plain.only is not None
    choices = {
        "data.on_error": ("raise", "skip"),
        "half": (None, *HALVES),
        "fidelity": (None, "answer"),
        "tracker.name": TRACKERS,
        "tracker.mode": TRACKER_MODES,
        "model.paper": (None, "llama2", "xgen"),
        "only": (None, *plain.compare),
    }
    for key, known_values in choices.items():
        value = OmegaConf.select(config, key)
        _require(value in known_values, key, value, " or ".join(str(known or "null") for known in known_values))
    for key, least in (*((key, 0) for key in _MAY_BE_0), *((key, 1) for key in _COUNTS)):
        value = OmegaConf.select(config, key)
        _require(value is None or value >= least, key, value, f"{least} or more{', or null' if least else ''}")
    _require(plain.fidelity is None or plain.timing.paired, "fidelity", plain.fidelity, "timing.paired=true with it")
    _require(plain.out is None or one_run, "out", plain.out, "no out= with compare, as each run has its own folder")
    _require(plain.shard is None or one_run, "shard", plain.shard, "only=LABEL with it, as it divides one run")
    if plain.shard is not None:
        parse_shard(plain.shard)
    folder = plain.data.dir
    _require(folder is None or Path(folder).is_dir(), "data.dir", folder, "an existing folder")
    methods = OmegaConf.to_yaml(OmegaConf.masked_copy(config, ["method", "compare"]))  # interpolations unresolved
    for key in ("speedup", "draft"):
        value, reference = getattr(plain, key), f"${{{key}}}"
        expected = f"experiment=field with it, or a method with {reference}: none here has it"
        _require(value is None or reference in methods, key, value, expected)
    return plain


def _require(holds: bool, key: str, value: Any, expected: str) -> None:
    if not holds:
        raise UserError(f"{key}={value}: expected {expected}")
