"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run side by side (pytest -n): each keeps to one core."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the repository that holds real LongBench rows and tokenizers; skips where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "longbench").is_dir():
        pytest.skip(f"real LongBench rows are not here: {folder.name}/ beside the repository is absent")
    return folder
