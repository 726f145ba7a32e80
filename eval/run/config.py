"""A run's settings: the schema, and every check that needs neither torch nor a model."""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING as MISSING_VALUE
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eval.benchmarks.chat_format import TODAY
from eval.benchmarks.datasets import SuiteSettings, register_configs
from eval.benchmarks.subsets import HALVES, parse_shard
from eval.benchmarks.suite import setting
from lazyllm.errors import UserError, require
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
DEFAULT_LABEL = "comparison"  # of an experiment without a label
# A method that is a server, compared with the one at model.url. On the command line, its settings take the place of the
# model's, and `name` is the model's name there; in `compare` and in a run's identity, `name` is "server" as of any
# method, and `model` is the model's name.
SERVER = "server"
SERVER_SETTINGS = ("name", "url", "kind", "extra_body", "label")
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}  # environment; W&B reports even if offline
SERVER_KINDS = ("vllm", "sglang", "llama.cpp", "transformers", "plain")

# Config groups whose choice is an argument, and keys whose subkeys the schema leaves open
_GROUPS = ("model", "method", "dataset", "tracker", "experiment")
_COUNTS = ("limit", "sample", "max_new_tokens", "threads", "turns", "answers.rows", "model.max_prompt_tokens")
_MAY_BE_0 = ("timing.warmup", "trace", "model.thinking_tokens", "seed")
_OPEN = ("dataset", "compare", "model.device_map", "model.chat_args", "model.extra_body", "method.extra_body")

# A part of OmegaConf's message about a value of another type -> what was expected
_EXPECTED = {
    "to Integer": "a whole number", "to Float": "a number", "valid bool": "true or false", "Optional": "not null",
    "ListConfig": "a list, such as [1, 2]", "type hint": "a mapping in it, such as {mine: {name: lazy}}",
    "Dict[": "a mapping, such as {key: value}",
}  # fmt: skip

# The files in conf/hydra/launcher have the names of the plugins' configs, and Hydra checks them against these
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


@dataclass
class ModelConfig:
    """The model, and the format of its prompts (`ModelSpec`, `ChatFormat`)."""

    name: str = setting(MISSING_VALUE, "a preset, a folder or a hub id")
    load_format: str = setting("auto", "`dummy` builds random weights and downloads nothing, for timing")
    dtype: str = setting("bfloat16", "`bfloat16`, `float32` (`tiny`, `coder`), `float16`, `float64`")
    device: str = setting("auto", "`cpu`, `cuda`, `cuda:1`, ...; `auto` takes an accelerator if there is one")
    revision: str | None = setting(None, "branch, tag or commit of a hub id; `null`: the newest")
    tokenizer: str | None = setting(None, "folder or hub id of another tokenizer; `null`: the model's")
    attn_implementation: str = setting("sdpa", "`sdpa`, `eager`, `flash_attention_2`")
    quantise: str | None = setting(
        None, "`int8`, `int4`, `bnb_int8`, `bnb_nf4` round linear weights while loading (extra `[quantised]`)"
    )
    device_map: Any = setting(
        None, "`auto` spreads the layers over all GPUs, then the host's memory (extra `[devices]`); or {module: device}"
    )
    max_prompt_tokens: int | None = setting(
        None, "longer prompts lose their middle, as in LongBench; `null`: LongBench's share of the model's positions"
    )
    chat: str | None = setting(
        "none", "`llama2`, `xgen`, `auto` (the tokenizer's template), `none`; `null`: `auto` if there is a template"
    )
    chat_args: Any = setting(None, "arguments of the template, such as `{enable_thinking: true}`")
    system: str | None = setting(None, "a system message before the prompt")
    today: str = setting(TODAY, "the date, for templates that write one into the prompt")
    thinking_tokens: int = setting(0, "extra tokens for thinking; the text after `</think>` is scored")
    paper: str | None = setting(None, "the column of the paper's tables to compare with: `llama2`, `xgen`")
    url: str | None = setting(None, "of a server with the model, such as `http://127.0.0.1:8000/v1`")
    kind: str | None = setting(
        None, "the server: `vllm`, `sglang`, `llama.cpp`, `transformers`, `plain`; `null`: it is asked"
    )
    api: str = setting("completions", "`chat` for a server without `/v1/completions`, which then applies its template")
    extra_body: dict[str, Any] = setting({}, "further fields of each request to the server")
    cache: str = setting("cold", "`warm` asks the server twice and times the second request")
    trust_prompt: bool = setting(False, "accept a server whose count of prompt tokens differs from ours")
    key_env: str = setting("OPENAI_API_KEY", "the environment variable that holds the server's key")
    timeout_s: float = setting(600.0, "seconds for a server's whole answer")


