"""The paper's claims about LazyLLM, each with what stored runs say of it."""

from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.claims import (
    MOST_FAILED,
    PAPER_SUITE,
    UNDECIDED,
    Claim,
    Finding,
    claims,
    sections,
)
from eval.analysis.columns import SECTION
from eval.analysis.paper_tables import PAPER_MODELS
from eval.analysis.table import MODEL, Column, Rows, as_table, cells, forms
from eval.store.results import Results
from eval.store.runs import counted

_COLUMNS = (
    MODEL, Column("section", "section"), Column("claim", "claim"), Column("paper", "published"),
    Column("ours", "ours"),
    Column("expected", "expected"), Column("shown_verdict", "verdict"), Column("shown", "where"),
)  # fmt: skip
_FRAME = [
    *SECTION, "section", "claim", "paper", "expected", "parts", *forms("value"), "verdict",
    "lacking", "failed", "rows_to_decide", "shown"
]  # fmt: skip


@as_table(
    30,
    title="Published claims, and ours",
    caption=(
        "A number agrees if the whole 95 % interval lies within the tolerance around the paper's, "
        "and differs if none of it does. A direction holds if every interval obeys it, and does "
        "not hold if one of them, in one task at one speedup, disobeys as a whole, also when it is "
        "widened for their number (Bonferroni)."
    ),
    notes=(
        "Undecided: the interval allows both. -: the paper has no number for this model. ?: not "
        "known to within ±10 points. Not run: the experiments of the paper, or what the verdict "
        "names, are missing; `lazyllm-bench plan` estimates their hours. Several settings of a "
        "method are not averaged: --where KEY=VALUE chooses the runs of one. A row on which an "
        "answer failed is left out for all arms of a claim, and counted beside the verdict; more "
        f"than {100 * MOST_FAILED:g} % of them decide nothing."
    ),
    command="python run.py -m experiment=table1 model=llama2,xgen",
)
def verdicts(*groups: Results) -> Rows:
    """Each claim of the paper about LazyLLM for each model on the paper's benchmark: the paper's
    number, ours, and the verdict.

    groups: of runs that share no table. frame: model, suite, section, claim, paper (the published
    number for the model), expected, parts (the number of values behind ours), value, value_low,
    value_high (of a single part), verdict, lacking (what a run must have for a verdict), failed
    (rows on which an answer failed, which are left out), rows_to_decide (NaN unless undecided),
    shown.
    """
    found = {key: parts for key, parts in sections(groups).items() if key[1] == PAPER_SUITE}
    rows = list[dict[str, Any]]()
    for (model, suite), parts in found.items():
        rows += [
            _row(claim, model, suite, parts[0].paper_model, claim.judged(parts))
            for claim in claims()
        ]
    there = {parts[0].paper_model for parts in found.values()}
    for name in PAPER_MODELS:
        if found and name not in there:
            rows += [
                _row(claim, name, PAPER_SUITE, name, Finding([]))
                for claim in claims()
                if name in claim.paper
            ]
    frame: Any = pd.DataFrame(rows, columns=[*_FRAME, "ours"])
    texts = [
        f"{verdict}: {lacking}" if lacking else f"{verdict}{_decide(needed)}{_count(failed)}"
        for verdict, lacking, failed, needed in zip(
            *(frame[name] for name in ("verdict", "lacking", "failed", "rows_to_decide")),
            strict=True,
        )
    ]
    everything = Results([run for results in groups for run in results.runs])
    text = cells(frame.assign(shown_verdict=texts), _COLUMNS, everything)
    return Rows(frame[_FRAME], text, keys=3)


def _decide(rows: float) -> str:
    return "" if np.isnan(rows) else f": about {float(f'{rows:.2g}'):,.0f} rows decide"


def _count(failed: int) -> str:
    return f" ({counted(failed, 'row')} failed)" if failed else ""


def _row(
    claim: Claim, model: str, suite: str, paper_model: str | None, finding: Finding
) -> dict[str, Any]:
    """A claim of the paper beside ours."""
    verdict = claim.verdict(finding.values, paper_model, finding.lacking)
    is_open = verdict == UNDECIDED and claim.holds
    values, paper = finding.values, claim.paper.get(paper_model or "")
    single = values[0] if len(values) == 1 else (np.nan,) * 3
    return {
        "model": model,
        "suite": suite,
        "section": claim.section,
        "claim": claim.claim,
        "paper": "-" if paper is None else f"{paper:g}",
        "parts": len(values),
        "expected": claim.holds or f"within {claim.tolerance}",
        **dict(zip(forms("value"), single, strict=True)),
        "ours": claim.ours(values),
        "verdict": verdict,
        "rows_to_decide": claim.rows_to_decide(values, finding.examples) if is_open else np.nan,
        "lacking": finding.lacking,
        "failed": finding.failed,
        "shown": claim.exhibit,
    }
