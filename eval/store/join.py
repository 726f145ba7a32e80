"""The only way from one arm's answers to another's."""

from __future__ import annotations

from typing import Any

import pandas as pd

_VISIT = ["folder", "dataset", "id", "turn", "visit"]  # what two answers share that may be compared


def beside(rows: Any, among: Any, arm: str | None = None) -> Any:
    """For each of these rows of `Results.frame`, the row of another arm of the same visit and turn.

    It is the only way from one arm to another: two answers may be compared only if they were measured within seconds of
    each other, on the same prompt.

    among: the whole frame. arm: the other one's label; None for each run's baseline.
    Returns a frame with the index of `rows`; a row is missing (NaN) if the other arm has no answer in that visit.
    """
    others = among[among["is_baseline"] if arm is None else among["arm"] == arm]
    wanted = pd.MultiIndex.from_frame(rows[_VISIT])
    found = others.set_index(_VISIT, drop=False).reindex(wanted)
    return found.set_axis(rows.index)
