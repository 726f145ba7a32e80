"""A package with its own methods, as another author would write it, really installed.

Its `keep_last` is the worked example of `lazyllm.methods.Prune`'s docstring, word for word.
"""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

from lazyllm.methods import Prune

_PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "own-methods"
version = "{version}"

[project.entry-points."lazyllm.methods"]
keep_last = "own_methods.keep_last:KeepLast"
draws_lots = "own_methods.others:DrawsLots"
drafted = "own_methods.others:Drafted"
breaks_at_import = "own_methods.broken:Anything"
is_no_method = "own_methods.others:IsNoMethod"
odd_default = "own_methods.others:OddDefault"
lazy = "own_methods.keep_last:KeepLast"

[tool.setuptools]
packages = ["own_methods"]
"""
_OTHERS = """
from dataclasses import dataclass, field
from pathlib import Path

from lazyllm.methods import Baseline
from lazyllm.spec import ModelSpec


@dataclass(frozen=True)
class DrawsLots(Baseline):
    layers: list = field(default_factory=lambda: [1, 2])
    seed: int = 7


@dataclass(frozen=True)
class Drafted(Baseline):
    draft: str

    def models(self):
        return (ModelSpec(self.draft),)


@dataclass(frozen=True)
class OddDefault(Baseline):
    folder: object = object()


class IsNoMethod:
    pass
"""


def example() -> str:
    """The source of the classes in the docstring's example."""
    parts = [example.source for example in doctest.DocTestParser().get_examples(Prune.__doc__ or "")]
    return "\n".join(parts[: next(number for number, part in enumerate(parts) if "load_model" in part)])


def install_own_package(folder: Path, version: str = "0.1", helper: str = "") -> Path:
    """Build the package below `folder` and install it with pip. Returns the folder for the module path.

    helper: the content of a second module, next to the methods'.
    """
    source, target = folder / f"source-{version}", folder / f"installed-{version}"
    package = source / "own_methods"
    package.mkdir(parents=True)
    (source / "pyproject.toml").write_text(_PYPROJECT.format(version=version))
    (package / "__init__.py").write_text("")
    (package / "keep_last.py").write_text(example())
    (package / "others.py").write_text(_OTHERS)
    (package / "helper.py").write_text(helper)
    (package / "broken.py").write_text("import a_package_that_nobody_has\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
         "--no-build-isolation", "--target", str(target), str(source)],
        check=True,
    )  # fmt: skip
    return target
