"""Stored runs made by hand, and what tables and pictures show of them."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd

from eval.store.folder import fingerprint, open_store
from eval.store.record import Visit
from eval.store.runs import StoredRun
from eval.store.trace import Trace, trace_name
from tests.eval.store.visits import NOTHING, only, visit

PROVENANCE = {"git_commit": "abc", "machine": {"device": "a device"}, "versions": {"torch": "2"}}
LAZY = {"schedule": "paper"}
TABLE1: dict[str, dict[str, Any]] = {
    "lazy": {"speedup": "table1"},
    "random_drop": {"speedup": "table1"},
    "static_pruning": {"speedup": "table1", "layer": 2},
}
# one of each paper's task
SIX = ("qasper", "hotpotqa", "gov_report", "trec", "passage_count", "lcc")
_NUMBERS = count()  # of folders, as each run has one


def stored(
    visits: Sequence[Visit], method: str = "lazy", settings: dict[str, Any] | None = None,
    *, model: str = "tiny", paper: str | None = None, seed: int = 0, folder: Path | None = None,
    solved: dict[str, Any] | None = None, provenance: dict[str, Any] = NOTHING, **identity: Any,
) -> StoredRun:  # fmt: skip
    """Make a run of the arms `baseline` and `lazy`, which is any method; of the method `baseline`,
    of it alone.

    settings: hyperparameters, and the `speedup` that the arm was solved for. solved: {dataset: the
    hyperparameters that the speedup gave}. provenance, identity: changes.
    """
    settings = settings or {}
    settings = (LAZY if method == "lazy" and "speedup" not in settings else {}) | settings
    hyperparameters = {name: value for name, value in settings.items() if name != "speedup"}
    arms: dict[str, Any] = {"baseline": {"method": {"name": "baseline"}, "code": "2"}}
    if method == "baseline":
        visits = [only(example, "baseline") for example in visits]
    else:
        arms["lazy"] = {"method": {"name": method, "seed": seed, **hyperparameters}, "code": "2"}
        arms["lazy"] |= (
            {"speedup": settings["speedup"], "parameters": solved or {}}
            if "speedup" in settings
            else {}
        )
    if identity.get("baseline", "baseline") is None:
        del arms["baseline"]
    usual = {"arms": arms, "baseline": "baseline", "seed": seed, "data": {}, "model": model}
    identity = usual | {"engine": "1", "load_format": "auto", "warmup": 1} | identity
    about = {
        "identity": identity, "fingerprint": fingerprint(identity),
        "config": {"model": {"name": model, "paper": paper}}, "provenance": PROVENANCE | provenance,
    }  # fmt: skip
    return StoredRun(folder or Path(f"made-{next(_NUMBERS)}"), about, visits)


def write_run(folder: Path, visits: Sequence[Visit], *setting: Any, **about: Any) -> Path:
    """Write the folder of such a run, as `run.py` leaves it."""
    run = stored(visits, *setting, **about)
    rest = {name: run.about[name] for name in ("config", "provenance")}
    with open_store(folder, run.identity, rest) as store:
        for example in visits:
            store.append(example)
    return folder


def over(datasets: Sequence[str], rows: int = 2, **changes: Any) -> list[Visit]:
    """Make visits of so many rows of each dataset."""
    return [visit(row, name, **changes) for name in datasets for row in range(rows)]


def with_traces(run: StoredRun, folder: Path, *traces: Trace) -> StoredRun:
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    for trace in traces:
        (folder / "traces" / trace_name(trace.dataset, trace.id, trace.arm)).write_text(
            trace.to_json()
        )
    return replace(run, folder=folder)


def small_trace(**changes: Any) -> Trace:
    """Three prompt tokens, two layers; the boundary keeps one prompt token, another one in the
    second step."""
    usual = {
        "dataset": "lookup", "id": "a", "arm": "lazy", "tokens": ["A", " $B$", "C\n"],
        "generated": ["D", "E", "F"], "importance": [[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]],
        "selected": [{1: [2]}, {1: [0, 3]}, {1: [0, 3, 4]}], "group_layers": [1, 1],
        "computed": [[3, 1], [3, 2], [3, 2]],
    }  # fmt: skip
    return Trace(**usual | changes)


def line(frame: pd.DataFrame, **key: Any) -> dict[str, Any]:
    """Find the only row with these values."""
    (row,) = frame[(frame[list(key)] == pd.Series(key)).all(axis=1)].to_dict("records")
    return row


def drawn(plot: Callable[[pd.DataFrame], Any], frame: pd.DataFrame) -> Any:
    """Draw a picture from the CSV of its data, as a reader of the CSV would."""
    picture = plot(pd.read_csv(io.StringIO(frame.to_csv(index=False))))
    picture.draw_without_rendering()
    return picture


def texts(picture: Any) -> list[str]:
    """List all visible texts of a drawn picture."""
    from matplotlib.text import Text

    found = [text.get_text() for text in picture.findobj(Text) if text.get_visible()]
    return [text for text in found if text]
