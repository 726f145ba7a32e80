"""`scripts/dev/paired_scores.py`: differences by example, whatever the order of rows."""

from __future__ import annotations

import pandas as pd
import pytest

from scripts.dev.paired_scores import interval, paired


def test_differences_are_by_example() -> None:
    columns = ["label", "dataset", "id", "score", "baseline_score"]
    rows = [
        ("half", "d", "1", 50.0, 60.0),
        ("half", "d", "2", 10.0, 20.0),
        ("tenth", "d", "2", 0.0, 20.0),
        ("tenth", "d", "1", 40.0, 60.0),
    ]
    half, tenth, between = paired(pd.DataFrame(rows, columns=columns))
    assert (half["difference"], half["low"], half["high"]) == (-10, -10, -10)
    assert (tenth["difference"], tenth["score"], tenth["other_score"]) == (-20, 20, 40)
    assert (between["method"], between["against"], between["difference"]) == ("tenth", "half", -10)


def test_the_interval_is_about_two_standard_errors() -> None:
    values = pd.Series(range(400)).to_numpy() % 2 * 10.0
    low, high = interval(values)
    assert (low, high) == pytest.approx((5 - 1.96 * 5 / 20, 5 + 1.96 * 5 / 20), abs=0.05)
