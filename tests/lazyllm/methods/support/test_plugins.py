"""Methods that another installed package adds, and the worked example of how to write one."""

import doctest
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.config_store import ConfigStore

from eval.arms import Arm, expand
from eval.cli import main
from eval.compose import read
from eval.run.check import check
from eval.run.identity import method_code
from eval.store.folder import fingerprint
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from lazyllm.methods import (
    METHODS,
    Baseline,
    Lazy,
    Prune,
    StaticPruning,
    by_name,
    code_of,
    known,
    make,
)
from lazyllm.methods.support import bases, plugins
from tests.helpers import example_source
from tests.runs import prepared, small_config

# A package with its own methods, as another author would write it, in the files that pip installs
_ENTRY_POINTS = """
[lazyllm.methods]
keep_last = own_methods.keep_last:KeepLast
draws_lots = own_methods.others:DrawsLots
drafted = own_methods.others:Drafted
breaks_at_import = own_methods.broken:Anything
is_no_method = own_methods.others:IsNoMethod
undecorated = own_methods.others:Undecorated
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


class Undecorated(Baseline):
    keep: float = 0.5
"""


def install_own_package(target: Path) -> Path:
    """Write the package into a folder for the module path. Its `keep_last` is the example of
    `Prune`'s docstring.
    """
    info = "own_methods-0.1.dist-info"
    files = {
        "own_methods/__init__.py": "",
        "own_methods/keep_last.py": example_source(Prune),
        "own_methods/others.py": _OTHERS,
        "own_methods/helper.py": "",
        "own_methods/broken.py": "import a_package_that_nobody_has\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: own-methods\nVersion: 0.1\n",
        f"{info}/entry_points.txt": _ENTRY_POINTS,
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files)
    for name, text in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    return target


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_own_package(tmp_path_factory.mktemp("own"))


