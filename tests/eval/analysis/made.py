"""Stored runs made by hand, and pictures of their figures."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd

from eval.store.runs import StoredRun
from eval.store.visit import Trace, Turn, Visit
from tests.eval.store.visits import measurement

ARM = "the arm"  # the label of the method in a run made here
_NUMBERS = count()  # of folders, as each run has one

PRESETS: dict[str, dict[str, Any]] = {
    "lazy": {"schedule": "table1", "prune_generated": False, "revive": True},
    "random_drop": {"keep": "table1"},
    "static_pruning": {"layer": 2, "keep": "table1"},
}


def example(dataset: str, name: str, prompt_tokens: int = 100, baseline: dict | None = None, **own: Any) -> Visit:
    """A visit with some values changed; by default, the baseline scores 1 with a TTFT of 0.4 s and 0.8 s in total."""
    return conversation(dataset, name, [prompt_tokens], [own], [baseline or {}])


def conversation(dataset: str, name: str, tokens: list[int], own: list[dict], baseline: list[dict]) -> Visit:
    """A visit of as many turns, from the tokens that each asks, and what differs in each answer of both arms."""
    usual = {"score": 1.0, "ttft_s": 0.4, "total_s": 0.8}
    return Visit(
        dataset=dataset,
        id=name,
        turns=[Turn(sha256=str(n), tokens=n, tokens_before_truncation=n) for n in tokens],
        order=["baseline", ARM],
        answers={
            "baseline": [measurement(**usual | changes) for changes in baseline],
            ARM: [measurement(**changes) for changes in own],
        },
    )


def over(names: tuple[str, ...], **own: Any) -> list[Visit]:
    """Two examples of each dataset."""
    return [example(name, row, **own) for name in names for row in "ab"]


# 10 prompt tokens and three steps; 20 tokens and one step, whose last two groups happen to agree
LONG = example("hotpotqa", "long", 10, group_starts=[1, 3, 5], computed=[[10, 5, 2], [10, 7, 4], [10, 8, 6]])
SHORT = example("trec", "short", 20, group_starts=[1, 3], computed=[[20, 10]])


def stored(
    visits: list[Visit], method: str = "lazy", settings: dict | None = None, model: str = "tiny",
    paper: str | None = None, seed: int = 0, folder: Path | None = None, solved: dict[str, dict] | None = None,
    **identity: Any,
) -> StoredRun:  # fmt: skip
    """A run of a method and its baseline, or of the baseline alone, in a folder of its own.

    solved: {dataset: the hyperparameters that a target speedup in `settings` gave}.
    """
    if method == "lazy":
        settings = {"schedule": "paper", "prune_generated": False, "revive": True} | (settings or {})
    arms = {"baseline": {"method": {"name": "baseline"}}}
    if method == "baseline":
        visits = [replace(visit, answers={"baseline": visit.answers[ARM]}) for visit in visits]
    else:
        arms[ARM] = {"method": {"name": method, "seed": seed, **json.loads(json.dumps(settings or {}))}}
        if solved is not None:
            arms[ARM]["parameters"] = solved
    about = {
        "identity": {"arms": arms, "baseline": "baseline", "seed": seed, "data": {}, **identity},
        "config": {"model": {"name": model, "paper": paper}},
        "fingerprint": f"{method}{seed}",
    }
    return StoredRun(folder or Path(f"made-{next(_NUMBERS)}"), about, visits)


def preset(method: str, visits: list[Visit], **about: Any) -> StoredRun:
    return stored(visits, method, PRESETS[method], **about)


def swept(method: str, target: str, kls: list[float], scores: list[float], **settings: Any) -> StoredRun:
    """A run of a setting given by a speedup, from the KL and score of its answers."""
    key = "schedule" if method == "lazy" else "keep"
    pairs = enumerate(zip(kls, scores, strict=True))
    visits = [example("hops", str(number), kl=kl, score=score) for number, (kl, score) in pairs]
    return stored(visits, method, {key: target, **settings})


def with_traces(run: StoredRun, folder: Path, *traces: Trace) -> StoredRun:
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    for trace in traces:
        (folder / "traces" / Trace.file_name(trace.dataset, trace.id, trace.arm)).write_text(trace.to_json())
    return replace(run, folder=folder)


def small_trace(name: str = "a") -> Trace:
    """Three prompt tokens, two layers; the boundary keeps one prompt token, another one in the second step."""
    return Trace(
        "lookup", name, ARM, ["A", " $B$", "C\n"], ["D", "E", "F"], [[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]],
        [{1: [2]}, {1: [0, 3]}, {1: [0, 3, 4]}], [1, 2], [[3, 1], [3, 2], [3, 2]],
    )  # fmt: skip


def line(frame: pd.DataFrame, **key: Any) -> dict[str, Any]:
    """The only row with these values."""
    (row,) = frame[(frame[list(key)] == pd.Series(key)).all(axis=1)].to_dict("records")
    return row


def drawn(plot: Callable[[pd.DataFrame], Any], frame: pd.DataFrame) -> Any:
    """The picture of a table, drawn from its CSV as a reader of the CSV would draw it."""
    picture = plot(pd.read_csv(io.StringIO(frame.to_csv(index=False))))
    picture.draw_without_rendering()
    return picture


def texts(picture: Any) -> list[str]:
    """All texts of a drawn picture."""
    from matplotlib.text import Text

    return [text.get_text() for text in picture.findobj(Text) if text.get_text() and text.get_visible()]
