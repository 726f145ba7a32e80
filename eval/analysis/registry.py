"""All tables and figures by name: the one place where a new one is registered.

Every one needs stored results only. Rows are joined by key: model, suite, method, settings, task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.analysis import (
    evidence,
    field,
    figure2,
    figure5,
    figure7,
    groups,
    mechanism,
    paper_tables,
    printed,
    ranking,
    sensitivity,
    serving,
    turns,
    verdicts,
)
from eval.analysis.style import save
from eval.analysis.table import Figure, Table, words
from eval.store.results import Results


@dataclass(frozen=True)
class Subject:
    """A subject of the report: a table, a figure, or both. command: an example of a run that gives its data."""

    table: Callable[[Results], Table] | None = None
    figure: Figure | None = None
    command: str = ""


# {name in words.yaml: (function that makes its table, module whose `data` and `plot` make its figure)}
_MADE_BY: dict[str, tuple[Callable[[Results], Table] | None, Any]] = {
    "field": (field.field, field),
    "claims": (paper_tables.claims, None),
    "verdicts": (verdicts.verdicts, None),
    "step_cost": (verdicts.step_cost, None),
    "table1_paper": (paper_tables.table1_paper, printed),
    "table2_paper": (paper_tables.table2_paper, None),
    "table1": (paper_tables.table1, None),
    "table2": (paper_tables.table2, None),
    "mechanism": (None, mechanism),
    "figure2": (None, figure2),
    "figure5": (None, figure5),
    "figure6": (None, sensitivity),
    "figure7": (None, figure7),
    "groups": (groups.groups, None),
    "turns": (turns.turns, turns),
    "memory": (field.memory, None),
    "ttft_share": (field.ttft_share, None),
    "sensitivity": (sensitivity.sensitivity, None),
    "needle": (None, groups),
    "ranking": (ranking.ranking, None),
    "effective_keep": (ranking.effective_keep, None),
    "evidence": (evidence.evidence, evidence),
    "serving": (serving.serving, None),
}


def _subject(name: str, table: Callable[[Results], Table] | None, module: Any) -> Subject:
    told = words()[name]
    figure = None if module is None else Figure(**told["figure"], data=module.data, plot=module.plot)
    return Subject(table, figure, told["command"])


SUBJECTS = {name: _subject(name, *made_by) for name, made_by in _MADE_BY.items()}
TABLES = {name: subject.table for name, subject in SUBJECTS.items() if subject.table is not None}
FIGURES = {name: subject.figure for name, subject in SUBJECTS.items() if subject.figure is not None}


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw all figures that have data as PNG files in a folder, created if missing. Returns the paths."""
    data = {name: figure.data(results) for name, figure in FIGURES.items()}
    drawn = [name for name in FIGURES if not data[name].empty]
    return [path for name in drawn for path in save(FIGURES[name].plot(data[name]), folder / name, ("png",))]
