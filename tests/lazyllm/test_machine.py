"""The commit that results name."""

import subprocess
from pathlib import Path

import pytest

from lazyllm import machine


def test_commit_is_a_whole_hash_and_tells_of_changed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(words: str) -> str:
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            *words.split(),
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.git_commit() is None
    (tmp_path / "tracked").write_text("one")
    for words in ("init", "add tracked", "commit -m x", "tag -a v1 -m x"):
        git(words)
    (tmp_path / "untracked").touch()
    assert machine.git_commit() == git("rev-parse HEAD")
    (tmp_path / "tracked").write_text("two")
    assert machine.git_commit() == git("rev-parse HEAD") + "+changes"
