"""Fixtures that all tests share."""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import absl.logging
import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# Tests run side by side (pytest -n): each process, and each that it starts, keeps to one core. Set
# before torch is imported: a run in a test restores the number that torch began with
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each run in a test collects garbage several times, and would look through all modules each time,
# for half a second
gc.disable()


def pytest_collection_finish() -> None:
    """What was imported to collect the tests is never garbage."""
    gc.freeze()
    gc.enable()


# HYPOTHESIS_PROFILE=fuzz .venv/bin/pytest -m hypothesis
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "fuzz", settings.get_profile("suite"), max_examples=10_000, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


# rouge-score brings absl, whose handler closes the stderr it began with, pytest's, as soon as Hydra
# configures logging while a test has replaced stderr; it never closes this one
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a command sets for its own process, such as `plan` HF_HUB_OFFLINE, ends with the
    test.
    """
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the repository that holds real LongBench rows and tokenizers; skips
    where it is absent.
    """
    folder = ROOT.parent / "shared"
    if not (folder / "longbench").is_dir():
        pytest.skip(
            f"real LongBench rows are not here: {folder.name}/ beside the repository is absent"
        )
    return folder


@pytest.fixture(scope="session")
def tiny() -> tuple[Any, Any]:
    """`tests.helpers.tiny` for tests that take fixtures."""
    from tests.helpers import tiny

    return tiny()


@pytest.fixture
def tiny_copy(tmp_path: Path) -> Path:
    """A checkpoint's folder, to be changed: the model of this package."""
    from lazyllm.presets import PRESETS

    return Path(shutil.copytree(PRESETS["tiny"].source, tmp_path / "checkpoint"))


# The files that take longest, which come first, so that the workers of `pytest -n` end together.
# Here and not on the command line, where pytest drops a file beside a folder that holds it
LONGEST = (
    "test_first_run.py",
    "test_virtual_card.py",
    "test_kill.py",
    "test_architectures.py",
    "test_launchers.py",
    "test_join_oracle.py",
    "test_subject.py",
    "test_write.py",
    "test_interrupt.py",
    "test_wheel.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Notebooks run with the slow tests; long files come first."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("slow")
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty caches, and a hub that does not answer."""
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("eval.benchmarks.downloads.hub_is_reachable", lambda: False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in hub, which the test fills, for the hub's own client with empty caches
    (`tests.hub_server`).
    """
    from tests.hub_server import HubServer

    hub = HubServer({})
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    yield hub
    hub.close()
