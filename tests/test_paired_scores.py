"""`scripts/dev/paired_scores.py`: differences by example, whatever the order of rows."""

from __future__ import annotations

import pandas as pd

from scripts.dev.paired_scores import paired


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
