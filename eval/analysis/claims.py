"""The paper's claims about LazyLLM, in our words (arXiv 2407.14057v1), and what stored runs say of
each.

A claim is a row of eval/analysis/published/claims.csv: its text, the function here that measures it
(`measure`, with `arguments`), the arms that it measures (`rows`, `method`: `Section.arms`), what
their rows must have for a verdict (`needs`), the paper's number by model (llama2, xgen), and how
far ours may be from it (`tolerance`, in per cent of the number or in points), or the direction that
each part of the value must obey (`holds`); `digits`, `widest` (of `Column`), and `exhibit`, the
table or figure to look at.

A claim is judged for one setting of each of its methods, apart from what its experiment varies. Of
several it measures nothing, as a mean over them is no setting's.
"""

import csv
import json
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import (
    BASELINE,
    PAPER_SPEEDUP,
    STUDIED,
    single_layer,
    targets_of,
    with_ends,
)
from eval.analysis.paper_tables import PUBLISHED, TASK_NAMES
from eval.analysis.style import as_published, studied
from eval.analysis.table import Column, forms
from eval.benchmarks.datasets import DATASETS
from eval.store.results import Results
from eval.store.runs import StoredArm, is_ablation, label_of
from eval.store.summary import FEWEST, by_task, drawn_mean, drawn_means, on_common_examples
from eval.store.trace import read_trace

AGREES, HIGHER, LOWER = "agrees", "differs (higher)", "differs (lower)"
HOLDS, FAILS, UNDECIDED, NOT_RUN, NO_NUMBER = "holds", "does not hold", "undecided", "not run", "-"
_RULES = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
PAPER_SUITE = "longbench"
PROMPT_LIMITS = {"llama2": 3500, "xgen": 7500}  # tokens, as in the paper
MOST_FAILED = 0.02  # share of a claim's rows on which an answer failed: more decide nothing
_VARIED = {"figure5": "speedup", "figure6": "schedule"}  # by the experiment, within a setting
Value = tuple[float, float, float]  # with both ends of its 95 % interval


class Section:
    """One model on one suite, without ablations.

    model: its name. frame: of `Results.frame`, all rows. rows: those that count.
    """

    def __init__(self, results: Results, model: str, suite: str) -> None:
        self.model, self.suite, self.results = model, suite, results
        frame: Any = results.frame
        is_own = (frame["model"] == model) & (frame["suite"] == suite)
        self.frame = as_published(frame[is_own])
        self.rows = self.frame[self.frame["counts"]]
        folders = set(self.frame["folder"])
        self.runs = [run for run in results.runs if str(run.folder) in folders]
        models = {run.model: run.paper_model for run in results.runs}
        self.paper_model = models.get(model) if suite == PAPER_SUITE else None

    def arms(self, preset: str, method: str = STUDIED) -> list[StoredArm]:
        """A method's arms that belong to an experiment, without ablations.

        preset: "table1", "figure5" (settings given by a speedup), "figure6" (schedules of one
        layer), "studied" (those of table1, else of the one setting of LazyLLM that figures show),
        or "all".
        """
        arms = [arm for run in self.runs for arm in run.arms.values() if arm.method == method]
        if method == STUDIED:
            arms = [arm for arm in arms if not is_ablation(arm.values)]
        if preset == "studied":
            rows = studied(self.results)
            settings = set(rows.loc[rows["model"] == self.model, "settings"])
            table1 = self.arms("table1", method)
            return table1 or [arm for arm in arms if arm.settings in settings]
        belongs: dict[str, Callable[[StoredArm], bool]] = {
            "all": lambda _: True,
            "table1": lambda arm: arm.speedup == PAPER_SPEEDUP,
            "figure5": lambda arm: isinstance(arm.speedup, float | int),
            "figure6": lambda arm: single_layer(arm.settings) is not None,
        }
        return list(filter(belongs[preset], arms))

    def of(self, arms: Iterable[StoredArm]) -> Any:
        """The rows of these arms that count."""
        keys = pd.MultiIndex.from_frame(self.rows[["method", "settings"]])
        return self.rows[keys.isin({(arm.method, arm.settings) for arm in arms})]

    def failed(self, arms: Iterable[StoredArm]) -> set[tuple[str, str]]:
        """(dataset, id) of each example on which one of these arms, or its baseline, failed.

        Failures in a dataset for which another run of the arm counts are left out.
        """
        keys = {(arm.method, arm.settings, arm.seed) for arm in arms}
        found = set[tuple[str, str]]()
        for run in self.runs:
            for dataset, example, name in run.failed:
                concerned = run.arms.values() if run.arms[name].is_baseline else [run.arms[name]]
                settings = {(arm.method, arm.settings, arm.seed) for arm in concerned} & keys
                folders = {
                    self._counting.get((*setting, dataset), str(run.folder)) for setting in settings
                }
                if DATASETS[dataset].suite == self.suite and str(run.folder) in folders:
                    found.add((dataset, example))
        return found

    @cached_property
    def _counting(self) -> dict[Any, str]:
        """{(method, settings, seed, dataset): the folder of the run that counts}."""
        return self.rows.set_index(["method", "settings", "seed", "dataset"])["folder"].to_dict()

    def identities(self, rows: Any) -> list[dict[str, Any]]:
        """Of the runs of these rows."""
        folders = set(rows["folder"])
        return [run.identity for run in self.results.runs if str(run.folder) in folders]

    def by_task(self, rows: Any) -> Any:
        """`by_task` of these rows, without datasets, each beside its baseline."""
        whole = by_task(
            pd.concat([rows, self.frame[~self.frame.index.isin(rows.index)].assign(counts=False)])
        )
        return whole[whole["level"] != "dataset"]


