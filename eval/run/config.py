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
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING as MISSING_VALUE
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eval.benchmarks.chat_format import TODAY
from eval.benchmarks.datasets import SuiteSettings, register_configs
from eval.benchmarks.subsets import SPLITS, SUBSETS, parse_shard
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
# The name of an arm's method that is a server, and its settings: `server.*` and `model.name`, unless they differ
SERVER = "server"
SERVER_SETTINGS = ("model", "url", "kind", "extra_body")
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}  # environment; W&B reports even if offline
SERVER_KINDS = ("vllm", "sglang", "llama.cpp", "transformers", "plain")

# The begins of lines of Hydra's errors that help nobody here
_NOT_FOR_PEOPLE = ("full_key:", "object_type=", "reference_type=", "See https://hydra.cc", "To append to your config")
# Hydra's options, which --hydra-help describes
_OPTIONS = (
    "-m", "--multirun", "-h", "--help", "--hydra-help", "-c", "--cfg", "--resolve", "-p", "--package", "-i", "--info",
    "--version",
)  # fmt: skip
_COUNTS = ("limit", "max_new_tokens", "threads", "turns", "batch_size", "model.max_prompt_tokens")
_MAY_BE_0 = ("warmup", "trace", "model.thinking_tokens", "seed")

# The files in conf/hydra/launcher have the names of the plugins' configs, and Hydra checks them against these
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


@dataclass
class ModelConfig:
    """The model, and the format of its prompts (`ModelSpec`, `ChatFormat`)."""

    name: str = setting(MISSING_VALUE, "a preset, a folder or a hub id; of a server's model, its name there")
    load_format: str = setting("auto", "`dummy` builds random weights and downloads nothing, for timing")
    dtype: str = setting("bfloat16", "`bfloat16`, `float32` (`tiny`, `coder`), `float16`, `float64`")
    device: str = setting("auto", "`cpu`, `cuda`, `cuda:1`, ...; `auto` takes an accelerator if there is one")
    revision: str | None = setting(None, "branch, tag or commit of a hub id; `null`: the newest")
    tokenizer: str | None = setting(None, "folder or hub id of another tokenizer; `null`: the model's")
    attn_implementation: str = setting("sdpa", "`sdpa`, `eager`, `flash_attention_2`")
    sdpa_backend: str = setting(
        "auto", "of `sdpa` on a GPU: `flash`, `cudnn` (prefill only), `efficient`, `math`; `auto`: the card's fastest"
    )
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
class ServerConfig:
    """The server that answers, instead of a model in this process."""

    url: str | None = setting(None, "of a server with the model, such as `http://127.0.0.1:8000/v1`")
    kind: str | None = setting(
        None, "its software: `vllm`, `sglang`, `llama.cpp`, `transformers`, `plain`; `null`: it is asked"
    )
    api: str = setting("completions", "`chat` for a server without `/v1/completions`, which then applies its template")
    extra_body: dict[str, Any] = setting({}, "further fields of each request")
    cache: str = setting("cold", "`warm` asks twice and times the second request")
    allow_token_mismatch: bool = setting(False, "accept a server whose count of prompt tokens differs from ours")
    api_key_env: str = setting("OPENAI_API_KEY", "the environment variable that holds the server's key")
    timeout_s: float = setting(600.0, "seconds for a whole answer")


@dataclass
class LoadConfig:
    """The load on a server."""

    concurrency: int = setting(1, "requests at once, each sent when another has ended")
    rate: float | None = setting(None, "requests per second instead, at random times (Poisson)")

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
    group: str | None = setting(None, "W&B's group; `null`: the name of the run's folder")
    mode: str = setting("offline", "`offline` writes to `<run folder>/wandb`; `online` needs a key")
    tags: list[str] = setting([], "W&B's tags")


