"""The paper's claims about LazyLLM, each with what stored runs say of it."""

from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.claims import CLAIMS, PAPER_SUITE, Claim, Value, sections
from eval.analysis.columns import SECTION
from eval.analysis.paper_tables import PAPER_MODELS
from eval.analysis.table import MODEL, Column, Rows, as_table, cells, forms
from eval.store.results import Results

_COLUMNS = (
    MODEL, Column("section", "section"), Column("claim", "claim"), Column("paper", "published"), Column("ours", "ours"),
    Column("expected", "expected"), Column("shown_verdict", "verdict"), Column("shown", "where"),
)  # fmt: skip
_FRAME = [
    *SECTION, "section", "claim", "paper", "expected", "parts", *forms("value"), "verdict", "lacking", "shown"
]  # fmt: skip


@as_table(
    30,
    title="Published claims, and ours",
    caption=(
        "A number agrees if the whole 95 % interval lies within the tolerance around the paper's, and differs if none "
        "of it does. A direction holds if every interval obeys it, and does not hold if one of them disobeys as a "
        "whole."
    ),
    notes=(
        "Undecided: the interval allows both. -: the paper has no number for this model. ?: not known to within ±10 "
        "points. Not run: the experiments of the paper, or what the verdict names, are missing; `lazyllm-bench plan` "
        "estimates their hours."
    ),
    command="python run.py -m experiment=table1 model=llama2,xgen",
)
def verdicts(results: Results) -> Rows:
    """Each claim of the paper about LazyLLM for each model: the paper's number, ours, and the verdict.

    frame: model, suite, section, claim, paper (the published number for the model), expected, parts (the number of
    values behind ours), value, value_low, value_high (of a single part), verdict, lacking (what a run must have for a
    verdict), shown.
    """
    found = sections(results)
    rows = [_row(claim, one.suite, one.paper_model, *claim.judged(one)) for one in found for claim in CLAIMS]
    there = {one.paper_model for one in found}
    absent = [name for name in PAPER_MODELS if name not in there]
    rows += [_row(claim, PAPER_SUITE, name, name) for name in absent for claim in CLAIMS if name in claim.paper]
    frame: Any = pd.DataFrame(rows, columns=[*_FRAME, "ours"])
    shown = [
        f"{verdict}: {text}" if text else verdict
        for verdict, text in zip(frame["verdict"], frame["lacking"], strict=True)
    ]
    return Rows(frame[_FRAME], cells(frame.assign(shown_verdict=shown), _COLUMNS, results), keys=3)


def _row(
    claim: Claim, suite: str, paper_model: str | None, model: str, parts: list[Value] | None = None, lacking: str = ""
) -> dict[str, Any]:
    """A claim of the paper beside ours. model, parts, lacking: of `Claim.judged`."""
    parts, paper = parts or [], claim.paper.get(paper_model or "")
    return {
        "model": model, "suite": suite, "section": claim.section, "claim": claim.claim,
        "paper": "-" if paper is None else f"{paper:g}", "parts": len(parts),
        "expected": claim.holds or f"within {claim.tolerance}",
        **dict(zip(forms("value"), parts[0] if len(parts) == 1 else (np.nan,) * 3, strict=True)),
        "ours": claim.ours(parts), "verdict": claim.verdict(parts, paper_model, lacking), "lacking": lacking,
        "shown": claim.shown,
    }  # fmt: skip