def _tasks(section: Section, rows: Any) -> str:
    there = [task for task in TASK_NAMES if task in set(rows["task"])]
    if len(there) == len(TASK_NAMES):
        return ""
    return f"needs the paper's {len(TASK_NAMES)} tasks, has {', '.join(there) or 'none'}"


def _whole_answers(section: Section, rows: Any) -> str:
    return _unlimited(section, rows, "max_new_tokens", None, "whole answers")


def _whole_prompts(section: Section, rows: Any) -> str:
    limit = PROMPT_LIMITS.get(section.paper_model or "")
    wanted = f"max_prompt_tokens={limit}"
    return _unlimited(section, rows, "max_prompt_tokens", limit, wanted) if limit else ""


def _unlimited(section: Section, rows: Any, key: str, whole: int | None, wanted: str) -> str:
    """Say which other values than `whole` a key has in the identities of these rows' runs."""
    values = {identity.get(key, whole) for identity in section.identities(rows)} - {whole}
    return f"needs {wanted}, has {key}={', '.join(map(str, sorted(values)))}" if values else ""


def _steps(section: Section, rows: Any) -> str:
    return "" if rows["token_s"].notna().any() else "needs times of single steps: batch_size=1"


def _forced(section: Section, rows: Any) -> str:
    return "" if rows["answer_kl"].notna().any() else "needs fidelity=answer"


# What rows must have for a verdict: each says what they lack
_NEEDS = {
    "tasks": _tasks,
    "answers": _whole_answers,
    "prompts": _whole_prompts,
    "steps": _steps,
    "forced": _forced,
}


@dataclass(frozen=True)
class Finding:
    """What runs say of a claim.

    values: with their intervals. lacking: what the rows lack for a verdict ("" for nothing).
    failed, examples: rows on which an answer failed, of how many.
    """

    values: list[Value]
    lacking: str = ""
    failed: int = 0
    examples: int = 0

    @property
    def decides(self) -> bool:
        """Whether a verdict can be given."""
        return bool(self.values) and not self.lacking


