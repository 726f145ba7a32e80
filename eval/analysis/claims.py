"""The paper's claims about LazyLLM, in our words (arXiv 2407.14057v1), and what stored runs say of each."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import BASELINE, PAPER_SPEEDUP, STUDIED, single_layer, targets_of, with_ends
from eval.analysis.paper_tables import TASK_NAMES
from eval.analysis.style import as_published, studied
from eval.analysis.table import KEPT_WITHIN, Column, forms
from eval.store.aggregate import FEWEST, by_task, drawn_mean, drawn_means, on_common_examples
from eval.store.results import Results
from eval.store.trace import read_trace

AGREES, HIGHER, LOWER = "agrees", "differs (higher)", "differs (lower)"
HOLDS, FAILS, UNDECIDED, NOT_RUN, NO_NUMBER = "holds", "does not hold", "undecided", "not run", "-"
_RULES = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
PAPER_SUITE = "longbench"
PROMPT_LIMITS = {"llama2": 3500, "xgen": 7500}  # tokens, as in the paper
Value = tuple[float, float, float]  # with both ends of its 95 % interval


class Section:
    """One model on one suite, without ablations.

    model: its name without a variant. frame: of `Results.frame`, all rows. rows: those that count.
    """

    def __init__(self, results: Results, model: str, suite: str) -> None:
        self.model, self.suite, self.results = model, suite, results
        frame: Any = results.frame
        is_own = (frame["model"].map(results.families) == model) & (frame["suite"] == suite)
        self.frame = as_published(frame[is_own])
        self.rows = self.frame[self.frame["counts"]]
        models = {run.family: run.paper_model for run in results.runs}
        self.paper_model = models.get(model) if suite == PAPER_SUITE else None

    def of(self, preset: str, method: str = STUDIED) -> Any:
        """The rows of a method's arms that belong to an experiment, of the variant that differs least from the model's
        other runs.

        preset: "table1", "figure5" (settings given by a speedup), "figure6" (schedules of one layer), "studied" (those
        of table1, else of the one setting of LazyLLM that figures show), or "all".
        """
        rows = self.rows[self.rows["method"] == method]
        if preset == "all":
            return self.results.least_different(rows)
        if preset == "studied":
            table1 = self.of("table1")
            return table1 if len(table1) else rows[rows.index.isin(studied(self.results).index)]
        belongs: dict[str, Callable[[Any], Any]] = {
            "table1": lambda rows: rows["speedup"] == PAPER_SPEEDUP,
            "figure5": lambda rows: targets_of(rows).notna(),
            "figure6": lambda rows: rows["settings"].map(single_layer).notna(),
        }
        return self.results.least_different(rows[belongs[preset](rows)])

    def identities(self, rows: Any) -> list[dict[str, Any]]:
        """Of the runs of these rows."""
        folders = set(rows["folder"])
        return [run.identity for run in self.results.runs if str(run.folder) in folders]

    def by_task(self, rows: Any) -> Any:
        """`by_task` of these rows, without datasets, each beside its baseline."""
        whole = by_task(pd.concat([rows, self.frame[~self.frame.index.isin(rows.index)].assign(counts=False)]))
        return whole[whole["level"] != "dataset"]


def _tasks(section: Section, rows: Any) -> str:
    there = [task for task in TASK_NAMES if task in set(rows["task"])]
    if len(there) == len(TASK_NAMES):
        return ""
    return f"needs the paper's {len(TASK_NAMES)} tasks, has {', '.join(there) or 'none'}"


def _whole_answers(section: Section, rows: Any) -> str:
    caps = sorted({cap for one in section.identities(rows) if (cap := one.get("max_new_tokens")) is not None})
    return f"needs whole answers, has max_new_tokens={', '.join(map(str, caps))}" if caps else ""


def _whole_prompts(section: Section, rows: Any) -> str:
    limit = PROMPT_LIMITS.get(section.paper_model or "", 0)
    lower = sorted({own for one in section.identities(rows) if (own := one.get("max_prompt_tokens", limit)) != limit})
    return f"needs max_prompt_tokens={limit}, has {', '.join(map(str, lower))}" if limit and lower else ""


def _steps(section: Section, rows: Any) -> str:
    return "" if rows["token_s"].notna().any() else "needs times of single steps: batch_size=1"


def _forced(section: Section, rows: Any) -> str:
    return "" if rows["answer_kl"].notna().any() else "needs fidelity=answer"


# What rows must have for a verdict: each says what they lack
_NEEDS = {"tasks": _tasks, "answers": _whole_answers, "prompts": _whole_prompts, "steps": _steps, "forced": _forced}


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    measure: makes the value, or the values of tasks or steps, of the rows that count: those of `preset` and `method`
        (`Section.of`).
    shown: the table or figure to look at.
    needs: what these rows must have for a verdict, of `_NEEDS`.
    paper: its number by model. tolerance: how far our interval may be from it, in per cent of the number, or in points.
    holds: of a claim without a tolerance, which only says a direction: what each part of the value must obey.
    widest: of `Column`.
    """

    section: str
    claim: str
    measure: Callable[[Section, Any], list[Value]]
    preset: str
    shown: str
    digits: int
    method: str = STUDIED
    needs: tuple[str, ...] = ()
    paper: dict[str, float] = field(default_factory=dict)
    tolerance: str = ""
    holds: str = ""
    widest: float | None = None

    def judged(self, section: Section) -> tuple[str, list[Value], str]:
        """The model's name with the variant that was measured, the values, and what the rows lack for a verdict; "" if
        they lack nothing."""
        rows = section.of(self.preset, self.method)
        lacking = [text for need in self.needs if len(rows) and (text := _NEEDS[need](section, rows))]
        model = rows["model"].iloc[0] if len(rows) else section.model
        return model, self.measure(section, rows), "; ".join(lacking)

    def verdict(self, parts: list[Value], paper_model: str | None, lacking: str = "") -> str:
        """What the value says of the claim. parts: one value, or one for each task or step."""
        if not parts or lacking:
            return NOT_RUN
        if self.holds:
            obeys = [self._obeys(part) for part in parts]
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

    def _obeys(self, part: Value) -> str:
        """Of one part: the whole interval obeys the rule, or none of it, or it is undecided, as in a tie."""
        sign, bound = self.holds.split()
        ends = {bool(_RULES[sign](end, float(bound))) for end in part[1:]}
        is_tie = set(part) == {float(bound)} and sign in "<>"
        return UNDECIDED if np.isnan(part).any() or len(ends) > 1 or is_tie else HOLDS if ends == {True} else FAILS

    def ours(self, parts: list[Value]) -> str:
        """The value for people; of several parts, the range and how many go which way."""
        values = [part[0] for part in parts if not np.isnan(part[0])]
        if not values:
            return "-"
        if len(parts) == 1:
            return Column("value", "", self.digits, widest=self.widest).cell(
                dict(zip(forms("value"), parts[0], strict=True))
            )
        obeys = [self._obeys(part) for part in parts]
        low, high = (f"{value:.{self.digits}f}" for value in (min(values), max(values)))
        return f"{low} to {high}: {obeys.count(HOLDS)} of {len(parts)} hold, {obeys.count(FAILS)} do not"


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
    values = on_common_examples(rows.assign(ratio=scale * rows["ttft_s"] / rows[unit], label=BASELINE), "ratio")
    return [with_ends(drawn_means(values)[:, 0])] if len(values) else []


