"""Run folders made by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.store.folder import open_store
from eval.store.visit import Visit

LAZY = {"name": "lazy", "schedule": {"2": 0.5}, "prune_generated": False, "revive": True}
PROVENANCE = {"git_commit": "abc", "machine": {"device": "a device"}, "versions": {"torch": "2"}}


def write_run(
    folder: Path,
    visits: list[Visit],
    method: dict[str, Any] = LAZY,
    model: str = "tiny",
    paper: str | None = None,
    provenance: dict[str, Any] = PROVENANCE,
    arm: str = "lazy",
    **identity: Any,
) -> Path:
    """A run folder as `run.py` leaves it, of the baseline and a method. arm: what the visits call the method."""
    about = {"config": {"model": {"name": model, "paper": paper}}, "provenance": provenance}
    arms = {label: {"method": one, "code": "2"} for label, one in (("baseline", {"name": "baseline"}), (arm, method))}
    usual = {"model": model, "seed": 0, "engine": "1", "data": {}, "load_format": "auto"}
    with open_store(folder, usual | {"arms": arms, "baseline": "baseline"} | identity, about) as store:
        for visit in visits:
            store.append(visit)
    return folder


def alone(visit: Visit) -> Visit:
    """The visit without its baseline."""
    return replace(visit, answers={name: answer for name, answer in visit.answers.items() if name != "baseline"})
