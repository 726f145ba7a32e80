"""The methods, one file each, whose name is the method's; `lazyllm.methods.Lazy` is its class.

A new method needs a file here, and a row in `tests/lazyllm/methods/method_matrix.py`. `make` and
`by_name` also know those of installed packages and of a user's files (`support.plugins`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from lazyllm.engine.depth import Depth as Depth
from lazyllm.engine.inputs import ScoreSpec as ScoreSpec
from lazyllm.engine.method import Method
from lazyllm.errors import UserError, nearest, place_of, reason_of
from lazyllm.methods.support import plugins
from lazyllm.methods.support.bases import Prune as Prune
from lazyllm.methods.support.bases import Select as Select
from lazyllm.methods.support.bases import Sparse as Sparse


def _methods() -> dict[str, type[Method]]:
    """Find the method of each module: the class in it that has a label."""
    names = [module.name for module in iter_modules(__path__)]
    return {
        name: kind
        for name in names
        if name not in ("support", "__main__")
        for kind in vars(import_module(f"{__name__}.{name}")).values()
        if getattr(kind, "__module__", "") == f"{__name__}.{name}" and "label" in vars(kind)
    }


METHODS = _methods()
_BY_CLASS = {kind.__name__: kind for kind in METHODS.values()}


def __getattr__(name: str) -> Any:
    """Give the class of a method: `lazyllm.methods.Lazy`."""
    if name not in _BY_CLASS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _BY_CLASS[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_BY_CLASS})


def known() -> list[str]:
    """List the names of all methods: lazyllm's, then those that installed packages add."""
    return [*METHODS, *sorted(plugins.installed().names - METHODS.keys())]


def by_name(name: str) -> type[Method]:
    """Find a class, of lazyllm, of an installed package, or of a file: a path that ends in `.py`.

    Raises UserError for an unknown name, a name that is taken twice, or a broken package or file.
    """
    if is_file(name):
        if name_of(name) in known():
            raise UserError(
                f"method={name}: a method {name_of(name)!r} is there already: give the file "
                "another name"
            )
        return plugins.in_file(name)
    point = plugins.only(name, METHODS)
    if point is not None:
        return plugins.load(point)
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}: {nearest(name, known())}")
    return METHODS[name]


def is_file(name: str) -> bool:
    """Say whether `name` is the path of a user's Python file that holds a method."""
    return name.endswith(".py")


def name_of(name: str) -> str:
    """Name a method in tables and records; a file's without folders and `.py`."""
    return Path(name).stem if is_file(name) else name


def code_of(name: str) -> str | None:
    """Make a text that changes with a package's or file's code; None for lazyllm's methods."""
    if is_file(name):
        return plugins.digest([Path(name).read_bytes()])
    point = plugins.only(name, METHODS)
    return None if point is None else plugins.code(point)


def settings_of(kind: type[Method]) -> dict[str, Any]:
    """List {hyperparameter: default, or `dataclasses.MISSING`}; keyword-only ones come last."""
    every = sorted(fields(kind), key=lambda field: field.kw_only)  # type: ignore[arg-type]
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in every
        if field.init
    }


@contextmanager
def about_the_method(what: str = "method") -> Iterator[None]:
    """Turn all errors of a method's code into UserError. what: how the message begins."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:  # a fault of its code, perhaps a user's
        raise UserError(f"{what}: {reason_of(error)} ({place_of(error)})") from error


def make(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """Make a method of its name and hyperparameters: `make("lazy", {"schedule": {9: 0.7}})`.

    Raises UserError as `by_name`, and for a setting that is unknown, missing or refused.
    """
    settings, kind = dict(settings or {}), by_name(name)
    has = settings_of(kind)
    for key in settings:
        if key not in has:
            names = ", ".join(has) or "none at all"
            raise UserError(f"method {name!r} has no setting {key!r}; it has {names}")
    for key, default in has.items():
        if default is MISSING and key not in settings:
            raise UserError(f"method {name!r} needs {key}=...; its settings are {', '.join(has)}")
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"method {name!r}: {error}") from error
