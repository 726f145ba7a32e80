"""Score differences over paired examples, with 95 % bootstrap intervals: each method against its baseline, and each
pair of methods.

    python -m scripts.dev.paired_scores runs results/coder/gradual_differences.csv
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from eval.store.aggregate import mean_interval
from eval.store.results import Results

_RESAMPLES = 10_000


def paired(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each method against its baseline, in order of labels, then for each pair of methods.

    frame: `Results.frame` of runs on the same examples; scores are 0 to 100.
    """
    key = ["dataset", "id"]
    scores = {label: part.set_index(key).sort_index() for label, part in frame.groupby("label")}
    pairs = [(label, "baseline", part.score, part.baseline_score) for label, part in scores.items()]
    pairs += [(b, a, scores[b].score, scores[a].score) for a, b in combinations(scores, 2)]
    rows = []
    for method, against, score, other in pairs:
        low, high = mean_interval((score - other).to_numpy(), _RESAMPLES)
        rows.append({
            "method": method, "against": against, "examples": len(score), "score": round(score.mean(), 2),
            "other_score": round(other.mean(), 2), "difference": round((score - other).mean(), 2),
            "low": round(low, 2), "high": round(high, 2),
        })  # fmt: skip
    return rows


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    rows = pd.DataFrame(paired(Results.read([folder]).frame))
    rows.to_csv(out, index=False)
    print(rows.to_string(index=False))


if __name__ == "__main__":
    main()
