"""Every example's answers, as data for the page's script."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from eval.analysis.mechanism import step_sets
from eval.store.runs import StoredArm, StoredRun
from eval.store.visit import Answer, Trace, Visit, read_trace


def embed_answers(runs: Sequence[StoredRun], most: int | None = None) -> dict[str, Any]:
    """The script's data: arms, strings, and one entry an arm's answer to a turn, beside the baseline's of the same
    visit; its texts are indices of strings. The baseline has entries of its own only if it is a run's only arm.

    most: only the first N examples of each run and dataset; None for all. Scores are 0 to 100, times in seconds.
    """
    # {text: its number}: prompts, gold answers and baselines of many arms are embedded once
    strings = defaultdict[str, int]()
    strings.default_factory = strings.__len__
    arms, answers = list[dict[str, Any]](), list[dict[str, Any]]()
    for run in runs:
        baseline = run.identity["baseline"]
        shown = [arm for arm in run.arms.values() if not arm.is_baseline or len(run.arms) == 1]
        numbers = {arm.name: len(arms) + place for place, arm in enumerate(shown)}
        arms += [embed_arm(run, arm) for arm in shown]
        answered, places = set[tuple[str, str, str]](), Counter[str]()
        for visit in run.visits:
            places[visit.dataset] += not any((*visit.key, name) in answered for name in run.arms)
            for name in [name for name in numbers if name in visit.answers and (*visit.key, name) not in answered]:
                if most is None or places[visit.dataset] <= most:
                    beside = visit.answers.get(baseline) if name != baseline else None
                    answers += _embed(numbers[name], visit, visit.answers[name], beside, strings)
            answered |= {(*visit.key, name) for name in visit.answers}
    return {"runs": arms, "records": answers, "strings": list(strings)}


def embed_arm(run: StoredRun, arm: StoredArm) -> dict[str, Any]:
    """An arm's names, for headings and filters."""
    return {"model": run.model, "label": arm.label, "seed": arm.seed}


def _embed(
    arm: int, visit: Visit, own: Sequence[Answer], beside: Sequence[Answer] | None, strings: dict[str, int]
) -> list[dict[str, Any]]:
    """An entry for each turn of an arm's answers."""
    theirs = beside or [None] * len(own)
    return [
        {
            "run": arm,
            "dataset": visit.dataset,
            "id": strings[f"{visit.id}, turn {number}" if len(own) > 1 else visit.id],
            "tokens": turn.tokens,
            "uncut": turn.tokens_before_truncation,
            "end": strings[turn.end],
            "gold": [strings[answer] for answer in turn.answers],
            "method": _measured(answer, strings),
            "baseline": None if reference is None else _measured(reference, strings),
        }
        for number, (turn, answer, reference) in enumerate(zip(visit.turns, own, theirs, strict=True), start=1)
    ]


def _measured(measured: Answer, strings: dict[str, int]) -> dict[str, Any]:
    ids = measured.token_ids  # None of a server's answer, which may tell their number
    return {
        "text": strings[measured.text],
        "tokens": measured.request and measured.request.completion_tokens if ids is None else len(ids),
        "score": _short(100 * measured.score),
        "ttft": _short(measured.times.ttft_s),
        "total": _short(measured.times.total_s),
        "pct": _short(measured.cost and measured.cost.pct_prompt_tokens_computed),
        "kl": _short(measured.fidelity and measured.fidelity.kl),
    }


def _short(value: float | None) -> float | None:
    """Six digits: more than are shown, and fewer than a float has, for a smaller page."""
    return None if value is None else float(f"{value:.6g}")


def embed_traces(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """All traces of the runs. Raises UserError if a file is not a trace."""
    traces = [(run, read_trace(file)) for run in runs for file in run.traces]
    return [{**embed_arm(run, run.arms[trace.arm]), **embed_trace(trace)} for run, trace in traces]


def embed_trace(trace: Trace) -> dict[str, Any]:
    """One trace. levels: the last layers that occur, ascending. steps: per step one character for each prompt and
    generated token, whose code after "0" is an index into levels. revived: per step, positions. anew: whether the step
    has its own selection.
    """
    depths = last_layers(trace)
    levels = sorted({int(layer) for depth in depths for layer in np.unique(depth)})
    return {
        "dataset": trace.dataset,
        "id": trace.id,
        "tokens": trace.tokens,
        "generated": trace.generated,
        "importance": trace.importance,
        "layers": len(trace.importance),
        "levels": levels,
        "steps": ["".join(chr(ord("0") + levels.index(layer)) for layer in depth) for depth in depths],
        "revived": revived(depths),
        "anew": [bool(selected) for selected in trace.selected],
    }


def last_layers(trace: Trace) -> list[np.ndarray]:
    """Per step, [n + step] the last layer (from 1; 0 for none) in which each token is in the step's set.

    Tokens are the prompt's and the generated ones run so far. A step without its own selection has the prefill's, with
    all generated tokens.
    """
    n, layers = len(trace.tokens), len(trace.importance)
    depths = [in_set[:, : n + step].sum(axis=0) for step, in_set in enumerate(step_sets(trace))]  # the sets are nested
    for step, selected in enumerate(trace.selected):
        if step and not selected:
            depths[step] = np.append(depths[0], np.full(step, layers))
    return depths


def revived(depths: Sequence[np.ndarray]) -> list[list[int]]:
    """Per step, the tokens that it computed in layers in which no earlier step had computed them."""
    deepest, found = depths[0], [[]]
    for before, now in pairwise(depths):
        deeper = now[: len(before)] > deepest
        found.append(np.flatnonzero(deeper).tolist())
        deepest = np.append(np.maximum(deepest, now[: len(before)]), now[len(before) :])
    return found
