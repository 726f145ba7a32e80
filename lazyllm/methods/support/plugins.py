"""Methods that other installed packages add, through the entry point group `lazyllm.methods`.

In such a package's pyproject.toml:

    [project.entry-points."lazyllm.methods"]
    keep_last = "my_package.keep_last:KeepLast"

Importing lazyllm looks nothing up, and a package is imported only when its method is used.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from lazyllm.engine.method import Method
from lazyllm.errors import UserError

GROUP = "lazyllm.methods"


@dataclass(frozen=True)
class Plugin:
    """A method that an installed package adds.

    name: the method's name. package, version: the distribution's. target: its class, `module:Class`.
    """

    name: str
    package: str
    version: str
    target: str

    def load(self) -> type[Method]:
        """The method's class. Raises UserError if the package is broken, or the class is not a method."""
        what = f"method {self.name!r} of the package {self.package} {self.version} ({self.target})"
        try:
            kind = EntryPoint(self.name, self.target, GROUP).load()
        except Exception as error:  # importing another package can raise anything
            raise UserError(f"{what} could not be loaded: {type(error).__name__}: {error}") from error
        if not (isinstance(kind, type) and issubclass(kind, Method) and is_dataclass(kind)):
            raise UserError(f"{what} is not a method: expected a dataclass derived from lazyllm.methods.Method")
        return kind

    def code(self) -> str:
        """Package, version and shortened SHA-256 of the sources: two versions of the method's code differ in it.

        The sources are the whole package that holds the class: a method may use its other files.
        Raises UserError as `load` does.
        """
        digest = hashlib.sha256()
        for name, content in _sources(self.load().__module__):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return f"{self.package} {self.version} {digest.hexdigest()[:16]}"


@cache
def installed() -> dict[str, tuple[Plugin, ...]]:
    """{name: the methods of that name}, looked up once a process. Two of one name are refused when used."""
    plugins: dict[str, tuple[Plugin, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        assert point.dist is not None  # None only in entry points made by hand
        plugin = Plugin(point.name, point.dist.name, point.dist.version, point.value)
        plugins[plugin.name] = (*plugins.get(plugin.name, ()), plugin)
    return plugins


def only(name: str, plugins: tuple[Plugin, ...], built_in: Iterable[str]) -> Plugin | None:
    """The only plugin of that name; None if there is none. Raises UserError if the name is taken twice."""
    packages = " and ".join(sorted({plugin.package for plugin in plugins}))
    if plugins and name in built_in:
        raise UserError(
            f"method {name!r} is lazyllm's own, and the package {packages} adds one of the same name: "
            "give that one another name in its entry points, or uninstall the package"
        )
    if len(plugins) > 1:
        raise UserError(f"method {name!r} is added more than once, by {packages}: uninstall one of them")
    return plugins[0] if plugins else None


def _sources(module_name: str) -> list[tuple[str, bytes]]:
    """(name, content) of every source file of the outermost package with an `__init__.py`, or of a single module.

    A namespace package above it belongs to other distributions too.
    """
    parts = module_name.split(".")
    files = [getattr(sys.modules.get(".".join(parts[:end])), "__file__", None) for end in range(1, len(parts) + 1)]
    outermost = Path(next(file for file in files if file))
    if outermost.name != "__init__.py":
        return [(outermost.name, outermost.read_bytes())]
    folder = outermost.parent
    return [(file.relative_to(folder).as_posix(), file.read_bytes()) for file in sorted(folder.rglob("*.py"))]
