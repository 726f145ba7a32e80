"""From a command line to a run's settings: Hydra, and every check that needs neither torch nor a model."""

import difflib
import json
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import MISSING
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import MISSING as MISSING_VALUE
from omegaconf import DictConfig, ListConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eval.benchmarks import SUITES
from eval.benchmarks.datasets import CHOICES, register_configs
from eval.benchmarks.own import described
from eval.benchmarks.subsets import SUBSETS
from eval.run.settings import RunConfig, documented
from eval.run.targets import Target
from lazyllm.errors import UserError, nearest, require
from lazyllm.methods import by_name, is_file, known, name_of, settings_of
from lazyllm.presets import PRESETS

CONF = Path(__file__).resolve().parents[1] / "conf"  # a link to the folder at the top level; a wheel holds it here

# Launcher -> (the plugin's package, the extra of pyproject.toml that installs it)
LAUNCHERS = {
    "joblib": ("hydra-joblib-launcher", "joblib"),
    "ray": ("hydra-ray-launcher", "ray"),
    "submitit_local": ("hydra-submitit-launcher", "slurm"),
    "submitit_slurm": ("hydra-submitit-launcher", "slurm"),
}
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}  # environment; W&B reports even if offline

# The begins of lines of Hydra's errors that help nobody here
_NOT_FOR_PEOPLE = ("full_key:", "object_type=", "reference_type=", "See https://hydra", "To append to your config", "^")
# Hydra's options, which --hydra-help describes
_OPTIONS = (
    "-m", "--multirun", "-h", "--help", "--hydra-help", "-c", "--cfg", "--resolve", "-p", "--package", "-i", "--info",
    "--version", "-sc", "--shell-completion",
)  # fmt: skip
_COUNTS = ("limit", "max_new_tokens", "threads", "batch_size", "model.max_prompt_tokens")
_MAY_BE_0 = ("warmup", "trace", "model.thinking_tokens", "seed")

# The files in conf/hydra/launcher have the names of the plugins' configs, and Hydra checks them against these
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


def _help(schema: Any) -> str:
    """The text of `--help`: every setting, its default and its meaning. Those of groups (`model.name`) come last."""
    rows = sorted(documented(schema), key=lambda row: "." in row[0])
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
    register_configs()
    for name, description in read_described().items():
        store(group="dataset", name=name, node={name: description})
    for name, node in model_nodes().items():
        store(group="model", name=name, node=node)
    for name in known():
        try:
            defaults = _defaults(name)
        except UserError:
            defaults = {}
        if (CONF / "method" / f"{name}.yaml").is_file():  # which includes them
            store(group="method/settings", name=name, node=defaults)
        else:
            store(group="method", name=name, node={"name": name, **defaults})


def read_described() -> dict[str, dict[str, Any]]:
    """Return {name: description} of the datasets in files of conf/dataset that describe several."""
    files = [described(file) for file in (CONF / "dataset").glob("*.yaml")]
    return {name: description for content in files if len(content) > 1 for name, description in content.items()}


