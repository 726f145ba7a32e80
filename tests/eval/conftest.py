import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from eval.benchmarks.datasets import DATASETS, SUITES
from eval.store import summary


@pytest.fixture(autouse=True)
def _registers() -> Iterator[None]:
    """What a test adds to the datasets and suites, from files of a user, ends with it."""
    datasets, suites = dict(DATASETS), dict(SUITES)
    yield
    DATASETS.clear()
    DATASETS.update(datasets)
    SUITES.clear()
    SUITES.update(suites)


@pytest.fixture
def two_have_an_interval(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two examples of a dataset have an interval, so that made runs may be small."""
    monkeypatch.setattr(summary, "FEWEST", 2)
    summary._weights.cache_clear()
    yield
    summary._weights.cache_clear()


@pytest.fixture
def wandb_ends() -> Iterator[None]:
    """W&B's service ends with the test. How it ends is not the test's matter: it may be gone
    already.
    """
    yield
    if "wandb" in sys.modules:
        with suppress(Exception, SystemExit):
            sys.modules["wandb"].teardown()