@dataclass(frozen=True)
class Claim:
    """A claim of the paper: a row of claims.csv, whose columns the top of this file explains."""

    section: str
    claim: str
    measure: str
    arguments: dict[str, Any]
    rows: str
    method: str
    needs: tuple[str, ...]
    paper: dict[str, float]
    tolerance: str
    holds: str
    digits: int
    widest: float | None
    exhibit: str

    def judged(self, sections: Sequence[Section]) -> Finding:
        """What runs say of the claim.

        sections: one model on one suite, in runs that share no table: of those that can decide the
        claim, the one with most examples counts.
        """
        found = map(self._find, sections)
        return max(
            found, key=lambda finding: (finding.decides, bool(finding.values), finding.examples)
        )

    def _find(self, section: Section) -> Finding:
        methods = [self.method, *filter(None, [self.arguments.get("other")])]
        arms = [arm for method in methods for arm in section.arms(self.rows, method)]
        rows, failed = section.of(arms), section.failed(arms)
        # on the rows that all arms have answered
        examples = pd.MultiIndex.from_frame(rows[["dataset", "id"]])
        rows = rows[~examples.isin(failed)]
        number = len(set(examples) | failed)
        several = self._list_settings(rows)
        lacking = [
            text for need in self.needs if len(rows) and (text := _NEEDS[need](section, rows))
        ]
        if len(failed) > MOST_FAILED * number:
            share = f"{100 - 100 * MOST_FAILED:g} %"
            lacking.append(f"needs {share} of the rows, failed on {len(failed)} of {number}")
        values = [] if several else _MEASURES[self.measure](section, rows, **self.arguments)
        return Finding(values, "; ".join([*several, *lacking]), len(failed), number)

    def _list_settings(self, rows: Any) -> list[str]:
        """A sentence for each method of several settings, apart from what the experiment varies."""
        found = defaultdict[str, set[str]](set)
        for method, text in set(rows[["method", "settings"]].itertuples(index=False, name=None)):
            settings = json.loads(text)
            settings.pop(_VARIED.get(self.rows), None)
            found[method].add(label_of(method, settings))
        return [
            f"needs one setting of {method}, has {' and '.join(sorted(labels))}"
            for method, labels in found.items()
            # importance is of the model, whatever ran
            if len(labels) > 1 and self.rows != "all"
        ]

    def verdict(self, parts: list[Value], paper_model: str | None, lacking: str = "") -> str:
        """What the value says of the claim. parts: one value, or one for each task or step."""
        if not parts or lacking:
            return NOT_RUN
        if self.holds:
            obeys = self._judge(parts)
            return FAILS if FAILS in obeys else UNDECIDED if UNDECIDED in obeys else HOLDS
        if paper_model not in self.paper:
            return NO_NUMBER
        ((_, low, high),) = parts
        paper = self.paper[paper_model]
        amount, unit = self.tolerance.split()
        allowed = float(amount) * (paper / 100 if unit == "%" else 1)
        if np.isnan([low, high]).any():
            return UNDECIDED
        # rounding of binary fractions is no difference
        if paper - allowed - 1e-9 <= low and high <= paper + allowed + 1e-9:
            return AGREES
        return HIGHER if low > paper + allowed else LOWER if high < paper - allowed else UNDECIDED

    def _judge(self, parts: list[Value]) -> list[str]:
        """Of each part: its whole interval obeys the rule, or none of it, even if widened for the
        number of parts, or it is undecided, as in a tie.
        """
        sign, number = self.holds.split()
        rule, bound, found = _RULES[sign], float(number), list[str]()
        for part in parts:
            ends = np.array(part[1:])
            wide = part[0] + _widening(len(parts)) * (ends - part[0])
            known = not np.isnan(part).any() and (set(part) != {bound} or "=" in sign)
            obeys = known and rule(ends, bound).all()
            disobeys = known and not rule(wide, bound).any()
            found.append(HOLDS if obeys else FAILS if disobeys else UNDECIDED)
        return found

    def rows_to_decide(self, parts: list[Value], rows: int) -> float:
        """About how many rows decide an undecided direction: intervals narrow with their root, and
        one part that disobeys is enough.
        """
        sign, bound = self.holds.split()
        needed: dict[bool, list[float]] = {True: [], False: []}
        for part, verdict in zip(parts, self._judge(parts), strict=True):
            if verdict == UNDECIDED and not np.isnan(part).any() and part[0] != float(bound):
                obeys = _RULES[sign](part[0], float(bound))
                half = (part[2] - part[1]) / 2 * (1 if obeys else _widening(len(parts)))
                needed[obeys].append(rows * (half / (part[0] - float(bound))) ** 2)
        return min(needed[False], default=max(needed[True], default=np.nan))

    def ours(self, parts: list[Value]) -> str:
        """The value for people; of several parts, the range and how many go which way."""
        values = [part[0] for part in parts if not np.isnan(part[0])]
        if not values:
            return "-"
        if len(parts) == 1:
            return Column("value", "", self.digits, widest=self.widest).cell(
                dict(zip(forms("value"), parts[0], strict=True))
            )
        obeys = self._judge(parts)
        low, high = (f"{value:.{self.digits}f}" for value in (min(values), max(values)))
        return (
            f"{low} to {high}: {obeys.count(HOLDS)} of {len(parts)} hold, {obeys.count(FAILS)} do "
            "not"
        )