def _mean_of(section: Section, rows: Any, column: str) -> list[Value]:
    """The baseline's mean over all examples."""
    values = rows.drop_duplicates(["dataset", "id"])[column].dropna().to_numpy(dtype=float)
    return [with_ends(drawn_mean(values))] if len(values) else []


def kept_at(section: Section, rows: Any, speedup: float) -> list[Value]:
    """The best relative score on multi-document QA of the settings that measured at least this speedup, to one per
    cent; NaN if none did."""
    rows = section.by_task(rows)
    rows = rows[rows["name"] == "multi_doc_qa"]
    fast = rows[rows["ttft_speedup"] > 0.99 * speedup]
    unreached: list[Value] = [(np.nan, np.nan, np.nan)] if len(rows) else []
    return _best(fast, "relative_score") or unreached


_SIGN = {"score": 1, "kl": -1, "answer_kl": -1}  # of what is better


def _leads(section: Section, rows: Any, column: str, other: str) -> list[Value]:
    """LazyLLM's lead over another method in each task: the mean over the speedups that both were solved for."""
    others = section.of("figure5", other)
    rows = pd.concat([rows, others[others["model"].isin(rows["model"])]])
    rows = rows.assign(target=targets_of(rows), label=rows["method"]).dropna(subset=column)
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