@dataclass
class DataConfig:
    """Files of rows."""

    dir: str | None = setting(
        None,
        "folder with LongBench's `<dataset>.jsonl` and `config/*.json`, LongBench v2's `data.json` and "
        "`prompts/0shot.txt`, RULER's `constants.py` and `synthetic.yaml`, or SCBench's `<task>.jsonl` and "
        "`eval_utils.py`; `null` fetches them once",
    )
    on_error: str = setting("raise", "`skip` leaves out invalid rows, and reports their number")


@dataclass
class TimingConfig:
    """Which runs are timed."""

    paired: Any = setting(
        True,
        "also run the baseline on every example, in alternation; `ttft`: only up to its first token, the rest is in "
        "its own run (`method=baseline`); `false`: not at all",
    )
    warmup: int = setting(5, "warm-up runs of each before the first example")


@dataclass
class AnswersConfig:
    """How answers are generated after their first tokens."""

    rows: int | None = setting(
        None,
        "answers that decode together, after TTFT was measured alone; 1 also times every step; `null`: as many as fit "
        "into a GPU's memory, up to 8, and 1 on a CPU",
    )


@dataclass
class LoadConfig:
    """The load on a server."""

    concurrency: int = setting(1, "requests at once, each sent when another has ended")
    rate: float | None = setting(None, "requests per second instead, at random times (Poisson)")
    ttft_limit_s: float | None = setting(None, "goodput counts answers with at most this TTFT")
    tpot_limit_s: float | None = setting(None, "and at most this time per later token")

    @property
    def is_shared(self) -> bool:
        """Whether a server answers several requests at once."""
        return self.concurrency > 1 or self.rate is not None


@dataclass
class TrackerConfig:
    """Weights & Biases."""

    name: str = setting("none", "`wandb`")
    project: str = setting("lazyllm-bench", "W&B's project")
    entity: str | None = setting(None, "W&B's user or team; `null`: the key's owner")
    group: str | None = setting(None, "W&B's group; `null`: the experiment's label")
    mode: str = setting("offline", "`offline` writes to `<run folder>/wandb`; `online` needs a key")
    tags: list[str] = setting([], "W&B's tags")


@dataclass
class RunConfig(SuiteSettings):
    """All settings of a run, those of each suite under its name. A method's own are the fields of its class."""

    model: ModelConfig = field(default_factory=ModelConfig)
    method: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, bool] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    control: bool = setting(False, "also measure the baseline beside itself: how much answers and times vary by chance")
    limit: int | None = setting(
        None, "the first N examples of each dataset; `null`: all (`dataset=embedded`: 12; `stdlib`: 24; `ruler`: 500)"
    )
    spread: str | None = setting(
        None,
        "`length`: `limit` takes N examples of each dataset, spread over its lengths, the same for everyone",
    )
    max_new_tokens: int | None = setting(None, "shorter answers than the dataset allows, for a quick look")
    seed: int = setting(0, "of random weights, of `sample`, and the default of methods with a `seed`")
    threads: int | None = setting(None, "CPU threads; `null`: torch's choice (`tiny`, `coder`: 1)")
    out: str | None = setting(None, "the run's folder; `null`: `runs/<model>-<method>-<data>-<fingerprint>`")
    sample: int | None = setting(None, "N examples at random (seeded), after `dataset`, `limit` and `half`")
    half: str | None = setting(
        None, "`tuning` or `held-out`: the half of the examples, after `limit`, for searching schedules, or the other"
    )
    turns: int | None = setting(
        None, "questions asked of each row, in turns of one conversation; `null`: all that a row has (`embedded`: 1)"
    )
    trace: int = setting(0, "keep each layer's importance and selection for the first N examples of each dataset")
    fidelity: str | None = setting(
        None, "`answer`: also feed the baseline's answer and the gold one to the method and the baseline; not timed"
    )
    evidence: bool = setting(True, "record which tokens of the evidence each layer computes, for rows that name it")
    only: str | None = setting(None, "the label of the only method of `compare` to run; a sweep makes a job of each")
    speedup: str | None = setting(
        None, "the ideal TTFT speedup at which `experiment=field` and `turns` compare methods, such as `2x`"
    )
    draft: str | None = setting(
        None,
        "another model, by folder, hub id or preset: SpecPrefill's in `experiment=field`, the scorer in `compression`",
    )
    compare: dict[str, dict[str, Any]] = setting(
        {}, "several methods in one table, instead of `method`: `+compare={label: {name: lazy, schedule: paper}, ...}`"
    )
    label: str = setting(DEFAULT_LABEL, "the comparison's name, and its files' in `runs/`")
    shard: str | None = setting(None, "`i/n`: the i-th (from 1) of n jobs that share the run's examples")


