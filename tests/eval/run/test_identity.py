"""The hash of the code: a number changes it, a comment does not; and the files that it covers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from eval.run import identity
from eval.run.identity import CODE, code_sha256

SOURCE = '''"""A module."""
def scaled(x: float) -> float:
    """x, scaled."""
    return 2.5 * x  # by two and a half
'''


@pytest.fixture
def hash_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The hash of one source text."""
    monkeypatch.setattr(identity, "_ROOT", tmp_path)

    def of(source: str) -> str:
        (tmp_path / "room").mkdir(exist_ok=True)
        (tmp_path / "room" / "module.py").write_text(source)
        return code_sha256.__wrapped__(("room",))

    return of


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x, scaled.", "x, scaled by 2.5."),
        ('"""A module."""\n', ""),
        ("two and a half", "2.5"),
        ("2.5 * x", "(2.5 *\n        x)"),
    ],
)
def test_words_and_layout_do_not_change_the_hash(hash_of, old: str, new: str) -> None:
    assert old in SOURCE
    assert hash_of(SOURCE) == hash_of(SOURCE.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [("2.5", "2.6"), ("2.5 *", "2.5 +"), ("2.5", "'2.5'"), ("scaled(x", "sc(x")])
def test_code_changes_the_hash(hash_of, old: str, new: str) -> None:
    assert hash_of(SOURCE) != hash_of(SOURCE.replace(old, new))


def test_empty_fields_of_a_new_python_do_not_change_the_hash(hash_of, monkeypatch) -> None:
    before = hash_of(SOURCE)
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*ast.FunctionDef._fields, "new_list", "new_value"))
    monkeypatch.setattr(ast.FunctionDef, "new_list", [], raising=False)
    monkeypatch.setattr(ast.FunctionDef, "new_value", None, raising=False)
    assert hash_of(SOURCE) == before


def test_hash_covers_the_code_of_records() -> None:
    root = Path(identity.__file__).parents[2]
    files = {
        file.relative_to(root).as_posix()
        for part in CODE
        for file in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    }
    assert {"lazyllm/methods/lazy.py", "lazyllm/models/load.py", "eval/benchmarks/prompts.py"} <= files
    assert "eval/run/measure.py" in files
    assert not [file for file in files if file.startswith(("lazyllm/bench", "lazyllm/integrations", "eval/report"))]
    assert len(code_sha256()) == 64