def _widening(parts: int) -> float:
    """How much wider intervals must be for all of them to hold at 95 % (Bonferroni; normal)."""
    quantile = NormalDist().inv_cdf
    return quantile(1 - 0.025 / parts) / quantile(0.975)


def _values(rows: Any, column: str) -> list[Value]:
    """The values of these rows of `by_task`."""
    return [tuple(row) for row in rows[forms(column)].to_numpy(dtype=float).tolist()]


def _best(rows: Any, column: str) -> list[Value]:
    """The largest of these values; NaN only if all are."""
    return _values(rows.sort_values(column, na_position="first"), column)[-1:]


def _by_task(section: Section, rows: Any, column: str, only: str | None = None) -> list[Value]:
    """The value of each task. only: the "mean" over tasks, or the value of the "fastest" task."""
    whole = section.by_task(rows)
    if only == "mean":
        return _values(whole[whole["level"] == "all"], column)[:1]
    tasks = whole[whole["level"] == "task"]
    return _values(tasks, column) if only is None else _best(tasks, column)


def _ttft_in(section: Section, rows: Any, unit: str, scale: float = 1) -> list[Value]:
    """The baseline's TTFT, divided by another time of the same answer."""
    values = on_common_examples(
        rows.assign(ratio=scale * rows["ttft_s"] / rows[unit], label=BASELINE), "ratio"
    )
    return [with_ends(drawn_means(values)[:, 0])] if len(values) else []


def _mean_of(section: Section, rows: Any, column: str) -> list[Value]:
    """The baseline's mean over all examples."""
    values = rows.drop_duplicates(["dataset", "id"])[column].dropna().to_numpy(dtype=float)
    return [with_ends(drawn_mean(values))] if len(values) else []


def _kept_at(section: Section, rows: Any, speedup: float) -> list[Value]:
    """The best relative score on multi-document QA of the settings that measured at least this
    speedup, to one per cent; NaN if none did."""
    rows = section.by_task(rows)
    rows = rows[rows["name"] == "multi_doc_qa"]
    fast = rows[rows["ttft_speedup"] > 0.99 * speedup]
    unreached: list[Value] = [(np.nan, np.nan, np.nan)] if len(rows) else []
    return _best(fast, "relative_score") or unreached


_SIGN = {"score": 1, "kl": -1, "answer_kl": -1}  # of what is better


def _leads(section: Section, rows: Any, column: str, other: str) -> list[Value]:
    """LazyLLM's lead over another method in each task at each speedup that both were solved for."""
    rows = rows.assign(target=targets_of(rows), label=rows["method"]).dropna(subset=column)
    leads = []
    for _, group in rows.groupby(["task", "target"], sort=False):
        values: Any = on_common_examples(group, column)
        if len(values) and len(values.columns) == 2:
            lead = drawn_means(values[[STUDIED, other]]) @ [1, -1]
            leads.append(with_ends(_SIGN[column] * lead))
    return leads


