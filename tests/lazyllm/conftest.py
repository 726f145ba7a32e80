"""Shared by the tests of models: an offline hub, and a hub that a test fills."""

import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub with an empty cache and without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """A hub of folders by hub id, which the test fills. A repository serves only the requested files."""
    repositories: dict[str, Path] = {}

    def snapshot_download(hub_id: str, revision: str | None = None, allow_patterns: list[str] | None = None) -> str:
        snapshot = tmp_path / "hub" / hub_id.replace("/", "--") / ("0123456789" * 4)
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in repositories[hub_id].iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns or ["*"]):
                shutil.copy(file, snapshot)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return repositories