@pytest.fixture
def installed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package is installed as long as the test lasts."""
    monkeypatch.syspath_prepend(packages)
    repo = ConfigStore.instance().repo
    # later tests find what they registered
    monkeypatch.setitem(repo, "method", deepcopy(repo.get("method", {})))
    plugins.installed.cache_clear()
    yield packages
    plugins.installed.cache_clear()
    for name in [name for name in list(sys.modules) if name.split(".")[0] == "own_methods"]:
        del sys.modules[name]


def arms_of(*overrides: str) -> dict[str, Arm]:
    """{label: arm} of `python run.py OVERRIDES`."""
    return {arm.label: arm for arm in expand(read(overrides))}


def test_worked_example_does_what_it_says() -> None:
    failed, tried = doctest.testmod(bases)
    assert tried >= 10
    assert failed == 0


def test_name_of_an_installed_method_is_known(installed: Path) -> None:
    with pytest.raises(
        UserError, match=r"'keep_last' needs layer=\.\.\.; its settings are layer, keep"
    ):
        make("keep_last")
    method = make("keep_last", {"layer": 2, "keep": 0.25})
    assert type(method).__module__ == "own_methods.keep_last"
    assert by_name("keep_last") is type(method)
    assert known()[: len(METHODS)] == list(METHODS)
    assert {"keep_last", "breaks_at_import"} <= set(known()[len(METHODS) :])
    assert method.tokens_per_layer(Depth(8), 40) == [40] * 2 + [10] * 6


def test_config_of_a_plugin_is_its_dataclass(installed: Path) -> None:
    keep_last = arms_of("method=keep_last", "method.layer=3")["keep_last"]
    assert keep_last.hyperparameters == {"layer": 3, "keep": 0.5}
    assert keep_last.canonical() == {"name": "keep_last", "layer": 3, "keep": 0.5}
    lots = arms_of("method=draws_lots", "seed=3")["draws_lots"]
    # the run's seed, as for lazyllm's own
    assert lots.hyperparameters == {"layers": [1, 2], "seed": 3}
    assert (
        arms_of("method=draws_lots", "seed=3", "method.seed=5")["draws_lots"].hyperparameters[
            "seed"
        ]
        == 5
    )
    assert lots.canonical() == {"name": "draws_lots", "seed": 3}
    with pytest.raises(
        UserError, match=r"'keep_last' needs layer=\.\.\.; its settings are layer, keep"
    ):
        arms_of("method=keep_last")
    with pytest.raises(UserError, match=r"method\.kep"):
        arms_of("method=keep_last", "method.layer=3", "method.kep=0.3")
    with pytest.raises(
        UserError, match=r"method 'keep_last': keep=2\.0: give a number in \(0, 1\]"
    ):
        arms_of("method=keep_last", "method.layer=3", "method.keep=2.0")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "breaks_at_import",
            "of the package own-methods 0.1 .* ModuleNotFoundError: .*a_package_that_nobody_has",
        ),
        (
            "is_no_method",
            r"own_methods.others:IsNoMethod\) is not a method: expected a dataclass derived from",
        ),
        (
            "undecorated",
            r"own_methods.others:Undecorated\) is no dataclass itself: "
            r"write @dataclass\(frozen=True\)",
        ),
        ("lazy", "'lazy' is lazyllm's own, and the package own-methods adds one of the same name"),
    ],
)
def test_unusable_plugin_is_refused_only_by_name(installed: Path, name: str, message: str) -> None:
    assert list(arms_of("method=static_pruning")) == ["baseline", "static_pruning"]
    with pytest.raises(UserError, match=message):
        arms_of(f"method={name}")
    with pytest.raises(UserError, match=message):
        make(name)
    assert isinstance(Lazy(), METHODS["lazy"])  # in Python the name is unambiguous


def test_name_of_two_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [SimpleNamespace(dist=SimpleNamespace(name=package)) for package in ("one", "other")]
    monkeypatch.setattr(plugins, "installed", lambda: SimpleNamespace(select=lambda name: twice))
    with pytest.raises(
        UserError, match="'same' is added more than once, by one and other: uninstall one"
    ):
        make("same", {"layer": 2})


def test_unknown_name_is_refused_with_the_known_ones(installed: Path) -> None:
    with pytest.raises(UserError, match="'keep_first': the nearest names are keep_last, "):
        make("keep_first")
    with pytest.raises(UserError, match="the nearest names are keep_last"):
        arms_of("method=keep_first")


def test_code_of_a_plugin_changes_with_its_files(installed: Path) -> None:
    assert code_of("random_drop") is None  # part of lazyllm's own code
    first = code_of("keep_last")
    assert first is not None
    assert first.startswith("own-methods 0.1 ")
    assert code_of("draws_lots") == first  # one package
    helper = installed / "own_methods" / "helper.py"
    before = helper.read_text()
    helper.write_text("SHARE = 0.5\n")  # a module that a method imports can change its results
    changed = code_of("keep_last")
    helper.write_text(before)
    assert changed != first
    assert code_of("keep_last") == first
    run = prepared("model=tiny", "dataset=lookup", "limit=1", "method=keep_last", "method.layer=2")
    # so two versions share no folder and no table
    assert run.identity["arms"]["keep_last"]["code"] == first


def test_two_drafts_never_share_a_run_folder(installed: Path, tiny_copy: Path) -> None:
    """A method names its other models itself, whatever the setting is called: their weights are
    in the identity.
    """

    def identity() -> dict:
        overrides = (
            "model=tiny",
            "dataset=lookup",
            "limit=1",
            "method=drafted",
            f"method.draft={tiny_copy}",
        )
        return prepared(*overrides).identity

    first = identity()
    assert identity() == first
    weights = tiny_copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    second = identity()
    assert fingerprint(second) != fingerprint(first)
    assert {key for key in first if first[key] != second[key]} == {"arms"}


_IN_A_FILE = """
from dataclasses import dataclass

from lazyllm.methods import StaticPruning


