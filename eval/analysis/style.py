"""What figures share: the choice of runs, colours, markers and line styles by method, axes, and
reproducible files.

Every method has its own colour, marker and line style, so that curves differ in grey and for
colour-blind readers. Figures do not use pyplot, which has global state and may need a screen.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from eval.analysis.columns import BASELINE, SECTION, STUDIED, kind_of, place_of
from eval.benchmarks.datasets import TASKS
from eval.store.results import Results
from eval.store.runs import is_ablation, label_of
from eval.store.trace import Trace, read_trace

# Figure 4's schedule with all other settings at their defaults
PAPER_SETTING = label_of(STUDIED, {"schedule": "paper"})

# Okabe and Ito's colours, which colour-blind readers can distinguish
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = (
    "-", (0, (5, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (7, 2, 1, 2, 1, 2)), (0, (9, 2)),
    (0, (2, 1, 2, 3)), (0, (1, 4)), (0, (3, 3)), (0, (8, 2, 3, 2)), (0, (6, 1, 1, 1, 1, 1, 1, 1)),
    (0, (2, 2, 8, 2)),
    (0, (5, 1, 1, 1, 5, 3)), (0, (10, 1, 1, 1)), (0, (3, 1, 3, 5)), (0, (1, 1, 6, 1)),
)  # fmt: skip

# for methods that declare no colour and marker
_SPARE = [("#6E6E6E", "1"), ("#8B5A2B", "2"), ("#B0A000", "3"), ("#404040", "4")]
GREY = "#6E6E6E"
MOST = 3  # models and suites in a figure
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10)  # of speedups
_IN_A_ROW = 4  # panels of tasks
# a line to compare with
REFERENCE: Any = {"color": GREY, "linewidth": 0.8, "linestyle": (0, (1, 2))}

_FILES: Any = {
    "svg.fonttype": "path",  # the same in every browser, whatever its fonts
    "svg.hashsalt": "lazyllm-bench",  # the same ids in every file
    "pdf.fonttype": 42,  # text that can be searched
}
_NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


_KLS = {
    "answer_kl": "answer's KL, nats: lower is better", "gold_kl": "gold KL, nats: lower is better",
    "kl": "first token's KL, nats: lower is better",
}  # fmt: skip


def kls_in(frame: Any) -> dict[str, str]:
    """{each KL that any row has: its axis label}."""
    return {name: label for name, label in _KLS.items() if frame[name].notna().any()}


def as_published(rows: Any) -> Any:
    """The rows of a frame without ablations of LazyLLM, which only tables show. rows: with
    method and settings.
    """
    ablations = {text: is_ablation(json.loads(text)) for text in rows["settings"].unique()}
    return rows[~((rows["method"] == STUDIED) & rows["settings"].map(ablations).astype(bool))]


def drop_partial_means(rows: Any) -> Any:
    """These rows of `by_task` without means over tasks that lack datasets of another setting's
    mean.

    A curve does not join means over different tasks.
    """
    whole = rows["level"] == "all"
    most = rows["datasets"].where(whole).groupby([rows[name] for name in SECTION]).transform("max")
    return rows[~whole | (rows["datasets"] == most)]


def studied(results: Results) -> Any:
    """The rows that count of one LazyLLM setting for each model: Figure 4's schedule if it was run,
    else the setting with most examples (the first by label of equal ones). Without ablations.
    """
    counting = as_published(results.counting)
    rows = counting[counting["method"] == STUDIED]
    is_paper = rows["label"] == PAPER_SETTING
    rows = rows[is_paper | ~is_paper.groupby(rows["model"]).transform("any")]
    sizes = rows.groupby(["model", "label"])[["dataset", "id"]].apply(
        lambda part: len(part.drop_duplicates())
    )
    chosen: dict[str, str] = {}
    for model, label in sorted(sizes.index, key=lambda key: (-int(sizes[key]), key[1])):
        chosen.setdefault(model, label)
    return rows[rows["model"].map(chosen) == rows["label"]]


def tabulate_trace(
    results: Results,
    frame_of: Callable[[Trace], Any],
    about: Sequence[str],
    method: str | None = None,
) -> Any:
    """The frame of the runs' first trace (of the paper's models and Figure 4's schedule, if there
    are such), after `about`: model, or model and label; empty without a trace. method: whose arms
    count, without ablations.
    """
    traced = [
        (run, run.arms[trace.arm], trace)
        for run in results.runs
        for trace in map(read_trace, run.traces)
    ]
    if method is not None:
        traced = [
            (run, arm, trace)
            for run, arm, trace in traced
            if arm.method == method and not is_ablation(arm.values)
        ]
    if not traced:
        return pd.DataFrame()
    run, arm, trace = min(
        traced, key=lambda entry: (entry[0].paper_model is None, entry[1].label != PAPER_SETTING)
    )
    frame = frame_of(trace)
    return frame.assign(model=run.model, label=arm.label)[[*about, *frame.columns]]


def styles_of(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{method: arguments of matplotlib's `plot`, its own or spare ones}, in the methods' order.

    Lines are solid for the baseline and the method under study only.
    """
    styles: dict[str, dict[str, Any]] = {}
    spare = cycle(_SPARE)
    for name in sorted(set(methods), key=place_of):
        kind, line = kind_of(name), LINES[-1]
        if kind is None or kind.colour is None or kind.marker is None:
            colour, marker = next(spare)
        else:
            colour, marker = kind.colour, kind.marker
            line = (
                LINES[0]
                if name in (BASELINE, STUDIED)
                else LINES[1 + kind.order % (len(LINES) - 1)]
            )
        look = {"color": colour, "marker": marker, "linestyle": line}
        styles[name] = {"label": place_of(name)[1], **look}
    return styles


