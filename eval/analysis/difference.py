"""Whether a method differs from its paired baseline by more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np

from eval.store.aggregate import drawn_means, on_common_examples, rows_of
from eval.store.results import Results


@dataclass(frozen=True)
class Difference:
    """A method beside its baseline on the same examples. Intervals are 95 % bootstraps, paired, NaN for few examples.

    score: the method's minus the baseline's, 0 to 100. ttft: the speedup. better, worse: examples that score higher or
    lower. p: of the exact two-sided binomial test of these two, which for right and wrong answers is McNemar's.
    changed: answers whose text or tokens differ; None if unknown.
    """

    examples: int
    score: float
    score_low: float
    score_high: float
    ttft: float
    ttft_low: float
    ttft_high: float
    better: int
    worse: int
    p: float
    changed: int | None

    def __str__(self) -> str:
        answers = "" if self.changed is None else f"; {self.changed} of {self.examples} answers differ"
        return (
            f"score {self.score:+.2f} (95 % interval {self.score_low:+.2f} to {self.score_high:+.2f}), {self.better} "
            f"examples better and {self.worse} worse (p = {self.p:.2g}); TTFT speedup {self.ttft:.2f} "
            f"({self.ttft_low:.2f} to {self.ttft_high:.2f}){answers}"
        )

    @property
    def as_json(self) -> dict[str, Any]:
        return {key: None if value != value else value for key, value in asdict(self).items()}


def difference(results: Results) -> Difference | None:
    """Of a run's examples, as a mean over tasks; None without a paired baseline. results: of one run.

    With `timing.paired=ttft`, examples count once the baseline's own run has answered them.
    """
    frame: Any = results.frame.dropna(subset=["baseline_ttft_s", "baseline_score"])
    if frame.empty:
        return None
    gains = on_common_examples(frame.assign(gain=frame["score"] - frame["baseline_score"]), "gain")
    means = drawn_means(gains)[:, 0]
    low, high = np.percentile(means[1:], [2.5, 97.5])
    whole = rows_of(frame)[-1]
    better, worse = int((gains > 0).to_numpy().sum()), int((gains < 0).to_numpy().sum())
    same = frame["same_answer"].dropna()
    return Difference(
        examples=len(gains),
        score=float(means[0]),
        score_low=float(low),
        score_high=float(high),
        **{f"ttft{end}": float(whole[f"ttft_speedup{end}"]) for end in ("", "_low", "_high")},
        better=better,
        worse=worse,
        p=binomial(better, worse),
        changed=None if same.empty else int((same < 100).sum()),
    )


def binomial(better: int, worse: int) -> float:
    """The chance of a split at least as uneven, if both sides are equally likely."""
    n = better + worse
    return min(1.0, 2 * sum(comb(n, k) for k in range(min(better, worse) + 1)) / 2**n)


def passes(differences: Sequence[Difference | None], bounds: dict[str, float]) -> bool:
    """Whether every method's interval lies above the bounds, so that chance alone does not pass."""
    lows = [(one and getattr(one, f"{name}_low"), bound) for one in differences for name, bound in bounds.items()]
    return bool(lows) and all(low is not None and low >= bound for low, bound in lows)
