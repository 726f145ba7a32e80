"""Turn a command line into a run's settings: Hydra composes them, `eval.config` checks them.

Nothing here needs torch.
"""

import difflib
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import MISSING as NO_DEFAULT
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from eval.benchmarks.datasets import CHOICES, shipped_descriptions
from eval.config import Config, RunConfig, documented, validated
from eval.settings import Settings
from lazyllm.errors import UserError, nearest
from lazyllm.methods import METHODS, by_name, is_file, known, settings_of
from lazyllm.presets import PRESETS, is_sizes

# a link to the folder at the top level; a wheel holds it here
CONF = Path(__file__).resolve().parent / "conf"

# Launcher -> (the plugin's package, the extra of pyproject.toml that installs it)
LAUNCHERS = {
    "joblib": ("hydra-joblib-launcher", "joblib"),
    "ray": ("hydra-ray-launcher", "ray"),
    "submitit_local": ("hydra-submitit-launcher", "slurm"),
    "submitit_slurm": ("hydra-submitit-launcher", "slurm"),
}

# Lines of Hydra's errors that begin so are left out, as they help nobody here
_NOT_FOR_PEOPLE = (
    "full_key:", "object_type=", "reference_type=", "See https://hydra", "To append to your config",
    "^",
)  # fmt: skip
# Hydra's options, which --hydra-help describes
_OPTIONS = (
    "-m", "--multirun", "-h", "--help", "--hydra-help", "-c", "--cfg", "--resolve", "-p",
    "--package", "-i", "--info",
    "--version", "-sc", "--shell-completion",
)  # fmt: skip

# The files in conf/hydra/launcher have the names of the plugins' configs, and Hydra checks them
# against these
warnings.filterwarnings(
    "ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema"
)


def register(arguments: Sequence[str], kind: type[Settings] = RunConfig) -> None:
    """Give Hydra the settings' defaults, the texts of `--help`, and a choice for each method,
    preset and given path.

    `method=NAME` chooses the method's hyperparameters with their defaults. A method that cannot be
    used is refused only if it is chosen.
    """
    OmegaConf.register_new_resolver("names", names, replace=True)
    OmegaConf.register_new_resolver("settings", lambda: _help(kind), replace=True)
    ConfigStore.instance().store(name="settings", node=_defaults(kind))
    for name in PRESETS:
        _store("model", name, {"name": name})
    for name in known():
        try:
            _store("method", name, _method(name))
        except UserError:
            _store("method", name, {"name": name})
    for key, value in _choices(arguments):
        if key == "model" and _names_a_model(value):
            _store("model", value, {"name": value})
        elif key == "method" and is_file(value):
            _store("method", value, _method(value))


def _store(group: str, name: str, node: dict[str, Any]) -> None:
    """Add a choice to a group, unless a file in conf is it. name: may be a path."""
    if (CONF / group / f"{name}.yaml").is_file():
        return
    *folders, last = filter(None, name.split("/"))  # Hydra reads a path as folders of configs
    ConfigStore.instance().store(
        group="/".join([group, *folders]), name=last, node=node, package=group
    )


