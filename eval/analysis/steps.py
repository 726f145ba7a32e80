"""Time in decoding steps: TTFT and its share of a generation, and what a step and a revived
token of LazyLLM cost.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.claims import Section, sections
from eval.analysis.columns import SETTING, in_order, range_of, ranges_in, with_sums
from eval.analysis.table import LABEL, MODEL, Column, Rows, as_table, cells, forms, measured
from eval.store.results import Results
from eval.store.summary import match_baselines

# upper ends of the ranges of answer lengths, the end token included
_ANSWER_ENDS = (4, 16, 64, 256)
_LENGTHS = ["prompt_tokens", "answer_tokens"]
_COSTS = (
    Column("prefill_saved", "prefill saves", 1, optional=True),
    Column("revived_a_step", "revived a step", 1, optional=True),
    Column("step_cost", "a step costs", 2, optional=True),
    Column("token_cost", "a revived token", 3, optional=True),
    Column("prefill_token_cost", "a token in prefill", 3, optional=True),
    Column("revived_in_prefill", "revived / prefill", 2, optional=True),
    Column("predicted", "speedup, predicted", 2, optional=True),
    Column("generation_speedup", "speedup, measured", 2, optional=True),
)


@as_table(
    170,
    title="Steps: TTFT's share of the time, and what a decoding step costs",
    caption=(
        "All tasks: TTFT in decoding steps of the setting (21 for the paper's baseline), and in "
        "per cent of the generation time, by tokens of prompt and answer. By task: what LazyLLM's "
        "prefill saves and what its steps cost, in decoding steps of the baseline; it is slower if "
        "steps and revivals cost more than the prefill saves."
    ),
    notes=(
        "A share is summed TTFT divided by summed generation time; steps are a mean over "
        "generations (n) of several tokens. The end token counts.\n\nAn answer's decoding time is "
        "fitted (least squares, on the examples of all other tasks) as steps times a step's cost "
        "plus revived tokens (mean over layers) times a revived token's cost. Predicted: the "
        "speedup that this gives with the measured TTFT. A token in prefill is the baseline's."
    ),
    command="python run.py -m experiment=table2 model=llama2,xgen",
)
def steps(results: Results) -> Rows:
    """TTFT in steps and its share of the time for every setting; by task, why LazyLLM's answers are
    faster or slower.

    frame: a row for each setting, `task` being "all" and `examples` its generations; and one for
    each task of the setting of LazyLLM that figures show.
    """
    shares, headings = _shares(results)
    costs: Any = pd.DataFrame(
        [row for found in sections([results]).values() for row in _costs(found[0])]
    )
    rows = pd.concat([part for part in (shares, costs) if len(part)] or [shares])
    # the tasks of a setting follow it
    place = {
        key: number for number, key in enumerate(map(tuple, shares[SETTING].to_numpy().tolist()))
    }
    order = [place[tuple(key)] for key in rows[SETTING].to_numpy().tolist()]
    rows = rows.assign(order=order).sort_values("order", kind="stable", ignore_index=True)
    names = [column.name for column in _COSTS[:-1]] + forms("generation_speedup")
    table = rows.reindex(columns=[*SETTING, "task", "examples", "ttft_steps", *headings, *names])
    columns = [
        MODEL,
        LABEL,
        Column("task", "task"),
        Column("examples", "n"),
        Column("ttft_steps", "TTFT, steps", 1),
    ]
    columns += [Column(name, name, 1) for name in headings]
    return Rows(table, cells(table, [*columns, *measured(_COSTS, table)], results), keys=3)


def _shares(results: Results) -> tuple[pd.DataFrame, list[str]]:
    """A row for each setting with TTFT in steps and its shares of the generation time; and the
    names of the shares.
    """
    frame: Any = results.counting
    frame = frame.dropna(subset="total_s")  # answers that decoded together have no total time
    frame = frame.assign(
        prompt_tokens=range_of(frame["prompt_tokens"]),
        answer_tokens=range_of(frame["generated_tokens"], _ANSWER_ENDS),
        ttft_steps=frame["ttft_s"] / frame["step_s"],
    )
    grouped = with_sums(frame, *_LENGTHS).groupby([*SETTING, *_LENGTHS], sort=False)
    counted = {
        "examples": ("id", "size"),
        "ttft_s": ("ttft_s", "sum"),
        "total_s": ("total_s", "sum"),
    }
    shares: Any = in_order(grouped.agg(**counted, ttft_steps=("ttft_steps", "mean")).reset_index())
    shares["share"] = 100 * shares["ttft_s"] / shares["total_s"]
    headings = {("all", "all"): "TTFT, % of the time"}
    headings |= {(name, "all"): f"prompt {name}" for name in ranges_in(shares["prompt_tokens"])}
    headings |= {
        ("all", name): f"answer {name}" for name in ranges_in(shares["answer_tokens"], _ANSWER_ENDS)
    }
    by_part = shares.pivot(index=SETTING, columns=_LENGTHS, values="share").reindex(
        columns=[*headings]
    )
    whole = shares[shares[_LENGTHS].eq("all").all(axis=1)].assign(task="all")
    return whole.join(by_part.set_axis([*headings.values()], axis=1), on=SETTING), [
        *headings.values()
    ]


def _costs(section: Section) -> Iterator[dict[str, Any]]:
    """A row for each task of a section."""
    rows = section.of(section.arms("studied"))
    theirs = match_baselines(rows, section.frame)
    rows = rows.assign(
        **{f"theirs_{name}": theirs[name] for name in ("ttft_s", "total_s", "step_s")}
    )
    rows = rows.dropna(subset=["revived_tokens", "total_s", "theirs_total_s"])
    rows = rows.assign(
        steps=rows["generated_tokens"] - 1, decoding_s=rows["total_s"] - rows["ttft_s"]
    )
    measured_speedups = section.by_task(rows).set_index("name")
    for task, group in rows.groupby("task", sort=False):
        others: Any = rows[rows["task"] != task]
        if others.empty:
            continue
        (step, token), *_ = np.linalg.lstsq(
            others[["steps", "revived_tokens"]].to_numpy(float), others["decoding_s"]
        )
        predicted = group["ttft_s"] + step * group["steps"] + token * group["revived_tokens"]
        both: Any = (
            group.assign(predicted=predicted)
            .groupby("dataset")[["theirs_total_s", "predicted"]]
            .sum()
        )
        unit = group["theirs_step_s"].mean()
        prefill_token = group["theirs_ttft_s"].sum() / group["prompt_tokens"].sum()
        yield {
            **group.iloc[0][SETTING],
            "task": task,
            "examples": group["id"].nunique(),
            "prefill_saved": (group["theirs_ttft_s"] - group["ttft_s"]).mean() / unit,
            "revived_a_step": group["revived_tokens"].sum() / max(1, group["steps"].sum()),
            "step_cost": step / unit,
            "token_cost": token / unit,
            "prefill_token_cost": prefill_token / unit,
            "revived_in_prefill": token / prefill_token,
            "predicted": (both["theirs_total_s"] / both["predicted"]).mean(),
            **measured_speedups.loc[task, forms("generation_speedup")],
        }
