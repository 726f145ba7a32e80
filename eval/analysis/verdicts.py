"""The paper's claims, each with what the stored runs say: it holds, it does not hold, or it cannot be seen.

`step_cost` has the model of cost behind the claim that LazyLLM is never slower.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import BASELINE, SECTION, STUDIED, target_of, with_ends
from eval.analysis.paper_tables import is_table1_preset
from eval.analysis.style import as_published, studied
from eval.analysis.table import EXAMPLES, MODEL, Column, Table, cells, forms
from eval.benchmarks.datasets import DATASETS
from eval.store.aggregate import drawn_means, mean_interval, on_common_examples, with_baselines
from eval.store.results import Results, first_turns
from eval.store.runs import stored_once

HOLDS, FAILS, UNSEEN, NO_RUN = "holds", "does not hold", "cannot be seen", "no run"
_RULES = {">": operator.gt, "<": operator.lt, "<=": operator.le}

Value = tuple[float, float, float]  # with both ends of its 95 % interval


class _Section:
    """One model and suite. usual: the runs of LazyLLM with Table 1's parameters, else of the setting that `studied`
    chooses. examples: first turns, the baseline's too. by_task: as `Results.by_task`. tasks: its rows of the usual
    setting, without datasets.
    """

    def __init__(self, results: Results, model: str, suite: str) -> None:
        self.model, self.suite = model, suite
        published = as_published(results)
        of_section = published.where(
            lambda run: run.model == model and any(DATASETS[name].suite == suite for name in run.datasets)
        )
        preset = of_section.where(lambda run: run.method == STUDIED and is_table1_preset(run.settings))
        self.usual = preset if preset.runs else studied(of_section)
        self.labels = [run.label for run in self.usual.runs]
        frames: Any = with_baselines(first_turns(published.frame)), published.by_task
        self.examples, self.by_task = (frame[(frame["model"] == model) & (frame["suite"] == suite)] for frame in frames)
        self.tasks = self.by_task[self.by_task["label"].isin(self.labels) & (self.by_task["level"] != "dataset")]

    def counts(self) -> list[tuple[int, np.ndarray]]:
        """(prompt tokens, [steps, groups of layers] prompt tokens computed so far) of the usual setting's examples."""
        rows = stored_once(self.usual.runs, ["prompt_tokens", "method.computed"])
        return [(prompt_tokens, np.array(computed)) for prompt_tokens, computed in rows]


def _of_row(rows: Any, column: str, largest: bool = False) -> Value | None:
    """Of the row with the smallest or largest value."""
    rows = rows.sort_values(column, ascending=not largest)
    return None if rows.empty else tuple(rows.iloc[0][forms(column)])


def _usual(section: _Section, column: str, level: str = "task") -> Value | None:
    """LazyLLM's task with the smallest value, or the mean over tasks ("all")."""
    return _of_row(section.tasks[section.tasks["level"] == level], column)


def _fastest(section: _Section, method: str) -> Value | None:
    rows = section.by_task[(section.by_task["method"] == method) & (section.by_task["level"] == "task")]
    return _of_row(rows, "ttft_speedup", largest=True)


def _ttft_in(section: _Section, unit: str, scale: float) -> Value | None:
    """The baseline's TTFT, divided by another time of the same example."""
    rows = section.examples[section.examples["method"] == BASELINE]
    values = on_common_examples(rows.assign(ratio=scale * rows["ttft_s"] / rows[unit], label=BASELINE), "ratio")
    return with_ends(drawn_means(values)[:, 0]) if len(values) else None


def _kept_at(section: _Section, speedup: float) -> Value | None:
    """The best relative score on multi-document QA of the settings that are at least this fast, to one per cent."""
    rows = section.by_task[(section.by_task["method"] == STUDIED) & (section.by_task["name"] == "multi_doc_qa")]
    rows = rows[rows[["ttft_speedup", "ideal_ttft_speedup"]].max(axis=1) > 0.99 * speedup]
    return _of_row(rows, "relative_score", largest=True)


def _lead(section: _Section, column: str, other: str) -> Value | None:
    """LazyLLM's lead over another method: the mean over the ideal speedups that both have, on the same examples."""
    rows = section.examples.assign(target=section.examples["settings"].map(target_of))
    rows = rows[rows["method"].isin([STUDIED, other])].dropna(subset=["target", column])
    leads = []
    for _, group in rows.assign(label=rows["method"]).groupby("target"):
        values: Any = on_common_examples(group, column)
        if len(values) and len(values.columns) == 2:
            leads.append(drawn_means(values[[STUDIED, other]]) @ [1, -1])
    return with_ends(_SIGN[column] * np.mean(leads, axis=0)) if leads else None


