"""TTFT's share of the generation time by length of prompt and answer."""

from __future__ import annotations

from typing import Any

import pandas as pd

from eval.analysis.table import Table
from eval.analysis.tables.cells import PROMPT_ENDS, SETTING, in_order, model_name, range_names, range_of
from eval.store.aggregate import with_baselines
from eval.store.results import Results, first_turns

_ANSWERS = (4, 16, 64, 256)  # upper ends of the ranges of answer lengths, the end token included


def ttft_share(results: Results) -> Table:
    """TTFT's share of the generation time for every setting."""
    frame = with_baselines(first_turns(results.frame))
    frame = frame.assign(
        prompt_tokens=range_of(frame["prompt_tokens"], PROMPT_ENDS),
        answer_tokens=range_of(frame["generated_tokens"], _ANSWERS),
    )
    frame = frame[[*SETTING, "id", "ttft_s", "total_s", "prompt_tokens", "answer_tokens"]]
    all_prompts, all_answers = {"prompt_tokens": "all"}, {"answer_tokens": "all"}
    parts = [frame.assign(**sums) for sums in ({}, all_prompts, all_answers, all_prompts | all_answers)]
    grouped = pd.concat(parts).groupby([*SETTING, "prompt_tokens", "answer_tokens"], sort=False)
    shares: Any = grouped.agg(generations=("id", "size"), ttft_s=("ttft_s", "sum"), total_s=("total_s", "sum"))
    shares = shares.reset_index()
    shares["share"] = 100 * shares["ttft_s"] / shares["total_s"]
    shares = in_order(shares)
    prompts = [name for name in range_names(PROMPT_ENDS) if name in set(shares["prompt_tokens"])]
    answers = [name for name in range_names(_ANSWERS) if name in set(shares["answer_tokens"])]
    lines = []
    for _, group in shares.groupby(SETTING, sort=False):
        rows = group.to_dict("records")
        share = {(row["prompt_tokens"], row["answer_tokens"]): f"{row['share']:.1f}" for row in rows}
        lines.append(
            {"model": model_name(rows[0], results), "method": rows[0]["label"], "all": share["all", "all"]}
            | {f"prompt {name}": share.get((name, "all"), "-") for name in prompts}
            | {f"answer {name}": share.get(("all", name), "-") for name in answers}
        )
    caption = (
        "Per cent of the generation time before the first token: summed TTFT divided by summed generation time, "
        "for generations with a prompt or an answer of this many tokens (the end token counts). The CSV has each "
        "combination of prompt and answer length, and the number of generations. -: no generation of this length."
    )
    return Table("ttft_share", "TTFT's share of the generation time", caption, shares, pd.DataFrame(lines), keys=2)
