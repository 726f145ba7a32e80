"""All tables and figures by name, made of stored results only: the one place where a new one is registered."""

from pathlib import Path
from typing import Any

from eval.analysis import evidence, field, figure2, figure5, figure7, groups, mechanism, printed, sensitivity, turns
from eval.analysis.paper_tables import claims, table1, table1_paper, table2, table2_paper
from eval.analysis.ranking import effective_keep, ranking
from eval.analysis.serving import serving
from eval.analysis.style import save
from eval.analysis.table import Figure, words
from eval.analysis.verdicts import step_cost, verdicts
from eval.store.results import Results

# The functions that make tables, which have their names, and the modules whose `data` and `plot` make figures
_TABLES = (
    field.field, field.memory, field.ttft_share, claims, verdicts, step_cost, table1_paper, table2_paper, table1,
    table2, groups.groups, turns.turns, sensitivity.sensitivity, ranking, effective_keep, evidence.evidence, serving,
)  # fmt: skip
_FIGURES: dict[str, Any] = {
    "field": field, "table1_paper": printed, "mechanism": mechanism, "figure2": figure2, "figure5": figure5,
    "figure6": sensitivity, "figure7": figure7, "turns": turns, "needle": groups, "evidence": evidence,
}  # fmt: skip


# In the order of words.yaml
TABLES = {name: make for name in words() for make in _TABLES if make.__name__ == name}
FIGURES = {
    name: Figure(**texts["figure"], command=texts["command"], data=_FIGURES[name].data, plot=_FIGURES[name].plot)
    for name, texts in words().items()
    if name in _FIGURES
}


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw all figures that have data as PNG files in a folder, created if missing. Returns the paths."""
    data = {name: figure.data(results) for name, figure in FIGURES.items()}
    drawn = [name for name in FIGURES if not data[name].empty]
    return [path for name in drawn for path in save(FIGURES[name].plot(data[name]), folder / name, ("png",))]