def _gains_along(section: Section, rows: Any, column: str, along: str) -> list[Value]:
    """How much better each next layer, or keep ratio, of a single pruning layer is, at each value of the other."""
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
    steps = [drawn[after] - drawn[before] for line in lines.values() for before, after in pairwise(line)]
    return [with_ends(_SIGN[column] * step) for step in steps]


def _counts(section: Section, rows: Any) -> list[tuple[int, np.ndarray]]:
    """(prompt tokens, [steps, groups of layers] prompt tokens computed so far) of LazyLLM's answers."""
    answers = section.results.answers(rows)
    return [(visit.prompt_tokens, np.array(answer.computed)) for visit, answer in answers]


def _largest_share(section: Section, rows: Any) -> list[Value]:
    """Of the prompt's tokens, the largest share that any layer ran in any example."""
    shares = [100 * computed.max() / tokens for tokens, computed in _counts(section, rows)]
    return [(max(shares),) * 3] if shares else []


def _deeper_saves(section: Section, rows: Any) -> list[Value]:
    """How much smaller the share of tokens computed by the end is in the last layers than in the first."""
    saved = np.array([100 * (ran[-1, 0] - ran[-1, -1]) / tokens for tokens, ran in _counts(section, rows)])
    return [with_ends(drawn_mean(saved))] if len(saved) else []


def _below_even_share(section: Section, rows: Any) -> list[Value]:
    """The share of prompt tokens whose mean importance over the layers is below 1/n: the mean over the traced prompts;
    that of each one if they are too few for an interval."""
    traces = [read_trace(file) for run in section.results.runs if run.family == section.model for file in run.traces]
    prompts = {(trace.dataset, trace.id): np.array(trace.importance).mean(axis=0) for trace in traces}
    shares = np.array([100 * (scores < 1 / len(scores)).mean() for scores in prompts.values()])
    if len(shares) < FEWEST:
        return [(share, share, share) for share in shares.tolist()]
    return [with_ends(drawn_mean(shares))]


def _by_score_and_kl(
    section: str, claim: str, measure: Callable[..., list[Value]], figure: str, digits: tuple[int, int], holds: str
) -> list[Claim]:
    """The claim in points of score, and, as ours, in nats of each KL. digits: of points, and of nats."""
    of_points, of_nats = digits
    return [
        Claim(
            section, f"{claim}, {unit}", partial(measure, column=column), figure, figure, shown,
            needs=("tasks", *needs), holds=holds,
        )
        for column, unit, shown, needs in (
            ("score", "points", of_points, ("answers",)),
            ("kl", "nats of KL (ours)", of_nats, ()),
            ("answer_kl", "nats of the answer's KL (ours)", of_nats, ("forced",)),
        )
    ]  # fmt: skip


