"""Figure 2: the attention of a prompt's last token to each token, in each layer."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import MaxNLocator

from eval.analysis.style import COLOURS, REFERENCE, new_figure, styled, tabulate_trace
from eval.analysis.table import as_figure
from eval.store.results import Results
from eval.store.trace import Trace

COLUMNS = 700  # of the heat map; more would not be visible in print
FIRST = 30  # tokens in the inset
_FAINTEST = 0.01  # as a share of 1/n: scores below it have the darkest colour


def importance_frame(trace: Trace) -> pd.DataFrame:
    """part "map": s[l, i] (Eq. 1) by layer and column; a column is the maximum over `width`
    neighbouring tokens, from token i on. part "mean": each token's mean over the layers. Positions
    count from 0.
    """
    scores = np.array(trace.importance)
    n = scores.shape[1]
    width = -(-n // COLUMNS)
    starts = np.arange(0, n, width)
    # a mean would hide peaks, which are one token wide
    columns = np.maximum.reduceat(scores, starts, axis=1)
    layer, column = np.indices(columns.shape).reshape(2, -1)
    map_rows = {
        "part": "map",
        "layer": layer + 1,
        "position": starts[column],
        "importance": columns.ravel(),
    }
    mean_rows = {"part": "mean", "position": np.arange(n), "importance": scores.mean(axis=0)}
    frame: Any = pd.concat([pd.DataFrame(map_rows), pd.DataFrame(mean_rows)], ignore_index=True)
    frame["layer"] = frame["layer"].astype("Int64")
    about = {"dataset": trace.dataset, "id": trace.id, "prompt_tokens": n, "width": width}
    return frame.assign(**about)[[*about, *frame.columns]]


def data(results: Results) -> pd.DataFrame:
    """`importance_frame` of one traced example, which was not pruned, with a column `model`."""
    return tabulate_trace(results, importance_frame, ["model"])


@as_figure(
    100,
    "figure2",
    data,
    title="Most prompt tokens matter little to the next one (the paper's Figure 2)",
    caption=(
        "Importance (Eq. 1) of every token of one prompt, without pruning: by layer on the left, "
        "as a mean over the layers on the right."
    ),
    notes=(
        "Colours have a log scale; scores below 1 % of an equal share (1/n) have the darkest one. "
        "If there are more tokens than columns, a column shows the largest score of its tokens. "
        "Inset: the first tokens."
    ),
    command="python run.py experiment=figure2 model=llama2 dataset=hotpotqa",
)
@styled
def plot(frame: Any) -> MplFigure:
    """The heat map on the left, each token's mean score over the layers on the right."""
    figure = new_figure(10, 3.4)
    figure.set_layout_engine("constrained", wspace=0.06)
    left, right = figure.subplots(1, 2, width_ratios=(2.1, 1))
    left.grid(False)
    _draw_map(figure, left, frame)
    _draw_means(right, frame)
    return figure


def _draw_map(figure: MplFigure, axes: Any, frame: Any) -> None:
    cells = (
        frame[frame["part"] == "map"]
        .pivot(index="layer", columns="position", values="importance")
        .to_numpy()
    )
    model, dataset, n, width = frame[["model", "dataset", "prompt_tokens", "width"]].iloc[0]
    picture = axes.imshow(
        cells, aspect="auto", interpolation="none", cmap="viridis",
        extent=(0.5, n + 0.5, len(cells) + 0.5, 0.5),
        norm=LogNorm(_FAINTEST / n, cells.max(), clip=True),
    )  # fmt: skip
    columns = f" (each column: the largest of {width} neighbours)" if width > 1 else ""
    axes.set(xlabel=f"prompt token{columns}", ylabel="layer")
    axes.set_title(f"a  Importance by layer and token ({model}, {dataset})")
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 8, 10]))
    bar = figure.colorbar(picture, ax=axes, extend="min", pad=0.015, aspect=28)
    bar.set_label("last token's attention, mean over heads", fontsize=8.5)
    bar.ax.axhline(1 / n, color="white", linewidth=1.2)
    bar.ax.text(
        -0.2,
        1 / n,
        "1/n",
        transform=bar.ax.get_yaxis_transform(),
        ha="right",
        va="center",
        fontsize=7,
    )


def _draw_means(axes: Any, frame: Any) -> None:
    scores = frame.loc[frame["part"] == "mean", "importance"].to_numpy(dtype=float)
    n = len(scores)
    inset = axes.inset_axes((0.3, 0.4, 0.6, 0.45))
    for place, count in ((axes, n), (inset, min(n, FIRST))):
        place.vlines(
            np.arange(1, count + 1),
            0,
            scores[:count],
            color=COLOURS[0],
            linewidth=max(0.8, 40 / count),
        )
        place.axhline(1 / n, **REFERENCE)
        place.set(xlim=(0, count + 1), ylim=(0, 1.05 * scores[:count].max()))
    inset.set_title(f"first {min(n, FIRST)} tokens", fontsize=8)
    inset.tick_params(labelsize=7)
    axes.set(xlabel="prompt token (dotted: 1/n)", ylabel="mean score over the layers")
    axes.set_title("b  Mean score by token", pad=30)
    top = np.sort(scores)[::-1][: -(-n // 10)]
    axes.annotate(
        f"{100 * (scores < 1 / n).mean():.0f} % of the tokens get less than an equal share;\n"
        f"the top 10 % get {100 * top.sum() / scores.sum():.0f} % of the attention",
        (0, 1.02), xycoords="axes fraction", va="bottom", fontsize=8,
    )  # fmt: skip