def shown_label(label: str, method: str) -> str:
    """A setting's label with the method's name as shown, `LazyLLM, schedule=paper`, in at most two
    lines for matplotlib.
    """
    text = place_of(method)[1] + label.removeprefix(method)
    return "\n".join(wrap(text, 50, max_lines=2, placeholder="…")).replace("$", r"\$")


def look_of(number: int, total: int) -> dict[str, Any]:
    """Arguments of `draw` for one of several curves that are not methods: from dark to light,
    legible on white.
    """
    colour = to_hex(mpl.colormaps["viridis"](0.78 * number / max(1, total - 1)))
    marks = {"marker": MARKERS[number % len(MARKERS)], "linestyle": LINES[number % len(LINES)]}
    return {"color": colour, **marks}


# A decorator that draws with our fonts and axes, then restores matplotlib's settings
styled = style.context(Path(__file__).with_name("figures.mplstyle"))


def new_figure(width: float, height: float, left_out: int = 0) -> MplFigure:
    """An empty figure with constrained layout; sizes in inches. left_out: of `panels_of`; a line
    says how to choose.
    """
    figure = MplFigure(figsize=(width, height), layout="constrained")
    if left_out:
        text = f"{left_out} more in the CSV: --where KEY=VALUE chooses the runs to draw"
        figure.suptitle(text, x=0.01, ha="left", fontsize=8, color=GREY)
    return figure


def panels_of(
    frame: Any, keys: Sequence[str], most: int = MOST
) -> tuple[list[tuple[Any, Any]], int]:
    """(the keys' values, their rows) in order, at most the `most` with most rows; and the number
    left out.
    """
    panels = list(frame.groupby(list(keys), sort=False))
    largest = sorted(range(len(panels)), key=lambda number: -len(panels[number][1]))[:most]
    return [panels[number] for number in sorted(largest)], max(0, len(panels) - most)


def sections_of(
    frame: Any, title: str, width: float, height: Callable[[Any], float], most: int = MOST
) -> tuple[MplFigure, list[tuple[Any, Any]]]:
    """A figure, and (its part, its rows) for each model and suite, from top to bottom. `most`: as
    in `panels_of`.

    title: what is seen; each part's title has it, with model and suite. width, height: in inches,
    height from a part's rows.
    """
    panels, left_out = panels_of(frame, SECTION, most)
    heights = [height(rows) for _, rows in panels]
    figure = new_figure(width, sum(heights), left_out)
    parts = figure.subfigures(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, ((model, suite), _) in zip(parts, panels, strict=True):
        part.suptitle(
            f"{title}: {model}, {suite}", x=0.01, ha="left", fontsize=10, fontweight="bold"
        )
    return figure, [(part, rows) for part, (_, rows) in zip(parts, panels, strict=True)]


def task_lines(rows: Any) -> int:
    """The lines of `task_panels`."""
    return -(-rows["task"].nunique() // _IN_A_ROW)


def task_panels(part: Any, rows: Any) -> dict[str, Any]:
    """{task, or "all": axes} for each task of the rows."""
    tasks = [task for task in ("all", *TASKS) if task in set(rows["task"])]
    columns = min(_IN_A_ROW, len(tasks))
    places = part.subplots(
        task_lines(rows), columns, sharex=True, sharey=True, squeeze=False
    ).ravel()
    for axes in places[len(tasks) :]:
        axes.set_axis_off()
    panels = dict(zip(tasks, places, strict=False))
    for task, axes in panels.items():
        axes.set_title(
            "mean over tasks" if task == "all" else task.replace("_", " ").replace(" qa", " QA")
        )
        axes.tick_params(labelbottom=True, labelleft=True)
    return panels


class _Ticks(FixedLocator):
    """The given ticks if the axis shows three of them, else round numbers."""

    def __call__(self) -> Any:
        low, high = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
        ticks = [tick for tick in self.locs if low <= tick <= high]  # type: ignore[attr-defined]
        return (
            ticks if len(ticks) > 2 else MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high)
        )


def log_scale(axes: Any, which: str, ticks: Sequence[float] = TICKS) -> None:
    """Make the "x" or "y" axis logarithmic, with plain numbers at these ticks only, or closer
    ones on a short axis.
    """
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(_Ticks(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def legend_beside(axes: Any, **options: Any) -> None:
    """A legend to the right of the axes. options: of matplotlib's `legend`."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **options)


def around(rows: Any, column: str) -> np.ndarray:
    """[2, rows] both ends of intervals as distances from the value, for `errorbar`; NaN if there
    is no interval.
    """
    low, value, high = (rows[f"{column}{end}"].astype(float) for end in ("_low", "", "_high"))
    return np.maximum(0, [value - low, high - value])


def draw(axes: Any, rows: Any, x: str, y: str, with_x: bool = False, **look: Any) -> None:
    """Points of two columns with their intervals, those of x only if asked. look: of
    matplotlib's `errorbar`.
    """
    bars = {"xerr": around(rows, x)} if with_x else {}
    axes.errorbar(rows[x], rows[y], yerr=around(rows, y), **bars, **{"elinewidth": 0.8} | look)


def save(figure: Any, stem: Path, suffixes: Sequence[str]) -> list[Path]:
    """Write the figure as `stem` with each suffix (svg, pdf or png): the paths. Equal pictures
    have equal bytes.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in suffixes]
    with mpl.rc_context(_FILES):
        for path in paths:
            figure.savefig(path, dpi=160, metadata=_NO_DATE.get(path.suffix))
    return paths
