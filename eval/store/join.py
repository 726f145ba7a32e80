"""The only way from an arm's answers to the baseline's."""

from typing import Any

import pandas as pd

_VISIT = ["folder", "dataset", "id", "turn", "visit"]  # what two answers share that may be compared


def beside(rows: Any, among: Any) -> Any:
    """For each of these rows of `Results.frame`, the row of its run's baseline of the same visit and turn.

    Two answers may be compared only if they were measured within seconds of each other, on the same prompt.
    among: the whole frame. The result has the index of `rows`, and NaN where the visit holds no baseline's answer.
    """
    wanted = pd.MultiIndex.from_frame(rows[_VISIT])
    found = among[among["is_baseline"]].set_index(_VISIT, drop=False).reindex(wanted)
    return found.set_axis(rows.index)
