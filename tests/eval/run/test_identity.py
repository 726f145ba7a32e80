"""A run's identity: the hash of the code, and the files that it covers."""

import linecache
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import SUITES
from eval.run import identity
from eval.run.identity import SHARED_CODE, code_sha256, method_code, suite_code
from lazyllm.methods import METHODS, Prune
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec
from tests.conftest import ROOT
from tests.runs import prepared


def test_any_change_of_a_source_changes_the_hash(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(identity, "_ROOT", tmp_path)
    hashes, room = set(), tmp_path / "room"
    for name, source in (
        ("a", "x = 1\n"),
        ("a", "x = 2\n"),
        ("a", "x = 2  # two\n"),
        ("b", "x = 2\n"),
    ):
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir()
        (room / f"{name}.py").write_text(source)
        hashes.add(code_sha256.__wrapped__(("room",)))
    assert len(hashes) == 4


def test_engine_is_what_all_runs_share() -> None:
    files = {
        file.relative_to(ROOT).as_posix()
        for part in SHARED_CODE
        for file in ((ROOT / part).rglob("*.py") if (ROOT / part).is_dir() else [ROOT / part])
    }
    assert files >= {
        "lazyllm/models/load.py", "lazyllm/presets.yaml",
        "lazyllm/methods/support/bases.py", "eval/run/bench.py",
    }  # fmt: skip
    others = ("lazyllm/integrations", "eval/report", "lazyllm/methods/lazy.py")
    assert not [file for file in files if file.startswith(others)]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources, to be changed."""
    hidden = shutil.ignore_patterns(".*", "__pycache__")
    for package in ("lazyllm", "eval"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=hidden)
    monkeypatch.setattr(identity, "_ROOT", tmp_path)
    yield tmp_path
    code_sha256.cache_clear()


def add_a_line(file: Path) -> None:
    with file.open("a") as opened:
        opened.write("\nADDED = 1\n")
    code_sha256.cache_clear()


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("lazyllm/methods/lazy.py", {"lazy"}),
        ("lazyllm/methods/fastkv.py", {"fastkv", "claa"}),  # CLAA builds on its file
        ("lazyllm/methods/claa.py", {"claa"}),
        ("lazyllm/methods/prompt_compression/scoring.py", {"prompt_compression"}),
        ("lazyllm/methods/my_method.py", set()),  # a contributor's new file
        ("eval/benchmarks/my_suite.py", set()),
        ("eval/benchmarks/embedded.py", {"embedded"}),
        ("eval/benchmarks/prompts.py", {*SUITES}),
        ("eval/benchmarks/downloads.py", {*SUITES}),
    ],
)
def test_a_methods_or_a_suites_own_file_changes_it_alone(tree: Path, file: str, changed) -> None:
    def hashes() -> dict[str, str]:
        suites = {name: suite_code(suite.load.__module__) for name, suite in SUITES.items()}
        return suites | {name: method_code(name) for name in METHODS}

    code_sha256.cache_clear()
    before = hashes()
    add_a_line(tree / file)
    assert {name for name, value in hashes().items() if value != before[name]} == changed


def test_a_users_method_is_hashed_with_the_shipped_one_that_it_inherits_from(
    tree, tmp_path
) -> None:
    file: Path = tmp_path / "mine.py"
    source = "from dataclasses import dataclass\nfrom lazyllm.methods import StaticPruning\n"
    file.write_text(f"{source}\n@dataclass(frozen=True)\nclass Mine(StaticPruning):\n    pass\n")
    methods, codes = tree / "lazyllm" / "methods", [method_code(str(file))]
    for changed in (methods / "static_pruning.py", file, methods / "lazy.py"):
        add_a_line(changed)
        codes.append(method_code(str(file)))
    assert len({*codes}) == 3
    assert codes[2] == codes[3]  # LazyLLM is not among its classes


def test_a_method_entered_by_hand_is_hashed_by_its_functions(monkeypatch) -> None:
    """As in a notebook, where a class has no file."""

    def kind(kept: str) -> type:
        source = "@dataclass(frozen=True)\nclass Mine(Prune):\n    layer: int = 2\n"
        source += f"    def kept(self, depth, n):\n        return {kept}\n"
        lines, file = source.splitlines(keepends=True), f"<cell {kept}>"
        linecache.cache[file] = len(source), None, lines, file  # as IPython does
        names: dict[str, Any] = {"__name__": "__main__", "dataclass": dataclass, "Prune": Prune}
        exec(compile(source, file, "exec"), names)
        return names["Mine"]

    def code(kept: str) -> str:
        monkeypatch.setitem(METHODS, "mine", kind(kept))
        return method_code("mine")

    assert code("{2: n}") == code("{2: n}") != code("{2: 1}")


def test_a_checkpoint_has_one_fingerprint_wherever_its_folder_is(tmp_path: Path) -> None:
    def identity_in(place: str) -> dict[str, Any]:
        folder = shutil.copytree(PRESETS["tiny"].source, tmp_path / place / "mine")
        return prepared(f"model={folder}", "dataset=lookup", "limit=1").identity

    assert identity_in("here") == identity_in("there")


def test_a_method_has_one_identity_however_it_is_written() -> None:
    def arms(*overrides: str) -> dict[str, Any]:
        return prepared("dataset=lookup", "limit=1", *overrides).identity["arms"]

    default, changed = arms("method=lazy"), arms("method=lazy", "method.revive=false")
    assert default != changed
    assert default == arms() == arms("arms=[lazy]") == arms("arms=[{name: lazy, schedule: paper}]")
    schedules = ("{2: 0.3}", "2:0.3", "25%:0.3", "{25%: 0.3}")
    written = [arms("method=lazy", f"method.schedule='{schedule}'") for schedule in schedules]
    assert written == written[:1] * 4
    aimed = arms("method=random_drop", "method.speedup=2x")
    assert aimed == arms("method=random_drop", "speedup=2")
    (ratio,) = aimed["random_drop"]["parameters"]["lookup"].values()
    solved = arms("method=random_drop", f"method.keep={ratio}")
    assert solved != aimed  # how it came to its ratio is a setting of tables
    assert aimed["random_drop"]["method"].keys() == {"name", "seed"}


def test_local_checkpoint_is_hashed_by_the_weights_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    hashes = []
    for file, content in (
        ("a.bin", b"1"),
        ("a.bin", b"2"),
        ("a.safetensors", b"3"),
        ("a.safetensors", b"4"),
    ):
        (tmp_path / file).write_bytes(content)
        hashes.append(identity.weights_sha256(ModelSpec(str(tmp_path))))
    assert len({*hashes}) == 4
    (tmp_path / "a.bin").write_bytes(b"5")  # not read beside safetensors
    assert identity.weights_sha256(ModelSpec(str(tmp_path))) == hashes[-1]