def _choices(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (group, choice) of each model and method that the arguments choose, also in sweeps."""
    for argument in arguments:
        if not argument.startswith(("model=", "method=")):
            continue
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:  # which Hydra then raises
            continue
        values = (
            [*override.sweep_iterator()] if override.is_sweep_override() else [override.value()]
        )
        for value in values:
            text = value.text if isinstance(value, QuotedString) else str(value)
            yield override.key_or_group, _unquoted(text)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _names_a_model(value: str) -> bool:
    return "/" in value or is_sizes(value) or Path(value).exists()


def _method(name: str) -> dict[str, Any]:
    """Make what `method=NAME` chooses: an arm's keys, with the hyperparameters' defaults."""
    defaults = settings_of(by_name(name))
    node: dict[str, Any] = {"name": name, "label": None, "speedup": None}
    for key, default in defaults.items():
        written = NO_DEFAULT if default is MISSING else default
        try:
            OmegaConf.create({key: written})
        except OmegaConfBaseException as error:
            expected = "a number, text, true, false, null, or a list or mapping of these"
            raise UserError(
                f"method {name!r} has the default {default!r} of {key!r}: expected {expected}"
            ) from error
        node[key] = None if key == "seed" else written
    return node | ({"seeds": None} if "seed" in defaults else {})


def _defaults(kind: type[Settings]) -> dict[str, Any]:
    """Collect the settings' defaults in nested dictionaries; None stands for no default."""
    node = dict[str, Any]()
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            node[name] = _defaults(field.annotation)
        else:
            node[name] = None if field.is_required() else field.default
    return node | ({"arms": None, "dataset": None} if "arms" in node else {})


def _help(kind: type[Settings]) -> str:
    """Write the text of `--help`: every setting, its default and its meaning.

    Settings of groups (`model.dtype`) come last.
    """
    rows = sorted(documented(kind), key=lambda row: "." in row[0])
    width = max(len(f"{key}={default}") for key, default, _ in rows)
    return "\n".join(
        f"{f'{key}={default}':<{width}}  {text}" for key, default, text in rows
    ).replace("`", "")


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse unknown options, missing launchers, and Hydra's own keys without a sweep.

    arguments: the command line without the program's name.
    """
    sweep = {"-m", "--multirun", "--cfg", "-c", "--info", "-i"} & set(arguments)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if argument.startswith("-") and argument not in _OPTIONS:
            raise UserError(
                f"{argument}: expected KEY=VALUE, such as limit=3; --help lists all keys"
            )
        if key in ("method", "model") and value.startswith("["):
            several = {"method": f"arms={value}", "model": f"-m model={value.strip('[]')}"}[key]
            raise UserError(f"{argument}: expected one {key}; {several} takes several")
        if key == "model.name":
            raise UserError(
                f"{argument}: give model={value}, which may be a preset, a folder, a file or a hub "
                "id"
            )
        if re.match(r"\+*arms\.\d+", key) and value.startswith("{"):
            raise UserError(
                f"{argument}: a mapping would be merged into what the arm has: give all arms, "
                "arms=[...], or keys one by one, such as arms.0.schedule=4:0.5"
            )
        if key == "hydra/launcher" and value in LAUNCHERS:
            package, extra = LAUNCHERS[value]
            try:
                version(package)
            except PackageNotFoundError as error:
                needs = (
                    f"needs the package {package}: pip install --editable '.[{extra}]' in the "
                    "repository"
                )
                raise UserError(f"{argument} {needs}") from error
        if key.startswith(("hydra/", "hydra.")) and value != "basic" and not sweep:
            raise UserError(f"{argument} configures the jobs of a sweep: give -m too")


def read(arguments: Sequence[str], kind: type[Config] = RunConfig) -> Config:
    """Read the settings of one run. Raises UserError for wrong keys and values."""
    check_arguments(arguments)
    register(arguments, kind)
    return to_settings(compose_config(arguments, kind), kind)


def compose_config(arguments: Sequence[str], kind: type[Settings] = RunConfig) -> DictConfig:
    """Let Hydra compose the files in conf and the arguments of one run. Raises UserError."""
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", [*arguments])
    except (HydraException, OmegaConfBaseException) as error:
        raise one_line(error, kind) from error
    except UserError:
        raise
    except (ValueError, TypeError) as error:  # Hydra's, of a group's choice that is no name
        raise UserError(f"{' '.join(arguments)}: {error}") from error


def to_settings(config: DictConfig, kind: type[Config] = RunConfig) -> Config:
    """Turn the composed config into checked settings. Raises UserError."""
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:  # a reference to no setting, for example
        raise one_line(error) from error
    for key in OmegaConf.missing_keys(
        config
    ):  # a hyperparameter without a default, which a speedup may solve for
        if key.startswith("method."):
            del values["method"][key.removeprefix("method.")]
    return validated({key: value for key, value in values.items() if key != "hydra"}, kind)


def names() -> str:
    """List what `run` knows by name, for `--list` and `--help`."""
    groups: dict[str, set[str]] = {
        "model": {*PRESETS},
        "dataset": {*CHOICES, *shipped_descriptions()},
        "method": {*known()},
        "experiment": set(),
    }
    files = {group: {file.stem for file in (CONF / group).glob("*.yaml")} for group in groups}
    lines = (
        f"{group}=  {', '.join(sorted(words | files[group]))}" for group, words in groups.items()
    )
    return "\n".join(textwrap.fill(line, 120) for line in lines)


def one_line(error: Exception, kind: type[Settings] = RunConfig) -> UserError:
    """Turn Hydra's or OmegaConf's error into one line, with a name that may have been meant."""
    missing = re.match(r"((?:hydra/)?\w+)/(.*)", str(getattr(error, "missing_cfg_file", "")))
    if missing is not None:
        group, name = missing.groups()
        options = (
            {"model": PRESETS, "method": known()}.get(group)
            or getattr(error, "options", None)
            or ()
        )
        return UserError(f"{group}={name}: {nearest(name, options)}")
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()]
    lines = [
        line for line in lines if line not in ("", "None") and not line.startswith(_NOT_FOR_PEOPLE)
    ]
    first, *others = (line.rstrip(".:") for line in dict.fromkeys(lines))
    message = ": ".join(filter(None, [first, "; ".join(others)]))
    message = message.replace("LexerNoViableAltException: ", "cannot read ")
    unknown = re.match(r"Could not override '([^']+)'", message)
    if unknown is not None:
        message = f"{unknown[1]}: no such setting{_hint(unknown[1], kind)}"
    elif "missing EQUAL" in message:
        message = f"{getattr(error, 'override', message)}: expected KEY=VALUE, such as limit=3"
    elif isinstance(error, OverrideParseException):
        message = (
            f"{error.override}: {message} (quote a value with special signs, also for the shell: "
            "KEY='\"VALUE\"'; do not quote the keys of a mapping)"
        )
    elif isinstance(error, InterpolationKeyError):
        message = f"{error.full_key}: {message}"
    return UserError(message)


def _hint(key: str, kind: type[Settings]) -> str:
    """Suggest what may have been meant by an unknown key."""
    group = key.partition(".")[0]
    if group == "method":
        keys = {f"method.{name}" for kind in METHODS.values() for name in settings_of(kind)}
        near = difflib.get_close_matches(key, keys, 1)
        meant = f"did you mean {near[0]}? " if near and key not in keys else ""
        lists = "lazyllm-bench methods lists each one's hyperparameters"
        return f": {meant}method=NAME chooses a method; {lists}"
    if group == "arms":
        return f": +{key}=... adds it to an arm of an experiment, and arms=[...] gives all arms"
    keys = [part for name, _, _ in documented(kind) for part in (name, name.partition(".")[0])]
    near = difflib.get_close_matches(key, {"method", "experiment", *keys}, 1)
    return f": {f'did you mean {near[0]}? ' if near else ''}--help lists all"
