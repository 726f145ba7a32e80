"""All tables and figures by name: the one place where a new one is registered.

Every one needs stored results only. Rows are joined by key: model, suite, method, settings, task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eval.analysis import evidence, field, figure2, figure5, figure7, mechanism, printed, sensitivity, turns
from eval.analysis.groups import FIGURE as NEEDLE
from eval.analysis.groups import groups
from eval.analysis.paper_tables import claims, table1, table1_paper, table2, table2_paper
from eval.analysis.ranking import effective_keep, ranking
from eval.analysis.serving import serving
from eval.analysis.style import save
from eval.analysis.table import Figure, Table
from eval.analysis.verdicts import step_cost, verdicts
from eval.store.results import Results


@dataclass(frozen=True)
class Subject:
    """A subject of the report: a table, a figure, or both. command: an example of a run that gives its data."""

    table: Callable[[Results], Table] | None = None
    figure: Figure | None = None
    command: str = "python run.py model=tiny method=lazy"


SUBJECTS = {
    "field": Subject(field.field, field.FIGURE, "python run.py -m experiment=field model=tiny"),
    "claims": Subject(claims, command="python run.py model=custom model.name=FOLDER_OR_HUB_ID method=gemfilter"),
    "verdicts": Subject(verdicts, command="python run.py -m experiment=table1 model=llama2,xgen"),
    "step_cost": Subject(step_cost, command="python run.py -m experiment=table2 model=llama2,xgen"),
    "table1_paper": Subject(table1_paper, printed.FIGURE, "python run.py -m experiment=table1 model=llama2,xgen"),
    "table2_paper": Subject(table2_paper, command="python run.py -m experiment=table2 model=llama2,xgen"),
    "table1": Subject(table1, command="python run.py -m experiment=table1 model=llama2,xgen"),
    "table2": Subject(table2, command="python run.py -m experiment=table2 model=llama2,xgen"),
    "mechanism": Subject(figure=mechanism.FIGURE, command="python run.py experiment=figure2 model=tiny"),
    "figure2": Subject(figure=figure2.FIGURE, command="python run.py experiment=figure2 model=llama2 dataset=hotpotqa"),
    "figure5": Subject(figure=figure5.FIGURE, command="python run.py -m experiment=figure5 model=llama2,xgen"),
    "figure6": Subject(figure=sensitivity.FIGURE, command="python run.py -m experiment=figure6 model=llama2,xgen"),
    "figure7": Subject(figure=figure7.FIGURE, command="python run.py experiment=figure7 model=llama2"),
    "groups": Subject(groups),
    "turns": Subject(turns.turns, turns.FIGURE, "python run.py experiment=turns"),
    "memory": Subject(field.memory),
    "ttft_share": Subject(field.ttft_share),
    "sensitivity": Subject(sensitivity.sensitivity, command="python run.py -m experiment=figure6 model=tiny"),
    "needle": Subject(figure=NEEDLE, command="python run.py dataset=needle"),
    "ranking": Subject(ranking, command="python run.py -m experiment=figure5 model=tiny"),
    "effective_keep": Subject(effective_keep, command="python run.py -m experiment=figure5 model=tiny"),
    "evidence": Subject(evidence.evidence, evidence.FIGURE),
    "serving": Subject(serving, command="python run.py model=server server.url=URL model.name=NAME"),
}
TABLES = {name: subject.table for name, subject in SUBJECTS.items() if subject.table is not None}
FIGURES = {name: subject.figure for name, subject in SUBJECTS.items() if subject.figure is not None}


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw all figures that have data as PNG files in a folder, created if missing. Returns the paths."""
    data = {name: figure.data(results) for name, figure in FIGURES.items()}
    drawn = [name for name in FIGURES if not data[name].empty]
    return [path for name in drawn for path in save(FIGURES[name].plot(data[name]), folder / name, ("png",))]