def _between_ends(section: _Section, column: str, along: int) -> Value | None:
    """How much better the largest layer (along=0) or keep ratio (1) of single pruning layers is than the smallest,
    at the same other one: the mean over these.
    """
    rows = section.examples[section.examples["method"] == STUDIED].dropna(subset=column)
    rows = rows.assign(label=rows["settings"].map(_single_layer)).dropna(subset="label")
    values = on_common_examples(rows, column)
    if not len(values):
        return None
    drawn = dict(zip(values.columns, drawn_means(values).T, strict=True))
    lines: dict[float, list[tuple[float, float]]] = {}
    for point in sorted(drawn):
        lines.setdefault(point[1 - along], []).append(point)
    gains = [drawn[line[-1]] - drawn[line[0]] for line in lines.values() if len(line) > 1]
    return with_ends(_SIGN[column] * np.mean(gains, axis=0)) if gains else None


_SIGN = {"score": 1, "kl": -1}  # of what is better


def _single_layer(settings: str) -> tuple[int, float] | None:
    """(layer, keep ratio) of a schedule with one pruning layer."""
    schedule = json.loads(settings).get("schedule")
    single = isinstance(schedule, dict) and len(schedule) == 1
    return next(((int(layer), keep) for layer, keep in schedule.items()), None) if single else None


def _largest_share(section: _Section) -> Value | None:
    """Of the prompt's tokens, the largest share that any layer ran in any example."""
    shares = [100 * computed.max() / tokens for tokens, computed in section.counts()]
    return (max(shares),) * 3 if shares else None


def _deeper_saves(section: _Section) -> Value | None:
    """How much smaller the share of tokens computed by the end is in the last layers than in the first."""
    saved = [100 * (computed[-1, 0] - computed[-1, -1]) / tokens for tokens, computed in section.counts()]
    if not saved:
        return None
    return float(np.mean(saved)), *mean_interval(np.array(saved))


@dataclass(frozen=True)
class Claim:
    """section: of the paper. paper: its number, of Llama 2 7B. rule: holds if the whole interval obeys it. shown: the
    table or figure to look at. measure, arguments: make the value from a `_Section`.
    """

    section: str
    text: str
    paper: str
    rule: str
    shown: str
    digits: int
    measure: Callable[..., Value | None]
    arguments: tuple[Any, ...] = ()

    def verdict(self, value: Value | None) -> str:
        """Without an interval nothing can be seen."""
        if value is None:
            return NO_RUN
        sign, bound = self.rule.split()
        obeys = {bool(_RULES[sign](end, float(bound))) for end in value[1:]}
        return UNSEEN if np.isnan(value).any() or len(obeys) > 1 else HOLDS if obeys == {True} else FAILS


_OTHERS = {"static_pruning": "static pruning", "random_drop": "random token drop"}
_UNITS = {"score": (", points", 2), "kl": (", nats of KL (ours)", 3)}
CLAIMS = (
    Claim("1", "TTFT, in decoding steps of the baseline", "21", "> 21", "ttft_share", 1, _ttft_in, ("step_s", 1)),
    Claim("1", "TTFT, % of the baseline's generation time", "23", "> 23", "ttft_share", 1, _ttft_in, ("total_s", 100)),
    Claim("5.1", "Score kept, % (mean over tasks)", "98.9", "> 98.9", "table1", 1, _usual, ("relative_score", "all")),
    Claim("5.1", "TTFT speedup (slowest task)", "1.36", "> 1", "table1", 2, _usual, ("ttft_speedup",)),
    Claim("5.1", "Prompt compression's TTFT speedup (fastest task)", "0.49", "< 1", "table1", 2, _fastest,
          ("prompt_compression",)),
    Claim("5.2", "Score kept at 2.34x, % (multi-document QA)", "99", "> 99", "figure5", 1, _kept_at, (2.34,)),
    Claim("5.2", "Score kept at 3x, % (multi-document QA)", "90", "> 90", "figure5", 1, _kept_at, (3.0,)),
    *(Claim("5.2", f"Better than {name} at one speedup{unit}", "", "> 0", "figure5", digits, _lead, (column, method))
      for method, name in _OTHERS.items() for column, (unit, digits) in _UNITS.items()),
    Claim("5.3", "Prompt tokens computed by the end, %", "75.5", "< 100", "table2", 1, _usual,
          ("pct_prompt_tokens_computed", "all")),
    Claim("5.3", "Generation speedup (mean over tasks)", "1.33", "> 1", "table2", 2, _usual,
          ("generation_speedup", "all")),
    Claim("3", "Never slower: generation speedup (slowest task)", "1.01", "> 1", "step_cost", 2, _usual,
          ("generation_speedup",)),
    Claim("3", "No token twice in a layer: largest share run, %", "", "<= 100", "figure7", 1, _largest_share),
    *(Claim("5.4", f"{what}{unit}", "", "> 0", "figure6", digits, _between_ends, (column, along))
      for along, what in ((1, "Keeping most better than fewest"), (0, "Pruning latest better than earliest"))
      for column, (unit, digits) in _UNITS.items()),
    Claim("5.5", "First layers compute more than the last, points", "", "> 0", "figure7", 1, _deeper_saves),
)  # fmt: skip
_COLUMNS = (
    MODEL, Column("section", "section"), Column("claim", "claim"), Column("paper", "paper"), Column("ours", "ours"),
    Column("rule", "holds if"), Column("verdict", "verdict"), Column("shown", "where"),
)  # fmt: skip