def _gains_along(section: Section, rows: Any, column: str, along: str) -> list[Value]:
    """How much better each next layer, or keep ratio, of a single pruning layer is, at each
    value of the other.
    """
    rows = rows.dropna(subset=column)
    rows = rows.assign(label=rows["settings"].map(single_layer))
    values = on_common_examples(rows, column) if len(rows) else rows
    if not len(values):
        return []
    drawn = dict(zip(values.columns, drawn_means(values).T, strict=True))
    axis = ("layer", "keep").index(along)
    lines: dict[float, list[tuple[float, float]]] = {}
    for point in sorted(drawn, key=lambda point: point[axis]):
        lines.setdefault(point[1 - axis], []).append(point)
    steps = [
        drawn[after] - drawn[before] for line in lines.values() for before, after in pairwise(line)
    ]
    return [with_ends(_SIGN[column] * step) for step in steps]


def _counts(section: Section, rows: Any) -> list[tuple[int, np.ndarray]]:
    """(prompt tokens, [steps, groups of layers] prompt tokens computed so far) of LazyLLM's
    answers.
    """
    answers = section.results.answers(rows)
    return [(visit.prompt_tokens, np.array(answer.computed)) for visit, answer in answers]


def _largest_share(section: Section, rows: Any) -> list[Value]:
    """Of the prompt's tokens, the largest share that any layer ran in any example."""
    shares = [100 * computed.max() / tokens for tokens, computed in _counts(section, rows)]
    return [(max(shares),) * 3] if shares else []


def _deeper_saves(section: Section, rows: Any) -> list[Value]:
    """How much smaller the share of tokens computed by the end is in the last layers than in the
    first.
    """
    saved = np.array(
        [100 * (ran[-1, 0] - ran[-1, -1]) / tokens for tokens, ran in _counts(section, rows)]
    )
    return [with_ends(drawn_mean(saved))] if len(saved) else []


def _below_even_share(section: Section, rows: Any) -> list[Value]:
    """The share of prompt tokens whose mean importance over the layers is below 1/n: the mean over
    the traced prompts; that of each one if they are too few for an interval."""
    traces = [
        read_trace(file)
        for run in section.results.runs
        if run.model == section.model
        for file in run.traces
    ]
    prompts = {
        (trace.dataset, trace.id): np.array(trace.importance).mean(axis=0) for trace in traces
    }
    shares = np.array([100 * (scores < 1 / len(scores)).mean() for scores in prompts.values()])
    if len(shares) < FEWEST:
        return [(share, share, share) for share in shares.tolist()]
    return [with_ends(drawn_mean(shares))]


# The functions that claims.csv names
_MEASURES: dict[str, Callable[..., list[Value]]] = {
    "by_task": _by_task,
    "ttft_in": _ttft_in,
    "mean_of": _mean_of,
    "kept_at": _kept_at,
    "leads": _leads,
    "gains_along": _gains_along,
    "largest_share": _largest_share,
    "deeper_saves": _deeper_saves,
    "below_even_share": _below_even_share,
}


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the paper's sections."""
    with (PUBLISHED / "claims.csv").open(encoding="utf-8", newline="") as opened:
        return tuple(map(_claim, csv.DictReader(opened)))


def _claim(row: dict[str, str]) -> Claim:
    pairs = [argument.split("=") for argument in row["arguments"].split("; ") if argument]
    return Claim(
        section=row["section"],
        claim=row["claim"],
        measure=row["measure"],
        arguments={key: float(value) if _is_number(value) else value for key, value in pairs},
        rows=row["rows"],
        method=row["method"],
        needs=tuple(row["needs"].split()),
        paper={model: float(row[model]) for model in PROMPT_LIMITS if row[model]},
        tolerance=row["tolerance"],
        holds=row["holds"],
        digits=int(row["digits"]),
        widest=float(row["widest"]) if row["widest"] else None,
        exhibit=row["exhibit"],
    )


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def sections(groups: Sequence[Results]) -> dict[tuple[str, str], list[Section]]:
    """{(model, suite): its sections} of the runs of LazyLLM. groups: of runs that share no
    table.
    """
    found = dict[tuple[str, str], list[Section]]()
    for results in groups:
        frame: Any = as_published(results.frame)
        frame = frame[frame["method"] == STUDIED]
        for key in frame.groupby(["model", "suite"]).groups:
            found.setdefault(key, []).append(Section(results, *key))
    return found
