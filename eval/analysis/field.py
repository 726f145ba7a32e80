"""Every method: score, speed and memory in one table."""

from eval.analysis import columns
from eval.analysis.columns import SETTING, overall
from eval.analysis.table import (
    EXAMPLES,
    FIDELITY,
    KEPT,
    MB,
    MODEL,
    Column,
    Rows,
    as_table,
    cells,
    forms,
    measured,
)
from eval.store.results import Results

_VALUES = (
    Column("score", "score", 2),
    KEPT,
    *FIDELITY,
    Column("ttft_speedup", "TTFT speedup", 2),
    Column("ideal_ttft_speedup", "ideal", 2),
    Column("scoring_share", "scoring, %", 1),
    Column("equal_length_speedup", "generation speedup", 2),
    Column("generation_speedup", "whole-answer speedup", 2),
    Column("kv_bytes", "KV cache, MB", 3, scale=MB),
    Column("pct_prompt_tokens_computed", "% computed", 1),
    Column("attention_ceiling", "ideal without attention", 2, missing="not known", interval=False),
)
_FIELD = (MODEL, Column("name", "method"), Column("setting", "setting"), EXAMPLES, *_VALUES)


@as_table(
    10,
    title="Every method: score, speed and memory",
    caption="Mean over tasks of the score, 0 to 100, and of the speedups over the baseline of the "
    "same visits.",
    notes=(
        "% of baseline: the score relative to the baseline's. Scoring: share of TTFT spent before "
        "the prefill. Ideal without attention: the most that methods can reach that skip attention "
        "alone. Generation speedup: to the last token of the shorter answer; whole-answer speedup: "
        "to the last token of each. KV cache: at the end, MB = 10^6 bytes.{unsolved}"
    ),
    command="python run.py -m experiment=field model=tiny",
)
def field(results: Results) -> Rows:
    """Score, speed, memory and computed tokens of every setting of every method, mean over
    tasks.
    """
    frame = overall(results)
    scoring = 100 * frame["scoring_s"] / frame["ttft_s"]
    values = forms(*(column.name for column in _VALUES if column.name != "scoring_share"))
    frame = frame[[*SETTING, "speedup", "examples", "seeds", *values]].assign(scoring_share=scoring)
    named = zip(frame["label"], frame["method"], strict=True)
    settings = [
        "-" if label == method else label.removeprefix(f"{method}, ") for label, method in named
    ]
    names = [columns.place_of(name)[1] for name in frame["method"]]
    display = frame.assign(name=names, setting=settings, scoring_share=scoring.where(scoring > 0))
    values = {"unsolved": f" {columns.unsolved(frame)}".rstrip()}
    return Rows(frame, cells(display, measured(_FIELD, frame), results), keys=3, values=values)
