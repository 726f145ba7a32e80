"""Stored runs made by hand, and pictures of their figures."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from eval.analysis.table import Figure
from eval.store.record import Record, Trace
from eval.store.runs import StoredRun
from tests.eval.store.made import measurement, record

PRESETS: dict[str, dict[str, Any]] = {
    "lazy": {"schedule": "table1", "prune_generated": False, "revive": True},
    "random_drop": {"keep": "table1"},
    "static_pruning": {"layer": 2, "keep": "table1"},
}


def example(dataset: str, name: str, prompt_tokens: int = 100, baseline: dict | None = None, **method: Any) -> Record:
    """A record with some values changed; by default, the baseline scores 1 with a TTFT of 0.4 s and 0.8 s in total."""
    usual = {"score": 1.0, "ttft_s": 0.4, "total_s": 0.8}
    return replace(
        record(0, dataset), id=name, prompt_tokens=prompt_tokens, method=measurement(**method),
        baseline=measurement(**usual | (baseline or {})),
    )  # fmt: skip


def over(names: tuple[str, ...], **method: Any) -> list[Record]:
    """Two examples of each dataset."""
    return [example(name, row, **method) for name in names for row in "ab"]


# 10 prompt tokens and three steps; 20 tokens and one step, whose last two groups happen to agree
LONG = example("hotpotqa", "long", 10, group_starts=[1, 3, 5], computed=[[10, 5, 2], [10, 7, 4], [10, 8, 6]])
SHORT = example("trec", "short", 20, group_starts=[1, 3], computed=[[20, 10]])


def stored(
    records: list[Record], method: str = "lazy", settings: dict | None = None, model: str = "tiny",
    paper: str | None = None, seed: int = 0, folder: Path = Path("none"),
) -> StoredRun:  # fmt: skip
    if settings is None:
        settings = {"schedule": "paper", "prune_generated": False, "revive": True} if method == "lazy" else {}
    identity = {
        "method": {"name": method, **json.loads(json.dumps(settings))},
        "seed": seed,
        "paired": True,
        "data": {},
    }
    config = {"model": {"name": model, "paper": paper}}
    return StoredRun(folder, {"identity": identity, "config": config, "fingerprint": f"{method}{seed}"}, records)


def preset(method: str, records: list[Record], **about: Any) -> StoredRun:
    return stored(records, method, PRESETS[method], **about)


def swept(method: str, target: str, kls: list[float], scores: list[float], **settings: Any) -> StoredRun:
    """A run of a setting given by a speedup, from the KL and score of its examples."""
    key = "schedule" if method == "lazy" else "keep"
    pairs = enumerate(zip(kls, scores, strict=True))
    records = [example("hops", str(number), kl=kl, score=score) for number, (kl, score) in pairs]
    return stored(records, method, {key: target, **settings})


def with_traces(run: StoredRun, folder: Path, *traces: Trace) -> StoredRun:
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    for trace in traces:
        (folder / "traces" / Trace.file_name(trace.dataset, trace.id)).write_text(trace.to_json())
    return replace(run, folder=folder)


def small_trace(name: str = "a") -> Trace:
    """Three prompt tokens, two layers; the boundary keeps one prompt token, another one in the second step."""
    return Trace(
        "lookup", name, ["A", " $B$", "C\n"], ["D", "E", "F"], [[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]],
        [{1: [2]}, {1: [0, 3]}, {1: [0, 3, 4]}], [1, 2], [[3, 1], [3, 2], [3, 2]],
    )  # fmt: skip


def line(frame: pd.DataFrame, **key: Any) -> dict[str, Any]:
    """The only row with these values."""
    (row,) = frame[(frame[list(key)] == pd.Series(key)).all(axis=1)].to_dict("records")
    return row


def drawn(figure: Figure, frame: pd.DataFrame) -> Any:
    """The picture of a table, drawn from its CSV as a reader of the CSV would draw it."""
    picture = figure.plot(pd.read_csv(io.StringIO(frame.to_csv(index=False))))
    picture.draw_without_rendering()
    return picture


def texts(picture: Any) -> list[str]:
    """All texts of a drawn picture."""
    from matplotlib.text import Text

    return [text.get_text() for text in picture.findobj(Text) if text.get_text() and text.get_visible()]
