"""The paper's claims (published/claims.yaml) beside what stored runs say; `step_cost`: what whole answers cost."""

import json
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import yaml

from eval.analysis.columns import BASELINE, SECTION, STUDIED, target_of, with_ends
from eval.analysis.paper_tables import PAPER_MODELS, PUBLISHED, is_table1_preset
from eval.analysis.style import as_published, studied
from eval.analysis.table import EXAMPLES, MODEL, Column, Rows, as_table, cells, forms
from eval.store.aggregate import beside, by_task, drawn_mean, drawn_means, on_common_examples
from eval.store.results import Results, first_turns
from eval.store.visit import read_trace

AGREES, HIGHER, LOWER = "agrees", "differs (higher)", "differs (lower)"
HOLDS, FAILS, UNSEEN, NOT_RUN, NO_NUMBER = "holds", "does not hold", "cannot be seen", "not run", "-"
_RULES = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_PAPER_SUITE = "longbench"
Value = tuple[float, float, float]  # with both ends of its 95 % interval


@dataclass(frozen=True)
class Claim:
    """A claim of the paper; its fields are described at the top of claims.yaml."""

    section: str
    claim: str
    measure: str
    preset: str
    shown: str
    digits: int
    arguments: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    tolerance: str = ""
    holds: str = ""

    def verdict(self, parts: list[Value], paper_model: str | None) -> str:
        """What the value says of the claim. parts: one value, or one for each task or step."""
        if not parts:
            return NOT_RUN
        if self.holds:
            obeys = [self._obeys(part) for part in parts]
            return FAILS if FAILS in obeys else UNSEEN if UNSEEN in obeys else HOLDS
        if paper_model not in self.paper:
            return NO_NUMBER
        ((_, low, high),) = parts
        paper = self.paper[paper_model]
        amount, unit = self.tolerance.split()
        allowed = float(amount) * (paper / 100 if unit == "%" else 1)
        if np.isnan([low, high]).any():
            return UNSEEN
        # rounding of binary fractions is no difference
        if paper - allowed - 1e-9 <= low and high <= paper + allowed + 1e-9:
            return AGREES
        return HIGHER if low > paper + allowed else LOWER if high < paper - allowed else UNSEEN

    def _obeys(self, part: Value) -> str:
        """Of one part: the whole interval obeys the rule, or none of it, or that cannot be seen, as in a tie."""
        sign, bound = self.holds.split()
        ends = {bool(_RULES[sign](end, float(bound))) for end in part[1:]}
        is_tie = set(part) == {float(bound)} and sign in "<>"
        return UNSEEN if np.isnan(part).any() or len(ends) > 1 or is_tie else HOLDS if ends == {True} else FAILS

    def ours(self, parts: list[Value]) -> str:
        """The value for people; of several parts, the range and how many go which way."""
        values = [part[0] for part in parts if not np.isnan(part[0])]
        if not values:
            return "-"
        if len(parts) == 1:
            return Column("value", "", self.digits).cell(dict(zip(forms("value"), parts[0], strict=True)))
        obeys = [self._obeys(part) for part in parts]
        low, high = (f"{value:.{self.digits}f}" for value in (min(values), max(values)))
        return f"{low} to {high}: {obeys.count(HOLDS)} of {len(parts)} hold, {obeys.count(FAILS)} do not"


@cache
def claims() -> tuple[Claim, ...]:
    """The claims of published/claims.yaml, in order."""
    return tuple(Claim(**entry) for entry in yaml.safe_load((PUBLISHED / "claims.yaml").read_text(encoding="utf-8")))


