"""The hash of the code, and the files that it covers."""

import linecache
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import SUITES
from eval.run import identity
from eval.run.asked import ask
from eval.run.config import run_config
from eval.run.identity import ENGINE, code_sha256, method_code, suite_code
from eval.run.run import prepare
from lazyllm.methods import METHODS, Prune
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec
from tests.conftest import ROOT


def test_any_change_of_a_source_changes_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_ROOT", tmp_path)
    hashes = set()
    for name, source in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("a.py", "x = 2  # two\n"), ("b.py", "x = 2\n")):
        shutil.rmtree(tmp_path / "room", ignore_errors=True)
        (tmp_path / "room").mkdir()
        (tmp_path / "room" / name).write_text(source)
        hashes.add(code_sha256.__wrapped__(("room",)))
    assert len(hashes) == 4


def test_engine_is_what_all_runs_share() -> None:
    files = {
        file.relative_to(ROOT).as_posix()
        for part in ENGINE
        for file in ((ROOT / part).rglob("*.py") if (ROOT / part).is_dir() else [ROOT / part])
    }
    assert {"lazyllm/engine/batch.py", "lazyllm/models/load.py", "lazyllm/presets.yaml", "eval/run/decode.py"} <= files
    assert "lazyllm/methods/support/bases.py" in files
    assert not [file for file in files if file.startswith(("lazyllm/integrations", "eval/report"))]
    assert "lazyllm/methods/lazy.py" not in files


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources, to be changed."""
    for package in ("lazyllm", "eval"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=lambda _, names: [n for n in names if "." in n[:1]])
    monkeypatch.setattr(identity, "_ROOT", tmp_path)
    yield tmp_path
    code_sha256.cache_clear()


def changed_by(tree: Path, name: str) -> set[str]:
    """What changes its hash with this file: suites and methods."""

    def hashes() -> dict[str, str]:
        code_sha256.cache_clear()
        suites = {name: suite_code(suite.load.__module__) for name, suite in SUITES.items()}
        return suites | {name: method_code(name) for name in METHODS}

    before = hashes()
    with (tree / name).open("a") as file:
        file.write("\nADDED = 1\n")
    return {name for name, value in hashes().items() if value != before[name]}


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
def test_a_methods_or_a_suites_own_file_changes_it_alone(tree: Path, file: str, changed: set[str]) -> None:
    assert changed_by(tree, file) == changed


def test_a_users_method_is_hashed_with_the_shipped_one_that_it_inherits_from(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    source = "from dataclasses import dataclass\nfrom lazyllm.methods import StaticPruning\n"
    file.write_text(f"{source}\n@dataclass(frozen=True)\nclass Mine(StaticPruning):\n    pass\n")
    codes = [method_code(str(file))]
    for changed in (tree / "lazyllm/methods/static_pruning.py", file, tree / "lazyllm/methods/lazy.py"):
        with changed.open("a") as opened:
            opened.write("\nADDED = 1\n")
        code_sha256.cache_clear()
        codes.append(method_code(str(file)))
    assert len({*codes}) == 3
    assert codes[2] == codes[3]  # LazyLLM is not among its classes


def test_a_method_entered_by_hand_is_hashed_by_its_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where a class has no file."""

    def kind(kept: str) -> type:
        source = "@dataclass(frozen=True)\nclass Mine(Prune):\n    layer: int = 2\n"
        source += f"    def kept(self, depth, n):\n        return {kept}\n"
        file = f"<cell {kept}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # as IPython does
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
        return prepare(ask(run_config(["model=custom", f"model.name={folder}", "dataset=lookup", "limit=1"]))).identity

    assert identity_in("here") == identity_in("there")


def test_local_checkpoint_is_hashed_by_the_weights_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    hashes = []
    for file, content in (("a.bin", b"1"), ("a.bin", b"2"), ("a.safetensors", b"3"), ("a.safetensors", b"4")):
        (tmp_path / file).write_bytes(content)
        hashes.append(identity.weights_sha256(ModelSpec(str(tmp_path))))
    assert len({*hashes}) == 4
    (tmp_path / "a.bin").write_bytes(b"5")  # not read beside safetensors
    assert identity.weights_sha256(ModelSpec(str(tmp_path))) == hashes[-1]
