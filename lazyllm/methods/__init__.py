"""The methods, one file each, whose name is the method's.

A new method needs a file, its class here, and a row in `tests/lazyllm/methods/method_matrix.py`. `make` and `by_name`
also know those of installed packages and of a user's files (`lazyllm.methods.support.plugins`).
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from lazyllm.engine.depth import Depth as Depth
from lazyllm.engine.inputs import ScoreSpec as ScoreSpec
from lazyllm.engine.method import Method
from lazyllm.errors import UserError, nearest, place_of, reason_of
from lazyllm.methods.asl import ASL
from lazyllm.methods.baseline import Baseline
from lazyllm.methods.claa import CLAA
from lazyllm.methods.fastkv import FastKV
from lazyllm.methods.gemfilter import GemFilter
from lazyllm.methods.lazy import Lazy
from lazyllm.methods.prompt_compression import PromptCompression
from lazyllm.methods.promptdistill import PromptDistill
from lazyllm.methods.pyramidinfer import PyramidInfer
from lazyllm.methods.random_drop import RandomDrop
from lazyllm.methods.specprefill import SpecPrefill
from lazyllm.methods.static_pruning import StaticPruning
from lazyllm.methods.support import plugins
from lazyllm.methods.support.bases import Prune as Prune
from lazyllm.methods.support.bases import Select as Select
from lazyllm.methods.support.bases import Sparse as Sparse
from lazyllm.methods.trianglemix import TriangleMix
from lazyllm.methods.uniprefill import UniPrefill

METHODS: dict[str, type[Method]] = {
    kind.__module__.rpartition(".")[2]: kind
    for kind in (
        ASL, Baseline, CLAA, FastKV, GemFilter, Lazy, PromptCompression, PromptDistill, PyramidInfer, RandomDrop,
        SpecPrefill, StaticPruning, TriangleMix, UniPrefill,
    )
}  # fmt: skip


def known() -> list[str]:
    """The names of all methods: lazyllm's own, then those that installed packages add."""
    return [*METHODS, *sorted(plugins.installed().names - METHODS.keys())]


def by_name(name: str) -> type[Method]:
    """The method's class, of lazyllm, of an installed package, or of a file: a path that ends in `.py`.

    Raises UserError for an unknown name, a name that is taken twice, or a broken package or file.
    """
    if is_file(name):
        if name_of(name) in known():
            raise UserError(f"method={name}: a method {name_of(name)!r} is there already: give the file another name")
        return plugins.in_file(name)
    point = plugins.only(name, METHODS)
    if point is not None:
        return plugins.load(point)
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}: {nearest(name, known())}")
    return METHODS[name]


def is_file(name: str) -> bool:
    """Whether `name` is the path of a user's Python file that holds a method."""
    return name.endswith(".py")


def name_of(name: str) -> str:
    """A method's name in tables and records; for a file, its name without folders and `.py`."""
    return Path(name).stem if is_file(name) else name


def code_of(name: str) -> str | None:
    """A text that changes with the code of a method from a package or file; None for lazyllm's own methods."""
    if is_file(name):
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]
    point = plugins.only(name, METHODS)
    return None if point is None else plugins.code(point)


def settings_of(kind: type[Method]) -> dict[str, Any]:
    """{hyperparameter: default, or `dataclasses.MISSING`}; keyword-only ones, which bases declare, come last."""
    settings = {}
    for field in sorted(fields(kind), key=lambda field: field.kw_only):  # type: ignore[arg-type]  # it is a dataclass
        if field.init:
            settings[field.name] = field.default if field.default_factory is MISSING else field.default_factory()
    return settings


@contextmanager
def about_the_method(what: str = "method") -> Iterator[None]:
    """Turn all errors of a method's code, perhaps a user's own, into UserError. what: how the message begins."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:  # a fault of its code
        raise UserError(f"{what}: {reason_of(error)} ({place_of(error)})") from error


def make(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """A method from its name and hyperparameters: `make("lazy", {"schedule": {9: 0.7}})`.

    Raises UserError as `by_name`, and for a setting that is unknown, missing or refused by the method.
    """
    settings, kind = dict(settings or {}), by_name(name)
    has = settings_of(kind)
    for key in settings:
        if key not in has:
            raise UserError(f"method {name!r} has no setting {key!r}; it has {', '.join(has) or 'none at all'}")
    for key, default in has.items():
        if default is MISSING and key not in settings:
            raise UserError(f"method {name!r} needs {key}=...; its settings are {', '.join(has)}")
        if isinstance(default, bool) and not isinstance(settings.get(key, default), bool):  # a word would be true
            raise UserError(f"method {name!r}: {key}={settings[key]}: give true or false")
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"method {name!r}: {error}") from error
