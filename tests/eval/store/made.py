"""Records and run folders made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.store.folder import open_store
from eval.store.record import LaterTurn, Measurement, Record

LAZY = {"name": "lazy", "schedule": {"2": 0.5}, "prune_generated": False, "revive": True}


def measurement(text: str = "an answer", score: float = 0.5, **changes) -> Measurement:
    values: dict[str, Any] = dict(
        text=text, token_ids=[3, 4], score=score, rouge_l=None, ttft_s=0.2, scoring_s=0.0, scoring_tokens=0,
        total_s=0.3, decode_step_s=[0.1],
        pct_prompt_tokens_computed=75.0, group_starts=[1, 3], computed=[[8, 4], [8, 5]], kv_bytes=640, aux_bytes=32,
        peak_memory_bytes=None,
    )  # fmt: skip
    return Measurement(**(values | changes))


def record(number: int, dataset: str = "hotpotqa", **changes) -> Record:
    method, baseline = measurement(**changes), measurement("base", ttft_s=0.4)
    return Record(dataset, f"row-{number}", "abc", 100, 120, method, baseline, "...\nQuestion: why?", ["because", "so"])


def with_turns() -> Record:
    """A record of three turns."""
    later = [
        LaterTurn(
            prompt_sha256=f"{number}", prompt_tokens=number, method=measurement(score=0.25 * number), prompt_end="why?",
            baseline=measurement(ttft_s=0.1) if number % 2 else None, answers=["so"] * number,
        )
        for number in (2, 3)
    ]  # fmt: skip
    return replace(record(1), later=later)


PROVENANCE = {"git_commit": "abc", "machine": {"device": "a device"}, "versions": {"torch": "2"}}


def write_run(
    folder: Path,
    records: list[Record],
    method: dict[str, Any] = LAZY,
    model: str = "tiny",
    paper: str | None = None,
    provenance: dict[str, Any] = PROVENANCE,
    **identity: Any,
) -> Path:
    """A run folder as `run.py` leaves it."""
    about = {"config": {"model": {"name": model, "paper": paper}}, "provenance": provenance}
    usual = {"model": model, "method": method, "seed": 0, "paired": True, "code": "1", "data": {}}
    with open_store(folder, usual | {"load_format": "auto"} | identity, about) as store:
        for record in records:
            store.append(record)
    return folder