class _Section:
    """One model on one suite, without ablations and runs that differ from the model's others.

    frame: of `Results.frame`, all rows. rows: those that count.
    """

    def __init__(self, results: Results, model: str, suite: str) -> None:
        self.model, self.suite, self.results = model, suite, results.usual
        frame: Any = self.results.frame
        self.frame = as_published(frame[(frame["model"] == model) & (frame["suite"] == suite)])
        self.rows = self.frame[self.frame["counts"]]
        models = {run.model: run.paper_model for run in self.results.runs}
        self.paper_model = models.get(model) if suite == _PAPER_SUITE else None

    def of(self, preset: str, method: str = STUDIED) -> Any:
        """The rows of a method's arms that belong to an experiment.

        preset: "table1", "figure5" (settings given by a speedup), "figure6" (schedules of one layer), or "any": the
        setting of LazyLLM that figures show.
        """
        rows = self.rows[self.rows["method"] == method]
        if preset == "any":
            shown = studied(self.results)
            labels = shown[shown["model"] == self.model]["label"].unique()
            table1 = self.of("table1")
            return table1 if len(table1) else rows[rows["label"].isin(labels)]
        belongs: dict[str, Callable[[str], bool]] = {
            "table1": is_table1_preset,
            "figure5": lambda settings: target_of(settings) is not None,
            "figure6": lambda settings: _single_layer(settings) is not None,
        }
        chosen = {text: belongs[preset](text) for text in rows["settings"].unique()}
        return rows[rows["settings"].map(chosen).astype(bool)]

    def by_task(self, rows: Any) -> Any:
        """`by_task` of these rows, without datasets, each beside its baseline."""
        whole = by_task(pd.concat([rows, self.frame[~self.frame.index.isin(rows.index)].assign(counts=False)]))
        return whole[whole["level"] != "dataset"]


def _single_layer(settings: str) -> tuple[int, float] | None:
    """(layer, keep ratio) of a schedule with one pruning layer. settings: JSON."""
    schedule = json.loads(settings).get("schedule")
    if not isinstance(schedule, dict) or len(schedule) != 1:
        return None
    ((layer, keep),) = schedule.items()
    return int(layer), keep


def _values(rows: Any, column: str) -> list[Value]:
    """The values of these rows of `by_task`."""
    return [tuple(row) for row in rows[forms(column)].to_numpy(dtype=float).tolist()]


def _best(rows: Any, column: str) -> list[Value]:
    """The largest of these values; NaN only if all are."""
    return _values(rows.sort_values(column, na_position="first"), column)[-1:]


def _by_task(
    section: _Section, preset: str, column: str, method: str = STUDIED, only: str | None = None
) -> list[Value]:
    """A method's value of each task. only: the "mean" over tasks, or the value of the "fastest" task."""
    whole = section.by_task(section.of(preset, method))
    if only == "mean":
        return _values(whole[whole["level"] == "all"], column)[:1]
    tasks = whole[whole["level"] == "task"]
    return _values(tasks, column) if only is None else _best(tasks, column)


def _ttft_in(section: _Section, preset: str, unit: str, scale: float = 1) -> list[Value]:
    """The baseline's TTFT, divided by another time of the same answer."""
    rows = first_turns(section.rows[section.rows["method"] == BASELINE])
    values = on_common_examples(rows.assign(ratio=scale * rows["ttft_s"] / rows[unit], label=BASELINE), "ratio")
    return [with_ends(drawn_means(values)[:, 0])] if len(values) else []


def _mean_of(section: _Section, preset: str, column: str) -> list[Value]:
    """The baseline's mean over all examples."""
    rows = first_turns(section.rows[section.rows["method"] == BASELINE])
    values = rows.drop_duplicates(["dataset", "id"])[column].dropna().to_numpy(dtype=float)
    return [with_ends(drawn_mean(values))] if len(values) else []


def _kept_at(section: _Section, preset: str, speedup: float) -> list[Value]:
    """The best relative score on multi-document QA of the settings that measured at least this speedup, to one per
    cent; NaN if none did."""
    rows = section.by_task(section.of(preset))
    rows = rows[rows["name"] == "multi_doc_qa"]
    fast = rows[rows["ttft_speedup"] > 0.99 * speedup]
    unreached: list[Value] = [(np.nan, np.nan, np.nan)] if len(rows) else []
    return _best(fast, "relative_score") or unreached


