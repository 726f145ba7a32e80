"""Fixtures of suites."""

from typing import Any

import pytest


@pytest.fixture
def hub_rows(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], list[dict[str, Any]]]:
    """{(repository, configuration, split): rows}, filled by the test, for the package `datasets`; no hub answers."""
    import datasets

    rows: dict[tuple[str, str | None, str], list[dict[str, Any]]] = {}

    def load_dataset(repository: str, configuration: str | None, split: str) -> datasets.Dataset:
        return datasets.Dataset.from_list(rows[repository, configuration, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("eval.benchmarks.downloads.hub_is_reachable", lambda: False)
    return rows
