"""A package with its own methods, as another author would write it, in the files that pip installs.

Its `keep_last` is the worked example of `lazyllm.methods.Prune`'s docstring, word for word.
"""

from __future__ import annotations

import doctest
from pathlib import Path

from lazyllm.methods import Prune

_ENTRY_POINTS = """
[lazyllm.methods]
keep_last = own_methods.keep_last:KeepLast
draws_lots = own_methods.others:DrawsLots
drafted = own_methods.others:Drafted
breaks_at_import = own_methods.broken:Anything
is_no_method = own_methods.others:IsNoMethod
odd_default = own_methods.others:OddDefault
lazy = own_methods.keep_last:KeepLast
"""
_OTHERS = """
from dataclasses import dataclass, field

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


def install_own_package(folder: Path, version: str = "0.1", helper: str = "") -> Path:
    """Write the package as installed below `folder`. Returns the folder for the module path.

    helper: the content of a second module, next to the methods'.
    """
    example = [part.source for part in doctest.DocTestParser().get_examples(Prune.__doc__ or "")]
    classes = example[: next(number for number, part in enumerate(example) if "load_model" in part)]
    info, target = f"own_methods-{version}.dist-info", folder / f"installed-{version}"
    files = {
        "own_methods/__init__.py": "",
        "own_methods/keep_last.py": "\n".join(classes),
        "own_methods/others.py": _OTHERS,
        "own_methods/helper.py": helper,
        "own_methods/broken.py": "import a_package_that_nobody_has\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: own-methods\nVersion: {version}\n",
        f"{info}/entry_points.txt": _ENTRY_POINTS,
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files)
    for name, text in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    return target