_SIGN = {"score": 1, "kl": -1}  # of what is better


def _leads(section: _Section, preset: str, column: str, other: str) -> list[Value]:
    """LazyLLM's lead over another method in each task: the mean over the speedups that both were solved for."""
    rows = first_turns(pd.concat([section.of(preset), section.of(preset, other)]))
    rows = rows.assign(target=rows["settings"].map(target_of), label=rows["method"]).dropna(subset=column)
    leads = []
    for _, of_task in rows.groupby("task", sort=False):
        of_targets = []
        for _, group in of_task.groupby("target"):
            values: Any = on_common_examples(group, column)
            if len(values) and len(values.columns) == 2:
                of_targets.append(drawn_means(values[[STUDIED, other]]) @ [1, -1])
        if of_targets:
            leads.append(with_ends(_SIGN[column] * np.mean(of_targets, axis=0)))
    return leads


def _gains_along(section: _Section, preset: str, column: str, along: str) -> list[Value]:
    """How much better each next layer, or keep ratio, of a single pruning layer is, at each value of the other."""
    rows = section.of(preset).dropna(subset=column)
    rows = rows.assign(label=rows["settings"].map(_single_layer))
    values = on_common_examples(rows, column) if len(rows) else rows
    if not len(values):
        return []
    drawn = dict(zip(values.columns, drawn_means(values).T, strict=True))
    axis = ("layer", "keep").index(along)
    lines: dict[float, list[tuple[float, float]]] = {}
    for point in sorted(drawn, key=lambda point: point[axis]):
        lines.setdefault(point[1 - axis], []).append(point)
    steps = [drawn[after] - drawn[before] for line in lines.values() for before, after in pairwise(line)]
    return [with_ends(_SIGN[column] * step) for step in steps]


def _counts(section: _Section, preset: str) -> list[tuple[int, np.ndarray]]:
    """(prompt tokens, [steps, groups of layers] prompt tokens computed so far) of LazyLLM's first turns."""
    rows = first_turns(section.of(preset))
    return [
        (turn.tokens, np.array(answer.cost.computed)) for turn, answer in section.results.answers(rows) if answer.cost
    ]


def _largest_share(section: _Section, preset: str) -> list[Value]:
    """Of the prompt's tokens, the largest share that any layer ran in any example."""
    shares = [100 * computed.max() / tokens for tokens, computed in _counts(section, preset)]
    return [(max(shares),) * 3] if shares else []


def _deeper_saves(section: _Section, preset: str) -> list[Value]:
    """How much smaller the share of tokens computed by the end is in the last layers than in the first."""
    saved = np.array([100 * (ran[-1, 0] - ran[-1, -1]) / tokens for tokens, ran in _counts(section, preset)])
    return [with_ends(drawn_mean(saved))] if len(saved) else []


def _below_even_share(section: _Section, preset: str) -> list[Value]:
    """The share of prompt tokens whose mean importance over the layers is below 1/n, over the traced prompts."""
    traces = [read_trace(file) for run in section.results.runs if run.model == section.model for file in run.traces]
    prompts = {(trace.dataset, trace.id): np.array(trace.importance).mean(axis=0) for trace in traces}
    shares = np.array([100 * (scores < 1 / len(scores)).mean() for scores in prompts.values()])
    return [with_ends(drawn_mean(shares))] if len(shares) else []


_MEASURES: dict[str, Callable[..., list[Value]]] = {
    measure.__name__.removeprefix("_"): measure
    for measure in (
        _by_task, _ttft_in, _mean_of, _kept_at, _leads, _gains_along, _largest_share, _deeper_saves, _below_even_share,
    )
}  # fmt: skip
_COLUMNS = (
    MODEL, Column("section", "section"), Column("claim", "claim"), Column("paper", "paper"), Column("ours", "ours"),
    Column("expected", "asked"), Column("verdict", "verdict"), Column("shown", "where"),
)  # fmt: skip