@dataclass(frozen=True)
class {name}(StaticPruning):
    label = "mine"
"""


def test_file_holds_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`method=FILE.py` runs without a package; name, records and fingerprint do not depend on
    the folder.
    """
    monkeypatch.setattr(ConfigStore.instance(), "repo", deepcopy(ConfigStore.instance().repo))
    name = "méthode (1)"
    file = tmp_path / f"{name}.py"
    file.write_text(_IN_A_FILE.format(name="Mine"))
    lengths = make("static_pruning", {"layer": 2, "keep": 0.25}).tokens_per_layer(Depth(8), 40)
    assert make(str(file), {"layer": 2, "keep": 0.25}).tokens_per_layer(Depth(8), 40) == lengths
    arguments = [
        "model=tiny",
        f"method='{file}'",
        "method.layer=2",
        "method.keep=0.5",
        "limit=1",
        "dataset=digest",
    ]
    assert main(["run", *arguments, "warmup=0", f"out={tmp_path / 'run'}"]) == 0
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert str(tmp_path) not in json.dumps(stored["identity"])
    arm = stored["identity"]["arms"][name]
    code = f"{code_of(str(file))} {method_code('static_pruning')}"
    assert (arm["method"]["name"], arm["method"]["layer"], arm["code"]) == (name, 2, code)
    assert list(arms_of(f"arms=[lazy,'{file}']")) == ["baseline", "lazy", name]
    file.write_text(file.read_text() + "\n\n")
    assert method_code(str(file)) != arm["code"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("lazy", _IN_A_FILE.format(name="Mine"), "a method 'lazy' is there already"),
        (
            "two",
            _IN_A_FILE.format(name="One") + _IN_A_FILE.format(name="Two"),
            "expected one class .* One, Two",
        ),
        ("nowhere", None, r"method=.*nowhere\.py: no such file"),
        ("none", "", "expected one class .* none"),
        ("broken", "x = 1\nx.shape\n", r"could not be loaded: AttributeError.*broken\.py:2"),
        (
            "absent",
            "import lazyllm\n\nlazyllm.absent\n",
            r"could not be loaded: AttributeError.*absent\.py:3",
        ),
        (
            "bare",
            "from lazyllm.methods import Baseline\nclass Bare(Baseline): pass\n",
            "no dataclass itself",
        ),
    ],
)
def test_unusable_file_is_refused(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(UserError, match=message):
        make(str(tmp_path / f"{name}.py"))


@pytest.mark.parametrize(
    "hook", ["__post_init__(self)", "kept(self, depth, n)", "score_spec(self, layers, depth)"]
)
def test_fault_in_a_file_is_one_line_with_its_place(tmp_path: Path, hook: str) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(f"{_IN_A_FILE.format(name='Faulty')}\n    def {hook}:\n        self.nothing\n")
    config = small_config(tmp_path / "run", arms=[{"name": str(file), "layer": 2, "keep": 0.5}])
    with pytest.raises(UserError, match=r"AttributeError: .*'nothing' \(faulty\.py:12\)"):
        check(config, tmp_path)


@dataclass(frozen=True)
class Plain(Baseline):
    """A dataclass as users write it: plain types, a default that its type would refuse, an
    unknown type.
    """

    keep: float = None  # type: ignore[assignment]
    seen: list[int] = field(default_factory=list)
    text: "Unknown" = "any"  # type: ignore[name-defined]  # noqa: F821


def test_plain_dataclass_is_a_method() -> None:
    assert Plain().keep is None
    assert Plain(0.5, [1], 3).tokens_per_layer(Depth(2), 5) == [5, 5]


def test_method_without_a_label_has_its_class_name() -> None:
    class Unnamed(Prune):
        pass

    class Derived(StaticPruning):
        pass

    assert (Unnamed.label, Derived.label, StaticPruning.label) == (
        "Unnamed",
        "static pruning",
        "static pruning",
    )