def verdicts(results: Results) -> Table:
    """Each claim of the paper about LazyLLM, for each model and suite that was run: the number and the verdict."""
    rows = []
    for section in _sections(results):
        for claim in CLAIMS:
            value = claim.measure(section, *claim.arguments)
            numbers = dict(zip(forms("value"), value or (np.nan,) * 3, strict=True))
            row = {"model": section.model, "suite": section.suite, **vars(claim), **numbers}
            ours = Column("value", "", claim.digits).text(row)
            rows.append(row | {"claim": claim.text, "verdict": claim.verdict(value), "ours": ours})
    columns = [*SECTION, "section", "claim", "paper", *forms("value"), "rule", "verdict", "shown", "ours"]
    frame = pd.DataFrame(rows, columns=columns)
    caption = (
        "holds, does not hold: the whole 95 % bootstrap interval over examples obeys the rule, or none of it. cannot "
        "be seen: some of it does, or there is no interval. The paper's numbers are of Llama 2 7B on LongBench. "
        "LazyLLM has Table 1's parameters if these were run, else the setting of Figure 7. At 2.34x and "
        "3x: the best setting with this measured or ideal speedup. At one speedup: the mean over the ideal speedups "
        "that both methods have. ±: half of the interval."
    )
    shown = cells(frame, _COLUMNS, results)
    return Table("verdicts", "The paper's claims", caption, frame.drop(columns="ours"), shown, keys=3)


def _sections(results: Results) -> list[_Section]:
    """The models and suites of the runs of LazyLLM."""
    frame: Any = as_published(results).frame
    return [_Section(results, *key) for key in frame[frame["method"] == STUDIED].groupby(SECTION).groups]


_COSTS = (
    MODEL,
    Column("task", "task"),
    EXAMPLES,
    Column("prefill_saved", "prefill saves", 1),
    Column("revived_a_step", "revived a step", 1),
    Column("step_cost", "a step costs", 2),
    Column("token_cost", "a revived token", 3),
    Column("prefill_token_cost", "a token in prefill", 3),
    Column("predicted", "speedup, predicted", 2),
    Column("generation_speedup", "speedup, measured", 2),
)


def step_cost(results: Results) -> Table:
    """Why LazyLLM's whole answers are faster or slower: what its prefill saves, and what steps and revivals cost."""
    rows = [row for section in _sections(results) for row in _costs(section)]
    frame = pd.DataFrame(
        rows, columns=[*SECTION, *(column.name for column in _COSTS[1:-1]), *forms("generation_speedup")]
    )
    caption = (
        "Unit of all costs: one decoding step of the baseline; a token in prefill: the baseline's. An answer's "
        "decoding time is fitted (least squares, on the examples of all other tasks) as steps times a step's cost plus "
        "revived tokens (mean over layers) times a revived token's cost; predicted: the speedup that this gives with "
        "the measured TTFT. LazyLLM is slower if steps and revivals cost more than the prefill saves. ±: half of the "
        "95 % bootstrap interval over examples."
    )
    return Table("step_cost", "What a decoding step of LazyLLM costs", caption, frame, cells(frame, _COSTS, results), 2)


def _costs(section: _Section) -> list[dict[str, Any]]:
    """A row for each task of a section."""
    rows = section.examples[section.examples["label"].isin(section.labels)]
    rows = rows.dropna(subset=["revived_tokens", "total_s", "baseline_total_s"])
    rows = rows.assign(steps=rows["generated_tokens"] - 1, decoding_s=rows["total_s"] - rows["ttft_s"])
    measured = section.tasks.set_index("name")
    costs = []
    for task, group in rows.groupby("task", sort=False):
        others = rows[rows["task"] != task]
        if others.empty:
            continue
        (step, token), *_ = np.linalg.lstsq(others[["steps", "revived_tokens"]].to_numpy(float), others["decoding_s"])
        predicted = group["ttft_s"] + step * group["steps"] + token * group["revived_tokens"]
        both = group.assign(predicted=predicted).groupby("dataset")[["baseline_total_s", "predicted"]].sum()
        unit = group["baseline_step_s"].mean()
        costs.append({
            "model": section.model, "suite": section.suite, "task": task, "examples": group["id"].nunique(),
            "prefill_saved": (group["baseline_ttft_s"] - group["ttft_s"]).mean() / unit,
            "revived_a_step": group["revived_tokens"].sum() / max(1, group["steps"].sum()),
            "step_cost": step / unit, "token_cost": token / unit,
            "prefill_token_cost": group["baseline_ttft_s"].sum() / group["prompt_tokens"].sum() / unit,
            "predicted": (both["baseline_total_s"] / both["predicted"]).mean(),
            **measured.loc[task, forms("generation_speedup")],
        })  # fmt: skip
    return costs