@as_table(
    30,
    title="The paper's claims",
    caption=(
        "A number agrees if the whole 95 % interval lies within the tolerance around the paper's, and differs if none "
        "of it does. A direction holds if every interval obeys it, and does not hold if one of them disobeys as a "
        "whole."
    ),
    notes=(
        "All else cannot be seen; -: the paper has no number. not run: `python run.py -m experiment=table1 "
        "model=llama2,xgen` and the other experiments of the paper; `lazyllm-bench plan` estimates their hours."
    ),
    command="python run.py -m experiment=table1 model=llama2,xgen",
)
def verdicts(results: Results) -> Rows:
    """Each claim of the paper about LazyLLM for each model: the paper's number, ours, and the verdict.

    frame: model, suite, section, claim, paper (its number for the model), expected, parts (the number of values
    behind ours), value, value_low, value_high (of a single part), verdict, shown.
    """
    judged: list[tuple[Claim, str, str, str | None, list[Value]]] = [
        (claim, section.model, section.suite, section.paper_model,
         _MEASURES[claim.measure](section, claim.preset, **claim.arguments))
        for section in _sections(results)
        for claim in claims()
    ]  # fmt: skip
    absent = [name for name in PAPER_MODELS if name not in {paper_model for *_, paper_model, _ in judged}]
    judged += [(claim, name, _PAPER_SUITE, name, []) for name in absent for claim in claims() if name in claim.paper]
    rows = []
    for claim, model, suite, paper_model, parts in judged:
        paper = claim.paper.get(paper_model or "")
        value = parts[0] if len(parts) == 1 else (np.nan,) * 3
        rows.append({
            "model": model, "suite": suite, "section": claim.section, "claim": claim.claim,
            "paper": "-" if paper is None else f"{paper:g}", "parts": len(parts),
            "expected": claim.holds or f"within {claim.tolerance}",
            **dict(zip(forms("value"), value, strict=True)), "ours": claim.ours(parts),
            "verdict": claim.verdict(parts, paper_model), "shown": claim.shown,
        })  # fmt: skip
    columns = [*SECTION, "section", "claim", "paper", "expected", "parts", *forms("value"), "verdict", "shown"]
    frame = pd.DataFrame(rows, columns=[*columns, "ours"])
    shown = cells(frame, _COLUMNS, results)
    return Rows(frame.drop(columns="ours"), shown, keys=3)


def _sections(results: Results) -> list[_Section]:
    """The models and suites of the runs of LazyLLM."""
    frame: Any = as_published(results.usual.frame)
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
    rows = [row for section in _sections(results) for row in _costs(section)]
    frame = pd.DataFrame(
        rows, columns=[*SECTION, *(column.name for column in _COSTS[1:-1]), *forms("generation_speedup")]
    )
    shown = cells(frame, _COSTS, results)
    return Rows(frame, shown, keys=2)


def _costs(section: _Section) -> list[dict[str, Any]]:
    """A row for each task of a section."""
    rows = first_turns(section.of("any"))
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
        costs.append({
            "model": section.model, "suite": section.suite, "task": task, "examples": group["id"].nunique(),
            "prefill_saved": (group["theirs_ttft_s"] - group["ttft_s"]).mean() / unit,
            "revived_a_step": group["revived_tokens"].sum() / max(1, group["steps"].sum()),
            "step_cost": step / unit, "token_cost": token / unit,
            "prefill_token_cost": group["theirs_ttft_s"].sum() / group["prompt_tokens"].sum() / unit,
            "predicted": (both["theirs_total_s"] / both["predicted"]).mean(),
            **measured.loc[task, forms("generation_speedup")],
        })  # fmt: skip
    return costs
