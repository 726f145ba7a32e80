"""Visits made by hand."""

from typing import Any

from eval.store.visit import Measurement, Turn, Visit


def measurement(text: str = "an answer", score: float = 0.5, **changes: Any) -> Measurement:
    values: dict[str, Any] = dict(
        text=text, token_ids=[3, 4], score=score, rouge_l=None, ttft_s=0.2, scoring_s=0.0, scoring_tokens=0,
        total_s=0.3, decode_step_s=[0.1], pct_prompt_tokens_computed=75.0, group_starts=[1, 3],
        computed=[[8, 4], [8, 5]], kv_bytes=640, aux_bytes=32,
    )  # fmt: skip
    return Measurement(**(values | changes))


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