CLAIMS = (
    Claim(
        "1", "TTFT, in decoding steps of the baseline",
        partial(_ttft_in, unit="step_s"), "all", "steps", 1, method=BASELINE,
        needs=("tasks", "prompts", "steps"), paper={"llama2": 21}, tolerance="10 %",
    ),
    Claim(
        "1", "TTFT, % of the baseline's generation time",
        partial(_ttft_in, unit="total_s", scale=100), "all", "steps", 1, method=BASELINE,
        needs=("tasks", "prompts", "answers"), paper={"llama2": 23}, tolerance="5 points",
    ),
    Claim(
        "1", "Prompt tokens, mean over the examples",
        partial(_mean_of, column="prompt_tokens"), "all", "table1", 0, method=BASELINE, needs=("tasks", "prompts"),
        paper={"llama2": 3376}, tolerance="1 %",
    ),
    Claim(
        "1", "Generated tokens, mean over the examples",
        partial(_mean_of, column="generated_tokens"), "all", "steps", 0, method=BASELINE,
        needs=("tasks", "prompts", "answers"), paper={"llama2": 68}, tolerance="10 %",
    ),
    Claim(
        "3", "Most prompt tokens get less than an even share of the last token's attention, %",
        _below_even_share, "all", "figure2", 1, holds="> 50",
    ),
    Claim(
        "3.2", "Never slower: generation speedup, task by task",
        partial(_by_task, column="equal_length_speedup"), "table1", "steps", 2,
        needs=("tasks", "answers", "steps"), paper={"llama2": 1.01, "xgen": 1.09}, holds=">= 1",
    ),
    Claim(
        "3.2", "No token twice in a layer: largest share of the prompt that a layer ran, %",
        _largest_share, "studied", "figure7", 1, holds="<= 100",
    ),
    Claim(
        "5.1", "Score kept, % (mean over tasks)",
        partial(_by_task, column="relative_score", only="mean"), "table1", "table1", 1, needs=("tasks", "answers"),
        paper={"llama2": 98.89, "xgen": 99.78}, tolerance="1 point", widest=KEPT_WITHIN,
    ),
    Claim(
        "5.1", "TTFT speedup (mean over tasks)",
        partial(_by_task, column="ttft_speedup", only="mean"), "table1", "table1", 2, needs=("tasks", "prompts"),
        paper={"llama2": 2.03, "xgen": 3.03}, tolerance="10 %",
    ),
    Claim(
        "5.1", "Faster to the first token: TTFT speedup, task by task",
        partial(_by_task, column="ttft_speedup"), "table1", "table1", 2, needs=("tasks",),
        paper={"llama2": 1.36, "xgen": 1.91}, holds="> 1",
    ),
    Claim(
        "5.1", "Prompt compression's TTFT speedup (fastest task)",
        partial(_by_task, column="ttft_speedup", only="fastest"), "table1", "table1", 2, method="prompt_compression",
        needs=("tasks",), paper={"llama2": 0.49, "xgen": 0.69}, tolerance="10 %",
    ),
    Claim(
        "5.2", "Score kept at a measured 2.34x, % (multi-document QA)",
        partial(kept_at, speedup=2.34), "figure5", "figure5", 1, needs=("answers",), paper={"llama2": 99},
        tolerance="1 point", widest=KEPT_WITHIN,
    ),
    Claim(
        "5.2", "Score kept at a measured 3x, % (multi-document QA)",
        partial(kept_at, speedup=3.0), "figure5", "figure5", 1, needs=("answers",), paper={"llama2": 90},
        holds=">= 90", widest=KEPT_WITHIN,
    ),
    *_by_score_and_kl(
        "5.2", "Better than static pruning at one speedup, task by task", partial(_leads, other="static_pruning"),
        "figure5", (2, 3), "> 0",
    ),
    *_by_score_and_kl(
        "5.2", "Better than random token drop at one speedup, task by task", partial(_leads, other="random_drop"),
        "figure5", (2, 3), "> 0",
    ),
    Claim(
        "5.3", "Prompt tokens computed by the end, % (mean over tasks)",
        partial(_by_task, column="pct_prompt_tokens_computed", only="mean"), "table1", "table2", 1,
        needs=("tasks", "answers"), paper={"llama2": 75.52, "xgen": 72.22}, tolerance="5 points",
    ),
    Claim(
        "5.3", "Generation speedup (mean over tasks)",
        partial(_by_task, column="equal_length_speedup", only="mean"), "table1", "table2", 2,
        needs=("tasks", "answers", "steps"), paper={"llama2": 1.33, "xgen": 1.67}, tolerance="10 %",
    ),
    *_by_score_and_kl(
        "5.4", "Keeping more is better, ratio by ratio", partial(_gains_along, along="keep"), "figure6", (2, 4), ">= 0",
    ),
    *_by_score_and_kl(
        "5.4", "Pruning later is better, layer by layer", partial(_gains_along, along="layer"), "figure6", (2, 4),
        ">= 0",
    ),
    Claim(
        "5.5", "First layers compute more of the prompt than the last, points",
        _deeper_saves, "studied", "figure7", 1, holds="> 0",
    ),
)  # fmt: skip


def sections(results: Results) -> list[Section]:
    """The models and suites of the runs of LazyLLM."""
    frame: Any = as_published(results.frame)
    frame = frame[frame["method"] == STUDIED]
    families = frame["model"].map(results.families)
    return [Section(results, *key) for key in frame.groupby([families, frame["suite"]]).groups]
