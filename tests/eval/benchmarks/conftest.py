"""Fixtures of suites."""

from collections.abc import Iterator
from typing import Any

import pytest

from eval.benchmarks import downloads

Split = tuple[str, str | None, str]  # repository, configuration, split


@pytest.fixture
def hub_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Split, list[dict[str, Any]]]]:
    """Rows of the hub, filled by the test, as the package `datasets` has them in its cache."""
    import datasets

    rows: dict[Split, list[dict[str, Any]]] = {}

    def load_dataset(name: str, configuration: str | None, split: str) -> datasets.Dataset:
        if (name, configuration, split) not in rows:
            raise ConnectionError(f"Couldn't reach {name}")
        return datasets.Dataset.from_list(rows[name, configuration, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    downloads.find_split.cache_clear()
    yield rows
    downloads.find_split.cache_clear()