def documented(schema: Any) -> list[tuple[str, str, str]]:
    """(key, default, description) of every setting with a description, in the schema's order. schema: an instance."""
    rows = []
    for item in fields(schema):
        value = getattr(schema, item.name)
        if is_dataclass(value):
            rows += [(f"{item.name}.{key}", *rest) for key, *rest in documented(value)]
        elif "text" in item.metadata:
            default = "" if value == MISSING_VALUE else "null" if value is None else str(value)
            rows.append((item.name, default.lower() if isinstance(value, bool) else default, item.metadata["text"]))
    return rows


def _help(schema: Any) -> str:
    """The text of `--help`: every setting, its default and its meaning."""
    rows = documented(schema)
    width = max(len(f"{key}={default}") for key, default, _ in rows)
    return "\n".join(f"{f'{key}={default}':<{width}}  {text}" for key, default, text in rows).replace("`", "")


def register_schema(schema: type[RunConfig] = RunConfig) -> None:
    """Register the schema with Hydra, which then refuses unknown keys and values of another type.

    Also registers `${keys:${compare}}`, the labels of a mapping as a sweep's choices, `${settings:}`, the text of
    `--help`, and the defaults of each method, installed packages' included. A method that cannot be used is refused
    only if it is chosen (`check_arguments`).
    """
    OmegaConf.register_new_resolver("keys", lambda mapping: ",".join(mapping), replace=True)
    OmegaConf.register_new_resolver("settings", lambda: _help(schema()), replace=True)
    store = ConfigStore.instance().store
    store(name="schema", node=schema)
    store(group="method", name=SERVER, node=dict.fromkeys(SERVER_SETTINGS))
    register_configs()
    for name, node in model_nodes().items():
        store(group="model", name=name, node=node)
    for name in known():
        try:
            defaults = _defaults(name)
        except UserError:
            defaults = {}
        if name in METHODS:  # for its file in conf/method
            store(group="method/settings", name=name, node=defaults)
        else:
            store(group="method", name=name, node={"name": name, **defaults})


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
    options, after = get_args_parser().parse_known_args(list(arguments))
    parser = OverridesParser.create()
    for argument in [*after, *options.overrides]:
        if argument.startswith("-"):
            raise UserError(f"{argument}: expected KEY=VALUE, such as limit=3; --help lists all keys")
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            key, equals, value = argument.partition("=")
            if not equals:
                raise UserError(f"{argument}: expected KEY=VALUE") from error
            if value and any(sign in str(error) for sign in ("token recognition error", "expecting <EOF>")):
                raise UserError(f"{argument}: quote the value, for the shell too: '{key}=\"{value}\"'") from error
            raise UserError(f"{argument}: {one_line(error)}") from error
        _check_key(override.key_or_group, methods or ["lazy"], schema)
        value = override.value()
        named = value if isinstance(value, list) else [value]
        is_odd = not named or any(isinstance(name, int | float | None) for name in named)
        if override.key_or_group in _GROUPS and "=" in argument and is_odd:
            raise UserError(f"{argument}: expected a name, or a list of names")


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
        choices = [*_GROUPS, *(name for name, _, _ in documented(schema()))]
        listed, where = [choice.partition(".")[0] for choice in choices], ""
    if key in (*choices, *listed):
        return
    near = [choice for choice in choices if choice.startswith(key)] or difflib.get_close_matches(key, choices, 1)
    hint = f"did you mean {near[0]}? Known" if near else "known"
    raise UserError(f"unknown key {key}{where}: {hint} are {', '.join(dict.fromkeys(listed)) or 'none'}")


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
    in_sweep = GlobalHydra.instance().is_initialized()  # it composes from the same folder
    try:
        with nullcontext() if in_sweep else initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise one_line(error) from error


