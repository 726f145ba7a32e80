"""The answers of every arm to every example, beside each other, as data for the page's script."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from operator import truediv
from typing import Any

from eval.store.runs import StoredRun
from eval.store.visit import Answer


def embed_answers(runs: Sequence[StoredRun], most: int | None = None) -> dict[str, Any]:
    """The script's data: runs, strings, and an entry for each turn of each example of a run, with the answers of all
    arms; its texts are indices of strings, null if they are not stored.

    An answer's `speedup` and `gain` compare with the baseline's of the same visit; they are null without one, and of
    the baseline. most: only the first N examples of each run and dataset; None for all. Scores are 0 to 100, times in
    seconds.
    """
    strings = defaultdict[str, int]()  # {text: its number}: equal answers of several arms are embedded once
    strings.default_factory = strings.__len__
    shown, entries = list[dict[str, Any]](), list[dict[str, Any]]()
    for run in runs:
        baseline, names = run.identity["baseline"], [*run.arms]
        of_turn = dict[tuple[str, str, int], dict[str, Any]]()
        places = Counter[str]()
        for visit in run.visits:
            places[visit.dataset] += (*visit.key, 0) not in of_turn
            if most is not None and places[visit.dataset] > most:
                continue
            for place, turn in enumerate(visit.turns):
                entry = of_turn.setdefault((*visit.key, place), {
                    "run": len(shown),
                    "dataset": visit.dataset,
                    "id": strings[f"{visit.id}, turn {place + 1}" if len(visit.turns) > 1 else visit.id],
                    "tokens": turn.tokens,
                    "uncut": turn.tokens_before_truncation,
                    "end": strings[turn.end],
                    "gold": [strings[answer] for answer in turn.answers],
                    "answers": {},
                })  # fmt: skip
                for name in (name for name in names if name in visit.answers):
                    beside = visit.answers.get(baseline) if name != baseline else None
                    own, theirs = visit.answers[name][place], beside[place] if beside else None
                    entry["answers"].setdefault(names.index(name), _embedded(own, theirs, strings))
        for entry in of_turn.values():
            entry["answers"] = [{"arm": place, **answer} for place, answer in sorted(entry["answers"].items())]
        entries += [entry for entry in of_turn.values() if entry["answers"]]
        labels = [f"{arm.label}, seed {arm.seed}" if "seed" in arm.name else arm.label for arm in run.arms.values()]
        shown.append({"model": run.model, "arms": labels, "baseline": names.index(baseline) if baseline else None})
    return {"runs": shown, "records": entries, "strings": list(strings)}


def _embedded(own: Answer, theirs: Answer | None, strings: dict[str, int]) -> dict[str, Any]:
    return {
        "text": None if own.text is None else strings[own.text],
        "tokens": len(own.token_ids),
        "score": _short(None if own.score is None else 100 * own.score),
        "ttft": _short(own.times.ttft_s),
        "pct": _short(own.cost.pct_prompt_tokens_computed),
        "kl": _short(own.fidelity and own.fidelity.kl),
        "answer_kl": _short(own.fidelity and own.fidelity.answer_kl),
        "speedup": _short(theirs and _joined(truediv, theirs.times.ttft_s, own.times.ttft_s)),
        "gain": _short(theirs and _joined(lambda a, b: 100 * (a - b), own.score, theirs.score)),
        "differs": theirs is not None and _differs(own, theirs),
    }


def _differs(own: Answer, theirs: Answer) -> bool:
    """Whether two answers differ: by their texts, or by the stored comparison of their tokens."""
    if own.text is None:
        return own.fidelity is not None and not own.fidelity.same_answer
    return own.text != theirs.text


def _joined(join: Callable[[float, float], float], a: float | None, b: float | None) -> float | None:
    """`join(a, b)`; None if one is not known: no score on random tokens, no TTFT of a method that no kernel runs."""
    return None if a is None or b is None else join(a, b)


def _short(value: float | None) -> float | None:
    """Six digits: more than are shown, and fewer than a float has, for a smaller page."""
    return None if value is None else float(f"{value:.6g}")
