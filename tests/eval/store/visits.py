"""Visits made by hand."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from eval.store.visit import Answer, Cost, Fidelity, Times, Turn, Visit

_PARTS: dict[str, Any] = {"times": Times, "cost": Cost, "fidelity": Fidelity}
_PART_OF = {item.name: part for part, kind in _PARTS.items() for item in fields(kind)}


def changed(made: Answer, **changes: Any) -> Answer:
    """The answer with fields of its parts given by name; a part that it lacks is made of them."""
    for name, value in changes.items():
        part = _PART_OF.get(name)
        if part is None:
            made = replace(made, **{name: value})
        elif (own := getattr(made, part)) is not None:
            made = replace(made, **{part: replace(own, **{name: value})})
        elif value is not None:
            needed = {"kl": 0.0, "top1_agrees": 1, "leading_tokens": 0, "edit_similarity": 0.0, "same_answer": 0}
            own_names = {item.name for item in fields(_PARTS[part])}
            given = {key: one for key, one in (needed | changes).items() if key in own_names}
            made = replace(made, **{part: _PARTS[part](**given)})
    return made


def flat(answer: Answer) -> Any:
    """An answer's fields and those of its parts, side by side; None for those of a part that it lacks."""
    found = dict.fromkeys(_PART_OF) | {name: value for name, value in vars(answer).items() if name not in _PARTS}
    for part in _PARTS:
        found |= vars(getattr(answer, part) or SimpleNamespace())
    return SimpleNamespace(**found)


def flattened(visit: Visit) -> Any:
    """The visit with `flat` answers."""
    answers = {label: [flat(answer) for answer in own] for label, own in visit.answers.items()}
    return SimpleNamespace(**vars(visit) | {"answers": answers, "key": visit.key})


def measurement(text: str = "an answer", score: float = 0.5, **changes: Any) -> Answer:
    """An answer of a model in this process. changes: of its fields, and of those of its parts."""
    made = Answer(
        text=text,
        token_ids=[3, 4],
        score=score,
        times=Times(ttft_s=0.2, scoring_s=0.0, total_s=0.3, decode_step_s=[0.1]),
        cost=Cost(
            scoring_tokens=0, pct_prompt_tokens_computed=75.0, group_starts=[1, 3], computed=[[8, 4], [8, 5]],
            kv_bytes=640, aux_bytes=32,
        ),
    )  # fmt: skip
    return changed(made, **changes)


def turn(number: int = 0) -> Turn:
    """The turn with this number, from 0: the prompt first."""
    if number == 0:
        return Turn(sha256="abc", tokens=100, tokens_before_truncation=120, end="...\nwhy?", answers=["because", "so"])
    return Turn(sha256=str(number), tokens=number, tokens_before_truncation=number, end="and?", answers=["so"] * number)


def visit(number: int, dataset: str = "hotpotqa", turns: int = 1, **changes: Any) -> Visit:
    """A visit of row `number`, answered by a baseline and lazy. changes: of lazy's measurements."""
    answers = {
        "baseline": [measurement("base", ttft_s=0.4) for _ in range(turns)],
        "lazy": [measurement(**changes) for _ in range(turns)],
    }
    return Visit(
        dataset=dataset,
        id=f"row-{number}",
        turns=[turn(number) for number in range(turns)],
        order=["lazy", "baseline"],
        answers=answers,
    )
