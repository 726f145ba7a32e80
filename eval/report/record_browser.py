"""Every example's answers, as data for the page's script."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from eval.store.runs import StoredArm, StoredRun
from eval.store.visit import Answer, Visit


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