def model_arguments(name: str) -> list[str]:
    """The arguments that choose a model by `model.name`: a preset, or a folder or hub id."""
    return [f"model={name}"] if name in PRESETS else ["model=custom", f"model.name={name}"]


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
        if group.startswith("model/"):
            path = f"{group.removeprefix('model/')}/{name}"
            return UserError(f"model={path}: expected a preset's name, or model=custom model.name={path}")
        near = difflib.get_close_matches(name, error.options, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        return UserError(f"{group}={name}: {hint}expected one of {', '.join(error.options)}")
    if added := re.search(r"To append to your config use \+(.+)", str(error)):
        with_it = "dataset=all " if added[1].startswith("dataset.") else "+"
        return UserError(f"{added[1]}: expected {with_it}{added[1]}")
    if several := re.match("Ambiguous value for argument '(.+)'", str(error)):
        return UserError(f"{several[1]}: expected -m too, for a sweep, or a list, [A,B]")
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()]
    lines = [line for line in lines if line not in ("", "None") and not line.startswith(("full_key:", "object_type="))]
    message = ": ".join(dict.fromkeys(lines[:2])).removeprefix("Error merging override ")
    for told, expected in _EXPECTED.items() if len(lines) > 1 else ():
        if told in lines[1]:
            return UserError(f"{lines[0].removeprefix('Error merging override ')}: expected {expected}")
    if message.partition("at input '")[2].startswith(("{'", '{"')):
        return UserError("the keys of a mapping take no quotes, as in {2: 0.5}")
    return UserError(message)


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
    if plain.method.keys() == set(SERVER_SETTINGS):
        given = {key: value for key, value in plain.method.items() if value is not None}
        named = {"model": given.pop("name")} if "name" in given else {}
        plain.method = {"name": SERVER, **named, **given}
    one_run = not plain.compare or plain.only is not None
    choices = {
        "data.on_error": ("raise", "skip"),
        "half": (None, *HALVES),
        "spread": (None, "length"),
        "fidelity": (None, "answer"),
        "timing.paired": (True, "ttft", False),
        "tracker.name": ("none", "wandb"),
        "tracker.mode": ("online", "offline", "disabled"),
        "model.paper": (None, "llama2", "xgen"),
        "only": (None, *plain.compare),
        "model.kind": (None, *SERVER_KINDS),
        "model.api": ("completions", "chat"),
        "model.cache": ("cold", "warm"),
    }
    require(plain.only is None or bool(plain.compare), "only", plain.only, "an experiment or compare with it")
    for key, known_values in choices.items():
        value = OmegaConf.select(config, key)
        shown = " or ".join(json.dumps(known).strip('"') for known in known_values)
        require(repr(value) in map(repr, known_values), key, value, shown)  # 1 is not true
    for key in (*_MAY_BE_0, "load.concurrency", *_COUNTS):
        value, least = OmegaConf.select(config, key), 0 if key in _MAY_BE_0 else 1
        expected = f"{least} or more{', or null' if key in _COUNTS else ''}"
        require(value is None or value >= least, key, value, expected)
    require(plain.fidelity is None or plain.timing.paired is True, "fidelity", plain.fidelity, "timing.paired=true")
    require(plain.spread is None or plain.limit is not None, "spread", plain.spread, "limit=50 or so with it")
    require(plain.out is None or one_run, "out", plain.out, "no out= with compare, as each run has its own folder")
    require(plain.shard is None or one_run, "shard", plain.shard, "only=LABEL with it, as it divides one run")
    if plain.shard is not None:
        parse_shard(plain.shard)
    folder = plain.data.dir
    require(folder is None or Path(folder).is_dir(), "data.dir", folder, "an existing folder")
    methods = OmegaConf.to_yaml(OmegaConf.masked_copy(config, ["method", "compare"]))  # interpolations unresolved
    for key in ("speedup", "draft"):
        value, reference = getattr(plain, key), f"${{{key}}}"
        expected = f"experiment=field with it, or a method with {reference}: none here has it"
        require(value is None or reference in methods, key, value, expected)
    return plain
