"""What a decoding step and a revived token of LazyLLM cost, in steps of the baseline."""

from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.claims import Section, sections
from eval.analysis.columns import SECTION
from eval.analysis.table import EXAMPLES, MODEL, Column, Rows, as_table, cells, forms
from eval.store.aggregate import beside
from eval.store.results import Results, first_turns

_COSTS = (
    MODEL,
    Column("task", "task"),
    EXAMPLES,
    Column("prefill_saved", "prefill saves", 1),
    Column("revived_a_step", "revived a step", 1),
    Column("step_cost", "a step costs", 2),
    Column("token_cost", "a revived token", 3),
    Column("prefill_token_cost", "a token in prefill", 3),
    Column("revived_in_prefill", "revived / prefill", 2),
    Column("predicted", "speedup, predicted", 2),
    Column("generation_speedup", "speedup, measured", 2),
)


@as_table(
    40,
    title="What a decoding step of LazyLLM costs",
    caption=(
        "All costs in decoding steps of the baseline; a token in prefill is the baseline's. LazyLLM is slower if steps "
        "and revivals cost more than the prefill saves."
    ),
    notes=(
        "An answer's decoding time is fitted (least squares, on the examples of all other tasks) as steps times a "
        "step's cost plus revived tokens (mean over layers) times a revived token's cost. Predicted: the speedup that "
        "this gives with the measured TTFT."
    ),
    command="python run.py -m experiment=table2 model=llama2,xgen",
)
def step_cost(results: Results) -> Rows:
    """Why LazyLLM's whole answers are faster or slower: what its prefill saves, and what steps and revivals cost."""
    rows = [row for section in sections(results) for row in _costs(section)]
    frame = pd.DataFrame(
        rows, columns=[*SECTION, *(column.name for column in _COSTS[1:-1]), *forms("generation_speedup")]
    )
    shown = cells(frame, _COSTS, results)
    return Rows(frame, shown, keys=2)


def _costs(section: Section) -> list[dict[str, Any]]:
    """A row for each task of a section."""
    rows = first_turns(section.of("studied"))
    theirs = beside(rows, section.frame)
    rows = rows.assign(**{f"theirs_{name}": theirs[name] for name in ("ttft_s", "total_s", "step_s")})
    rows = rows.dropna(subset=["revived_tokens", "total_s", "theirs_total_s"])
    rows = rows.assign(steps=rows["generated_tokens"] - 1, decoding_s=rows["total_s"] - rows["ttft_s"])
    measured = section.by_task(rows).set_index("name")
    costs = []
    for task, group in rows.groupby("task", sort=False):
        others: Any = rows[rows["task"] != task]
        if others.empty:
            continue
        (step, token), *_ = np.linalg.lstsq(others[["steps", "revived_tokens"]].to_numpy(float), others["decoding_s"])
        predicted = group["ttft_s"] + step * group["steps"] + token * group["revived_tokens"]
        both: Any = group.assign(predicted=predicted).groupby("dataset")[["theirs_total_s", "predicted"]].sum()
        unit = group["theirs_step_s"].mean()
        prefill_token = group["theirs_ttft_s"].sum() / group["prompt_tokens"].sum()
        costs.append({
            "model": group["model"].iloc[0], "suite": section.suite, "task": task, "examples": group["id"].nunique(),
            "prefill_saved": (group["theirs_ttft_s"] - group["ttft_s"]).mean() / unit,
            "revived_a_step": group["revived_tokens"].sum() / max(1, group["steps"].sum()),
            "step_cost": step / unit, "token_cost": token / unit,
            "prefill_token_cost": prefill_token / unit, "revived_in_prefill": token / prefill_token,
            "predicted": (both["theirs_total_s"] / both["predicted"]).mean(),
            **measured.loc[task, forms("generation_speedup")],
        })  # fmt: skip
    return costs
