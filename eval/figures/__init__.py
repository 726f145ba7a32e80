"""Pictures of stored runs: one file a figure, each a table and a drawing of that table (`Figure`)."""

from eval.figures import figure2, figure7, mechanism
from eval.figures.base import Figure
from eval.figures.comparison import plot_comparison
from eval.figures.mechanism import plot_mechanism
from eval.figures.style import save

FIGURES: dict[str, Figure] = {one.FIGURE.name: one.FIGURE for one in (figure2, figure7, mechanism)}

__all__ = ["FIGURES", "Figure", "plot_comparison", "plot_mechanism", "save"]
