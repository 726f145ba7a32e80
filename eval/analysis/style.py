"""What figures share: the choice of runs, colours, markers and line styles by method, axes, and reproducible files.

Every method has its own colour, marker and line style, so that curves differ in grey and for colour-blind readers.
Figures do not use pyplot, which has global state and may need a screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as MplFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.analysis.known_methods import BASELINE, STUDIED, kind_of, place_of
from eval.store.record import Trace, read_trace
from eval.store.results import Results
from eval.store.runs import StoredRun, is_ablation, label_of

# Figure 4's schedule with all other settings at their defaults
PAPER_SETTING = label_of(STUDIED, {"schedule": "paper", "prune_generated": False, "revive": True})

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = (
    "-", (0, (5, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (7, 2, 1, 2, 1, 2)), (0, (9, 2)), (0, (2, 1, 2, 3)),
    (0, (1, 4)), (0, (3, 3)), (0, (8, 2, 3, 2)), (0, (6, 1, 1, 1, 1, 1, 1, 1)), (0, (2, 2, 8, 2)),
    (0, (5, 1, 1, 1, 5, 3)),
)  # fmt: skip

GREY = "#6E6E6E"
REFERENCE: Any = {"color": GREY, "linewidth": 0.8, "linestyle": (0, (1, 2))}  # a line to compare with

_RC: Any = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.formatter.useoffset": False,  # no "+1e2" at an axis's end
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.5,
}
_FILES: Any = {
    "svg.fonttype": "path",  # the same in every browser, whatever its fonts
    "svg.hashsalt": "lazyllm-bench",  # the same ids in every file
    "pdf.fonttype": 42,  # text that can be searched
}
_NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


# ---------------------------------------------------------------------------------------------------------------- runs


def usual(results: Results) -> Results:
    """Of each model, the runs that differ least from most of its runs (`StoredRun.facts`): tables show all of them."""
    least: dict[str, int] = {}
    for run in results.runs:
        name = run.model.removesuffix(run.apart)
        least[name] = min(len(run.facts), least.get(name, len(run.facts)))
    return results.where(lambda run: len(run.facts) == least[run.model.removesuffix(run.apart)])


def as_published(results: Results) -> Results:
    """The `usual` runs without ablations of LazyLLM, which only tables show."""
    return usual(results).where(lambda run: not is_ablation(run.settings))


def studied(results: Results) -> Results:
    """For each model, the runs of one LazyLLM setting: Figure 4's schedule if it was run, else the setting with most
    examples (the first by label of equal ones). Ablations are left out.
    """
    results = as_published(results)
    examples: dict[str, Counter[str]] = {}
    for run in results.runs:
        if run.method == STUDIED:
            examples.setdefault(run.model, Counter())[run.label] += len(run.examples)
    labels = {
        model: min(counts, key=lambda label: (label != PAPER_SETTING, -counts[label], label))
        for model, counts in examples.items()
    }
    return results.where(lambda run: run.method == STUDIED and labels[run.model] == run.label)


def traced_example(results: Results) -> tuple[StoredRun, Trace] | None:
    """The first trace of the runs, or None; the paper's models and Figure 4's schedule come first."""
    traced = [run for run in results.runs if run.traces]
    if not traced:
        return None
    run = min(traced, key=lambda run: (run.paper_model is None, run.label != PAPER_SETTING))
    return run, read_trace(run.traces[0])


# ------------------------------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class MethodStyle:
    """name: the method for people. line: a matplotlib line style."""

    name: str
    colour: str
    marker: str
    line: Any

    @property
    def drawn(self) -> dict[str, Any]:
        """Arguments of matplotlib's `plot`."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


# for methods that declare no colour and marker
_SPARE = [("#6E6E6E", "p"), ("#8B5A2B", "H"), ("#B0A000", "1"), ("#404040", "2")]


def styles_of(methods: Iterable[str]) -> dict[str, MethodStyle]:
    """{method: its own style, or a spare one}, in the methods' order.

    Lines are solid for the baseline and the method under study only.
    """
    styles: dict[str, MethodStyle] = {}
    spare = cycle(_SPARE)
    for name in sorted(set(methods), key=place_of):
        kind = kind_of(name)
        if kind is None or kind.colour is None or kind.marker is None:
            styles[name] = MethodStyle(name if kind is None else kind.label, *next(spare), LINES[-1])
        else:
            line = LINES[0] if name in (BASELINE, STUDIED) else LINES[1 + kind.order % (len(LINES) - 1)]
            styles[name] = MethodStyle(kind.label, kind.colour, kind.marker, line)
    return styles


