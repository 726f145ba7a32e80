"""Methods of users: in a Python file, `my_method.py`, or in an installed package.

A package adds them through the entry point group `lazyllm.methods`, in its pyproject.toml:

    [project.entry-points."lazyllm.methods"]
    keep_last = "my_package.keep_last:KeepLast"

Importing lazyllm looks nothing up, and a package is imported only when its method is used.
"""

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from lazyllm.engine.method import Method
from lazyllm.errors import UserError, place_of, reason_of

GROUP = "lazyllm.methods"


@cache
def installed() -> EntryPoints:
    """Look all installed methods up, once per process."""
    return entry_points(group=GROUP)


def only(name: str, built_in: Iterable[str]) -> EntryPoint | None:
    """Find the only installed method of that name, if any. Raises UserError if it is not."""
    points: Any = tuple(installed().select(name=name))
    packages = " and ".join(sorted({point.dist.name for point in points}))
    if points and name in built_in:
        raise UserError(
            f"method {name!r} is lazyllm's own, and the package {packages} adds one of the same "
            "name: give that one another name in its entry points, or uninstall the package"
        )
    if len(points) > 1:
        raise UserError(
            f"method {name!r} is added more than once, by {packages}: uninstall one of them"
        )
    return points[0] if points else None


def load(point: EntryPoint) -> type[Method]:
    """Import a method's class. Raises UserError if that fails, or if it is not a method."""
    package: Any = point.dist
    what = f"method {point.name!r} of the package {package.name} {package.version} ({point.value})"
    try:
        kind = point.load()
    except Exception as error:  # importing another package can raise anything
        raise UserError(f"{what} could not be loaded: {reason_of(error)}") from error
    return _checked(kind, what)


@cache
def in_file(path: str) -> type[Method]:
    """Import the only method that a Python file defines. Raises UserError for none, or for more."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"method={path}: no such file")
    module_name = f"method_file_{file.stem}"
    spec: Any = spec_from_file_location(module_name, file)
    # where `dataclass` looks for annotations
    module = sys.modules[module_name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file can raise anything
        place = place_of(error, spec.origin)
        raise UserError(
            f"method={path} could not be loaded: {reason_of(error)} ({place})"
        ) from error
    methods = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module_name and issubclass(kind, Method)
    ]
    if len(methods) != 1:
        names = ", ".join(kind.__name__ for kind in methods) or "none"
        raise UserError(
            f"method={path}: expected one class derived from lazyllm.methods.Method in it, found "
            f"{names}"
        )
    return _checked(methods[0], f"method={path}: {methods[0].__name__}")


def _checked(kind: Any, what: str) -> type[Method]:
    if not (isinstance(kind, type) and issubclass(kind, Method) and is_dataclass(kind)):
        raise UserError(
            f"{what} is not a method: expected a dataclass derived from lazyllm.methods.Method"
        )
    if "__dataclass_params__" not in vars(kind):  # its base is one, which knows no fields of it
        raise UserError(f"{what} is no dataclass itself: write @dataclass(frozen=True) above it")
    return kind


def digest(parts: Iterable[bytes]) -> str:
    """Shorten the SHA-256 of some bytes."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def code(point: EntryPoint) -> str:
    """Name the package, its version and a digest of its sources. Raises as `load`.

    The sources are the whole package that holds the class, as a method may use its other files.
    """
    package: Any = point.dist
    files = _sources(load(point).__module__)
    sources = (f"{name}\0{len(content)}\0".encode() + content for name, content in files)
    return f"{package.name} {package.version} {digest(sources)}"


def _sources(module_name: str) -> list[tuple[str, bytes]]:
    """Read (name, content) of all files of the outermost package, or of a single module."""
    parts = module_name.split(".")
    names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    files = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    outermost = Path(next(file for file in files if file))
    if outermost.name != "__init__.py":
        return [(outermost.name, outermost.read_bytes())]
    folder = outermost.parent
    return [
        (file.relative_to(folder).as_posix(), file.read_bytes())
        for file in sorted(folder.rglob("*.py"))
    ]