@dataclass
class RunConfig(SuiteSettings):
    """All settings of a run, those of each suite under its name. A method's own are the fields of its class."""

    model: ModelConfig = field(default_factory=ModelConfig)
    method: dict[str, Any] = field(default_factory=dict)
    compare: Any = setting(
        None,
        "several arms instead of `method`: `compare=[lazy,fastkv]`, or `compare={label: {name: lazy, schedule: "
        "paper}, ...}`; a list of values, or `seeds: 5`, makes an arm of each",
    )
    baseline: bool = setting(True, "also measure the standard model on every example, among the arms")
    aa_test: bool = setting(
        False, "also measure the baseline once more, as an arm: how much answers and times vary by chance"
    )
    dataset: dict[str, bool] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    limit: int | None = setting(
        None, "N examples of each dataset; `null`: all (embedded: 12; `stdlib`: 24; `ruler`: 500)"
    )
    subset: str = setting(
        "first", "which N: `first`, `random` (by `seed`), or `by_length`, spread over the dataset's lengths"
    )
    split: str | None = setting(
        None, "`dev` or `test`: half of each dataset, for searching settings, or the other; `limit` counts in it"
    )
    turns: int | None = setting(
        None, "questions asked of each row, in turns of one conversation; `null`: all that a row has (`embedded`: 1)"
    )
    max_new_tokens: int | None = setting(None, "shorter answers than the dataset allows, for a quick look")
    shard: str | None = setting(None, "`i/n`: the i-th (from 1) of n jobs that share the run's examples")
    batch_size: int | None = setting(
        None,
        "answers that decode together, after TTFT was measured alone; 1 also times every step; `null`: as many as fit "
        "into a GPU's memory, up to 8, and 1 on a CPU",
    )
    warmup: int = setting(5, "warm-up runs of each arm before the first example")
    seed: int = setting(0, "of random weights, of random subsets, and the default of methods with a `seed`")
    threads: int | None = setting(None, "CPU threads; `null`: torch's choice (`tiny`, `coder`: 1)")
    out: str | None = setting(None, "the run's folder; `null`: `runs/<model>-<method or label>-<data>-<fingerprint>`")
    trace: int = setting(0, "keep each layer's importance and selection for the first N examples of each dataset")
    fidelity: str | None = setting(
        None, "`answer`: also feed the baseline's answer and the gold one to every arm; not timed"
    )
    evidence: bool = setting(True, "record which tokens of the evidence each layer computes, for rows that name it")
    speedup: str | None = setting(
        None, "the ideal TTFT speedup at which `experiment=field` and `turns` compare methods, such as `2x`"
    )
    draft: str | None = setting(
        None,
        "another model, by folder, hub id or preset: SpecPrefill's in `experiment=field`, the scorer in `compression`",
    )
    label: str | None = setting(None, "the comparison's name, in titles and folders")
    server: ServerConfig = field(default_factory=ServerConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


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

    Also registers `${settings:}`, the text of `--help`, and the defaults of each method, installed packages' included.
    A method that cannot be used is refused only if it is chosen.
    """
    OmegaConf.register_new_resolver("settings", lambda: _help(schema()), replace=True)
    store = ConfigStore.instance().store
    store(name="schema", node=schema)
    store(group="method", name=SERVER, node={"name": SERVER, **dict.fromkeys(SERVER_SETTINGS)})
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
    """{setting: default} in a config's syntax, `turns` included; a `seed` is the run's, `seeds` a number of them.

    Raises UserError.
    """
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
    return defaults | {"turns": "continue"} | ({"seeds": None} if "seed" in defaults else {})


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse unknown options, a launcher that is not installed, and Hydra's own keys without a sweep.

    arguments: the command line without the program's name. Raises UserError.
    """
    sweep = {"-m", "--multirun", "--cfg", "-c", "--info", "-i"} & set(arguments)
    for argument in arguments:
        if argument.startswith("-") and argument not in _OPTIONS:
            raise UserError(f"{argument}: expected KEY=VALUE, such as limit=3; --help lists all keys")
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
    except (ValueError, TypeError) as error:  # Hydra's, of a group's choice that is no name
        raise UserError(f"{' '.join(overrides)}: {error}") from error


def run_config(arguments: Sequence[str], schema: type[RunConfig] = RunConfig) -> RunConfig:
    """The settings of `lazyllm-bench run ARGUMENTS`, one run. Raises UserError."""
    register_schema(schema)
    check_arguments(arguments)
    return to_run_config(compose_config(arguments))


def model_arguments(name: str) -> list[str]:
    """The arguments that choose a model by `model.name`: a preset, or a folder or hub id."""
    return [f"model={name}"] if name in PRESETS else ["model=custom", f"model.name={name}"]


def one_line(error: Exception) -> UserError:
    """Hydra's or OmegaConf's error in one line, with the name that may have been meant."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group.startswith("model/"):
            path = f"{group.removeprefix('model/')}/{name}"
            return UserError(f"model={path}: expected a preset's name, or model=custom model.name={path}")
        near = difflib.get_close_matches(name, error.options, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        return UserError(f"{group}={name}: {hint}expected one of {', '.join(error.options)}")
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()]
    lines = [line for line in lines if line not in ("", "None") and not line.startswith(_NOT_FOR_PEOPLE)]
    message = ": ".join(line.rstrip(".") for line in dict.fromkeys(lines))
    if unknown := re.match(r"Could not override '([^']+)'", message):
        key, hint = unknown[1], "--help lists all keys"
        if key.startswith("method."):
            hint = "lazyllm-bench methods lists the settings of each method"
        else:
            keys = [known for known, _, _ in documented(RunConfig())]
            near = difflib.get_close_matches(
                key, dict.fromkeys([*keys, *(known.partition(".")[0] for known in keys)]), 1
            )
            hint = f"did you mean {near[0]}? {hint}" if near else hint
        message += f" ({hint})"
    if isinstance(error, OverrideParseException):
        message += (
            " (a value with special signs takes quotes, for the shell too: KEY='\"VALUE\"'; a mapping's key none)"
        )
    return UserError(message)


def _check_known(settings: Any, group: str = "") -> None:
    """Refuse keys that `++` has added to the schema. Raises UserError."""
    known = {item.name for item in fields(settings)}
    for key, value in vars(settings).items():
        if key not in known:
            raise UserError(f"unknown key {group}{key}: --help lists all keys")
        if is_dataclass(value):
            _check_known(value, f"{group}{key}.")


def to_run_config(config: DictConfig) -> RunConfig:
    """The composed config as plain dataclasses, with allowed values (`eval.run.run.Run` checks the rest).

    Raises UserError.
    """
    try:
        plain = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        value = "FOLDER_OR_HUB_ID" if error.full_key == "model.name" else "VALUE"
        raise UserError(
            f"{error.full_key} has no default: give it on the command line, {error.full_key}={value}"
        ) from error
    except OmegaConfBaseException as error:  # a reference to no setting, for example
        raise one_line(error) from error
    assert isinstance(plain, RunConfig)
    _check_known(plain)
    choices = {
        "data.on_error": ("raise", "skip"),
        "subset": SUBSETS,
        "split": (None, *SPLITS),
        "fidelity": (None, "answer"),
        "tracker.name": ("none", "wandb"),
        "tracker.mode": ("online", "offline", "disabled"),
        "model.paper": (None, "llama2", "xgen"),
        "server.kind": (None, *SERVER_KINDS),
        "server.api": ("completions", "chat"),
        "server.cache": ("cold", "warm"),
    }
    for key, known_values in choices.items():
        value = OmegaConf.select(config, key)
        shown = " or ".join(json.dumps(known).strip('"') for known in known_values)
        require(repr(value) in map(repr, known_values), key, value, shown)  # 1 is not true
    for key in (*_MAY_BE_0, "load.concurrency", *_COUNTS):
        value, least = OmegaConf.select(config, key), 0 if key in _MAY_BE_0 else 1
        expected = f"{least} or more{', or null' if key in _COUNTS else ''}"
        require(value is None or value >= least, key, value, expected)
    require(plain.fidelity is None or plain.baseline, "fidelity", plain.fidelity, "baseline=true with it")
    require(not plain.aa_test or plain.baseline, "aa_test", "true", "baseline=true with it")
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