def shade_of(number: int, total: int) -> str:
    """The shade of an ordered value, from dark to light; the lightest is still legible on white."""
    return to_hex(mpl.colormaps["viridis"](0.78 * number / max(1, total - 1)))


def look_of(number: int) -> dict[str, Any]:
    """Marker and line style of the curve of this number, for curves that are not methods."""
    return {"marker": MARKERS[number % len(MARKERS)], "linestyle": LINES[number % len(LINES)]}


# --------------------------------------------------------------------------------------------------- figures and axes

_Plot = TypeVar("_Plot", bound=Callable[..., MplFigure])


def styled(plot: _Plot) -> _Plot:
    """Run a plotting function with this module's fonts and axes, then restore matplotlib's settings."""

    @wraps(plot)
    def in_style(*args: Any, **kwargs: Any) -> MplFigure:
        with mpl.rc_context(_RC):
            return plot(*args, **kwargs)

    return in_style  # pyright: ignore[reportReturnType]


MOST = 3  # models and suites in a figure


def new_figure(width: float, height: float, wspace: float = 0.02, left_out: int = 0) -> MplFigure:
    """An empty figure with constrained layout; sizes in inches. wspace: the least gap between parts, as a share.

    left_out: of `panels_of`; a line on top says how to choose them.
    """
    figure = MplFigure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=wspace))
    if left_out:
        text = f"{left_out} more in the CSV: --where KEY=VALUE chooses the runs to draw"
        figure.suptitle(text, x=0.01, ha="left", fontsize=8, color=GREY)
    return figure


def panels_of(frame: Any, keys: Sequence[str], most: int = MOST) -> tuple[list[tuple[Any, Any]], int]:
    """(the keys' values, their rows) in order, at most the `most` with most rows; and the number left out."""
    panels = list(frame.groupby(list(keys), sort=False))
    sizes = sorted(((-len(rows), number) for number, (_, rows) in enumerate(panels)))[:most]
    return [panels[number] for number in sorted(number for _, number in sizes)], max(0, len(panels) - most)


def titled_parts(figure: MplFigure, titles: Sequence[str], heights: Sequence[float] | None = None) -> list[Any]:
    """The figure split into parts from top to bottom, each with its title. heights: relative ones of the parts."""
    parts = list(figure.subfigures(len(titles), 1, squeeze=False, height_ratios=heights)[:, 0])
    for part, title in zip(parts, titles, strict=True):
        part.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return parts


def log_scale(axes: Any, which: str, ticks: Sequence[float]) -> None:
    """Make the "x" or "y" axis logarithmic, with plain numbers at these ticks only."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def grid(axes: Any, which: str = "both") -> None:
    """Faint grid lines behind the plot."""
    axes.grid(axis=which, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def legend_beside(axes: Any, **options: Any) -> None:
    """A legend to the right of the axes. options: of matplotlib's `legend`."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **options)


def around(rows: Any, column: str) -> np.ndarray:
    """[2, rows] both ends of intervals as distances from the value, for `errorbar`; NaN if there is no interval."""
    low, value, high = (np.atleast_1d(rows[f"{column}{end}"]).astype(float) for end in ("_low", "", "_high"))
    return np.maximum(0, [value - low, high - value])


def draw(axes: Any, rows: Any, x: str, y: str, with_x: bool = False, **look: Any) -> None:
    """Points of two columns with their intervals, those of x only if asked. look: of matplotlib's `errorbar`."""
    bars = {"xerr": around(rows, x)} if with_x else {}
    axes.errorbar(rows[x], rows[y], yerr=around(rows, y), **bars, **{"elinewidth": 0.8, "capsize": 2} | look)


def save(figure: Any, stem: Path, suffixes: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write the figure as `stem` with each suffix (svg, pdf or png). Equal pictures have equal bytes.

    Returns the paths.
    """
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in suffixes]
    with mpl.rc_context(_FILES):
        for path in paths:
            figure.savefig(path, dpi=160, metadata=_NO_DATE.get(path.suffix))
    return paths
