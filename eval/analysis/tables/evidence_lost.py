"""Loss of evidence: its share left in the last layer, and the layer after which most of it was dropped."""

from __future__ import annotations

from typing import Any

import pandas as pd

from eval.analysis.evidence_shares import evidence_shares
from eval.analysis.table import Table
from eval.analysis.tables.cells import SECTION, in_order, model_name
from eval.store.results import Results


def evidence(results: Results) -> Table:
    """The share of evidence that each setting computes, by task, for right and for wrong answers."""
    frame = in_order(evidence_shares(results))
    lines = []
    for _, group in frame.groupby([*SECTION, "label", "task", "outcome"], sort=False):
        rows = group.sort_values("layer").to_dict("records")
        last = rows[-1]
        lines.append(
            {"model": model_name(last, results), "method": last["label"], "task": last["task"]}
            | {"answers": last["outcome"], "n": str(last["examples"])}
            | {"% in prefill": f"{last['in_prefill']:.1f}", "% revived": f"{last['revived']:.1f}"}
            | {"largest loss": _largest_loss([row["in_prefill"] for row in rows])}
        )
    caption = (
        "Share of the evidence (the prompt's tokens that hold the answer) that the last layer computes in prefill, and "
        "later in decoding (revived): mean over the examples with known evidence, separately for right answers (full "
        "score) and wrong ones. Largest loss: the layer after which prefill drops the largest part of the evidence, in "
        "points. Every layer is in the CSV."
    )
    title = "Evidence: the tokens that hold the answer, computed in the last layer"
    return Table("evidence", title, caption, frame, pd.DataFrame(lines), keys=4)


def _largest_loss(shares: list[Any]) -> str:
    """shares: in per cent, for each layer; before layer 1 it is 100."""
    losses = [before - share for before, share in zip([100.0, *shares], shares, strict=False)]
    lost = max(losses)
    return "none" if lost == 0 else f"{-lost:.1f} after layer {losses.index(lost)}"
