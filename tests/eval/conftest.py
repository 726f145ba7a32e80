from collections.abc import Iterator

import pytest

from eval.store import aggregate


@pytest.fixture
def two_have_an_interval(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two examples of a dataset have an interval, so that made runs may be small."""
    monkeypatch.setattr(aggregate, "FEWEST", 2)
    aggregate._weights.cache_clear()
    yield
    aggregate._weights.cache_clear()
