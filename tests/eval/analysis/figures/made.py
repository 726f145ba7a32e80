"""Stored runs made by hand, and checks that every figure must pass."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from eval.analysis.figures import Figure
from eval.store.record import Record, Trace
from eval.store.runs import StoredRun
from tests.eval.store.made import measurement, record


def example(dataset: str, name: str, prompt_tokens: int = 100, baseline: dict | None = None, **method: Any) -> Record:
    """A record with some values changed; by default, the baseline scores 1 with a TTFT of 0.4 s and 0.8 s in total."""
    usual = {"score": 1.0, "ttft_s": 0.4, "total_s": 0.8}
    return replace(
        record(0, dataset), id=name, prompt_tokens=prompt_tokens, method=measurement(**method),
        baseline=measurement(**usual | (baseline or {})),
    )  # fmt: skip


def stored(
    records: list[Record], method: str = "lazy", settings: dict | None = None, model: str = "tiny",
    paper: str | None = None, seed: int = 0, folder: Path = Path("none"),
) -> StoredRun:  # fmt: skip
    if settings is None:
        settings = {"schedule": "paper", "prune_generated": False, "revive": True} if method == "lazy" else {}
    identity = {"method": {"name": method, **json.loads(json.dumps(settings))}, "seed": seed, "paired": True}
    config = {"model": {"name": model, "paper": paper}}
    return StoredRun(folder, {"identity": identity, "config": config, "fingerprint": f"{method}{seed}"}, records)


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


def png(picture: Any) -> bytes:
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def redrawn(figure: Figure, frame: pd.DataFrame) -> Any:
    """The picture made from the table's CSV, which must equal the one made from the table itself."""
    again = pd.read_csv(io.StringIO(frame.to_csv(index=False)))
    picture = figure.plot(again)
    assert png(picture) == png(figure.plot(frame))
    return picture


def texts(picture: Any) -> list[str]:
    """All texts of a drawn picture."""
    from matplotlib.text import Text

    picture.canvas.draw()
    return [text.get_text() for text in picture.findobj(Text) if text.get_text() and text.get_visible()]