def prompt_limit(positions: int) -> int:
    """LongBench's limit for prompts of a model with N positions (its model2maxlen.json); the others are for answers."""
    known = {4096: 3500, 8192: 7500, 16_384: 15_500, 32_768: 31_500}
    return known.get(positions) or max(positions // 2, (positions - 596) // 500 * 500)


def model_nodes() -> dict[str, dict[str, Any]]:
    """The config of each preset without a file in conf/model; all of these are chat models."""
    return {
        name: {
            "name": name,
            "max_prompt_tokens": prompt_limit(preset.architecture["max_position_embeddings"]),
            "chat": "auto",
        }
        for name, preset in PRESETS.items()
        if preset.architecture is not None and not (CONF / "model" / f"{name}.yaml").is_file()
    }


def _defaults(name: str) -> dict[str, Any]:
    """{setting: default} in a config's syntax, with the run's `seed`, and `seeds`."""
    defaults: dict[str, Any] = {}
    for key, default in settings_of(by_name(name)).items():
        written = MISSING_VALUE if default is MISSING else default
        try:
            OmegaConf.create({key: written})
        except OmegaConfBaseException as error:
            expected = "a number, text, true, false, null, or a list or mapping of these"
            raise UserError(f"method {name!r} has the default {default!r} of {key!r}: expected {expected}") from error
        defaults[key] = "${seed}" if key == "seed" else written
    return defaults | ({"seeds": None} if "seed" in defaults else {})


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse unknown options, a launcher that is not installed, and Hydra's own keys without a sweep.

    arguments: the command line without the program's name.
    """
    sweep = {"-m", "--multirun", "--cfg", "-c", "--info", "-i"} & set(arguments)
    for argument in arguments:
        if argument.startswith("-") and argument not in _OPTIONS:
            raise UserError(f"{argument}: expected KEY=VALUE, such as limit=3; --help lists all keys")
        key, _, value = argument.partition("=")
        if key in ("method", "model") and value.startswith("["):
            several = {"method": f"compare={value}", "model": f"-m model={value.strip('[]')}"}[key]
            raise UserError(f"{argument}: expected one {key}; {several} takes several")
        if key == "hydra/launcher" and value in LAUNCHERS:
            package, extra = LAUNCHERS[value]
            try:
                version(package)
            except PackageNotFoundError as error:
                needs = f"needs the package {package}: pip install --editable '.[{extra}]' in the repository"
                raise UserError(f"{argument} {needs}") from error
        if key.startswith(("hydra/", "hydra.")) and value != "basic" and not sweep:
            raise UserError(f"{argument} configures the jobs of a sweep: give -m too")


def prepared(arguments: Sequence[str], schema: type[RunConfig] = RunConfig) -> list[str]:
    """Hydra's arguments, checked. Registers the schema and the files of `dataset` and `method`."""
    register_schema(schema)
    check_arguments(arguments)
    return _with_own_files(_with_own_model(arguments))


def _with_own_model(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `model=PRESET` or `model=custom` for a `model.name` alone: `tiny`'s settings are not its."""
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    if "model" in given or "model.name" not in given:
        return [*arguments]
    names = [_unquoted(name) for name in given["model.name"].split(",")]
    if not PRESETS.keys() >= {*names}:
        return ["model=custom", *arguments]
    return [argument for argument in arguments if not argument.startswith("model.name=")] + [f"model={','.join(names)}"]


def _unquoted(text: str) -> str:
    """A value without the quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _with_own_files(arguments: Sequence[str]) -> list[str]:
    """The arguments with names that Hydra knows for `dataset=FILE.yaml` and `method=FILE.py`."""
    named, files = list[str](), dict[tuple[str, str], Path]()
    for argument in arguments:
        key, _, value = argument.partition("=")
        choices = value.split(",") if key in ("dataset", "method") else []
        for number, quoted in enumerate(choices):
            choice = _unquoted(quoted)
            file = Path(choice)
            if key == "dataset" and file.suffix in (".yaml", ".yml"):
                name, node = file.stem, described(file)  # Hydra reads a name without its suffix
            elif key == "method" and is_file(choice):
                name, node = file.name, {"name": choice, **_defaults(choice)}
            else:
                continue
            first = files.setdefault((key, name), file)
            require(first == file, key, file, f"another name than that of {first}, as a sweep tells them by name")
            choices[number] = json.dumps(name, ensure_ascii=False)  # quoted, for any letters and signs
            ConfigStore.instance().store(group=key, name=name, node=node)
        named.append(f"{key}={','.join(choices)}" if choices else argument)
    return named


def names() -> str:
    """What `run` knows by name, for `--list`."""
    groups: dict[str, set[str]] = {
        "model": {*PRESETS},
        "dataset": {*CHOICES, *read_described()},
        "method": {*known()},
        "experiment": set(),
    }
    files = {group: {file.stem for file in (CONF / group).glob("*.yaml")} for group in groups}
    return "\n".join(
        textwrap.fill(f"{group}=  {', '.join(sorted(words | files[group]))}", 120) for group, words in groups.items()
    )


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """The config of one run: the defaults in conf with the overrides."""
    others, whole = without_whole_arms(overrides)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return with_whole_arms(compose("config", others), others, whole)
    except (HydraException, OmegaConfBaseException) as error:
        raise one_line(error) from error
    except UserError:
        raise
    except (ValueError, TypeError) as error:  # Hydra's, of a group's choice that is no name
        raise UserError(f"{' '.join(overrides)}: {error}") from error


def without_whole_arms(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(overrides for Hydra, those that give arms as a whole: a list, or a mapping, which Hydra would merge)."""
    whole = [override for override in overrides if _gives_whole_arms(override)]
    return [override for override in overrides if override not in whole], whole


def _gives_whole_arms(override: str) -> bool:
    key = override.lstrip("+").partition("=")[0]
    if key != "compare" and not key.startswith("compare."):
        return False
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:  # which Hydra then raises
        return False
    return not parsed.is_sweep_override() and isinstance(parsed.value(), dict if "." in key else dict | list)


def with_whole_arms(config: DictConfig, overrides: Sequence[str], whole: Sequence[str]) -> DictConfig:
    """The composed config with arms in the place of an experiment's. Raises UserError for a `method` that none reads.

    overrides, whole: of `without_whole_arms`.
    """
    given = {one.key_or_group: one for one in OverridesParser.create().parse_overrides([*overrides, *whole])}
    for one in OverridesParser.create().parse_overrides([*whole]):
        OmegaConf.update(config, one.key_or_group, one.value(), merge=False, force_add=True)
    of_method = next((key for key in given if key.partition(".")[0] == "method"), None)
    if of_method is None or config.compare is None or "${method" in OmegaConf.to_yaml(config.compare):
        return config
    experiment, arms = given.get("experiment"), [str(arm) for arm in config.compare]
    by = f"compare={given['compare'].get_value_element_as_str()}" if "compare" in given else ""
    by = by or f"experiment={experiment.value() if experiment is not None else ''}"
    written = given[of_method].get_value_element_as_str()
    if of_method != "method":
        instead = f"'compare.LABEL.{of_method.removeprefix('method.')}={written}' changes one of its arms"
    elif isinstance(config.compare, ListConfig):
        instead = f"give compare=[{','.join([*arms, written])}]"
    else:
        label = name_of(written.strip("\"'"))
        instead = f"'+compare.{label}{'_2' if label in arms else ''}={{name: {written}}}' adds an arm"
    raise UserError(f"{of_method}={written}: {by} has arms of its own, which do not read it: {instead}")


def run_config(arguments: Sequence[str]) -> RunConfig:
    """The settings of `lazyllm-bench run ARGUMENTS`, one run. Raises UserError for keys and values that cannot be."""
    return to_run_config(compose_config(prepared(arguments)))


def one_line(error: Exception) -> UserError:
    """Hydra's or OmegaConf's error in one line, with the name that may have been meant."""
    missing = re.match(r"((?:hydra/)?\w+)/(.*)", str(getattr(error, "missing_cfg_file", "")))
    group, name = missing.groups() if missing is not None else ("", "")
    options = getattr(error, "options", None) or (CHOICES if group == "dataset" else ())  # Hydra has none of a list
    if options:
        if group == "model" and "/" in name:
            return UserError(f"model={name}: expected a preset's name, or model.name={name}")
        return UserError(f"{group}={name}: {nearest(name, options)}")
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()]
    lines = [line for line in lines if line not in ("", "None") and not line.startswith(_NOT_FOR_PEOPLE)]
    first, *others = (line.rstrip(".:") for line in dict.fromkeys(lines))
    message = ": ".join(filter(None, [first, "; ".join(others)]))
    message = message.replace("LexerNoViableAltException: ", "cannot read ")
    unknown = re.match(r"(?:Could not override|Key) '([^']+)'", message)
    if unknown is not None and unknown[1].startswith("method."):
        message += f" (lazyllm-bench methods lists those of each method; a sweep over methods takes +{unknown[1]})"
    elif unknown is not None:
        keys = [part for key, _, _ in documented(RunConfig()) for part in (key, key.partition(".")[0])]
        near = difflib.get_close_matches(unknown[1], {"method", "dataset", "experiment", *keys}, 1)
        message += f" ({f'did you mean {near[0]}? ' if near else ''}--help lists all keys)"
    if "missing EQUAL" in message:
        message += " (expected KEY=VALUE, such as limit=3)"
    elif isinstance(error, OverrideParseException):
        message += (
            " (a value with special signs takes quotes, for the shell too: KEY='\"VALUE\"'; a mapping's key none)"
        )
    return UserError(message)


def to_run_config(config: DictConfig) -> RunConfig:
    """The composed config as dataclasses with allowed values; `ask` and `prepare` check what takes more to know."""
    try:
        # into the schema again, as `++` adds any key
        schema = OmegaConf.structured(OmegaConf.get_type(config))
        plain = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.to_container(config)))
    except MissingMandatoryValue as error:
        value = "FOLDER_OR_HUB_ID" if error.full_key == "model.name" else "VALUE"
        raise UserError(
            f"{error.full_key} has no default: give it on the command line, {error.full_key}={value}"
        ) from error
    except OmegaConfBaseException as error:  # a reference to no setting, for example
        raise one_line(error) from error
    assert isinstance(plain, RunConfig)
    choices = {
        "data.on_error": ("raise", "skip"),
        "subset": (*SUBSETS, *(name for suite in SUITES.values() for name in suite.subsets)),
        "fidelity": (None, "answer"),
        "tracker.name": ("none", "wandb"),
        "tracker.mode": ("online", "offline", "disabled"),
        "model.paper": (None, "llama2", "xgen"),
    }
    for key, known_values in choices.items():
        value = OmegaConf.select(config, key)
        shown = " or ".join(json.dumps(known).strip('"') for known in known_values)
        require(repr(value) in map(repr, known_values), key, value, shown)  # 1 is not true
    for key in (*_MAY_BE_0, *_COUNTS):
        value, least = OmegaConf.select(config, key), 0 if key in _MAY_BE_0 else 1
        expected = f"{least} or more{', or null' if key in _COUNTS else ''}"
        require(value is None or value >= least, key, value, expected)
    require((plain.threads or 1) <= 1024, "threads", plain.threads, "at most 1024")  # OpenMP ends the process
    require(plain.seed < 2**63, "seed", plain.seed, "less than 2^63")  # as torch does
    require(plain.fidelity is None or plain.baseline, "fidelity", plain.fidelity, "baseline=true with it")
    folder = plain.data.dir
    require(folder is None or Path(folder).is_dir(), "data.dir", folder, "an existing folder")
    require(plain.out != "", "out", plain.out, "a folder, or null")
    is_target = plain.speedup is None or Target.parse(plain.speedup) is not None
    require(is_target, "speedup", plain.speedup, "a number and x, such as 2x")
    return plain
