"""Figures of stored runs: one file per figure, with its data and its plot (`Figure`)."""

from eval.analysis.figures import (
    evidence_by_layer,
    field,
    figure2,
    figure5,
    figure6,
    figure7,
    mechanism,
    needle_map,
    over_turns,
    sensitivity,
    ttft_share,
)
from eval.analysis.figures.comparison import plot_comparison
from eval.analysis.figures.figure import Figure
from eval.analysis.figures.mechanism import plot_mechanism
from eval.analysis.figures.style import save

_FILES = (
    field, mechanism, figure2, figure5, figure6, figure7, ttft_share, sensitivity, needle_map, evidence_by_layer,
    over_turns,
)  # fmt: skip

FIGURES: dict[str, Figure] = {file.FIGURE.name: file.FIGURE for file in _FILES}

__all__ = ["FIGURES", "Figure", "plot_comparison", "plot_mechanism", "save"]
