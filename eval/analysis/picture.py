"""The picture of a run: how fast each arm is, and how far its answer is from the baseline's."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.analysis import style
from eval.analysis.run_table import row_name
from eval.store.runs import StoredRun

_TICKS = [0, *(digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 5))]
_GAP = 12.0  # points between the middles of two texts


def save_picture(stored: StoredRun, frame: Any, title: str, stem: Path) -> list[Path]:
    """Save the picture of a run's table as PNG and return its path, if any arm has a KL.

    frame: of `run_table`, whose names of arms the picture takes.
    """
    arms = {row_name(arm): arm for arm in stored.arms.values()}
    whole = "all" if (frame["kind"] == "all").any() else "task"  # a run may have one task only
    rows = frame[(frame["kind"] == whole) & frame["ttft_speedup"].notna()]
    if not (labels := style.kls_in(rows)):
        return []
    kl, label = next(iter(labels.items()))
    is_baseline = rows["method"].map(lambda name: arms[name].is_baseline)
    rows = rows.assign(
        x=rows["ttft_speedup"],
        y=rows[kl].mask(is_baseline, 0.0),
        kind=rows["method"].map(lambda name: arms[name].method),
    ).dropna(subset="y")
    return style.save(draw_arms(rows, label, title), stem, ["png"])


@style.styled
def draw_arms(rows: Any, label: str, title: str) -> Figure:
    """Draw each arm as a point beside its name and numbers.

    rows: `method`, an arm's name; `kind`, its method; `x`, its speedup; `y`, its KL, 0 of the
        baseline. label: of the KL.
    """
    figure = style.new_figure(7.5, max(4.5, 1.5 + _GAP / 72 * len(rows)))
    axes = figure.subplots()
    looks = style.styles_of(rows["kind"])
    least = min((kl for kl in rows["y"] if kl > 0), default=1e-6)
    axes.set_yscale("symlog", linthresh=least / 2, linscale=0.2)
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if not 0 < tick < least]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for row in rows.to_dict("records"):
        look = looks[row["kind"]] | {"linestyle": "none", "markersize": 8}
        axes.plot(row["x"], row["y"], **look)
    axes.axvline(1, **style.REFERENCE)
    style.log_scale(axes, "x")
    axes.margins(x=0.15, y=0.1)
    axes.set_title(
        f"{title}\nbetter: to the right (faster) and down (closer to the baseline's answers)"
    )
    axes.set(
        xlabel="TTFT speedup: times as fast to the first token as the baseline",
        ylabel=label,
    )
    _write_names(axes, rows, looks)
    return figure


def _write_names(axes: Any, rows: Any, looks: dict[str, Any]) -> None:
    """Write each arm's name and numbers beside its point, with room between neighbours."""
    axes.figure.draw_without_rendering()  # which settles where points are
    points = axes.transData.transform(rows[["x", "y"]])
    heights = points[:, 1] * 72 / axes.figure.dpi
    is_right = points[:, 0] > axes.bbox.x0 + axes.bbox.width / 2
    for is_left in (False, True):  # the text of a point in the right half stands to its left
        last = -np.inf
        for number in sorted(np.flatnonzero(is_right == is_left), key=lambda at: heights[at]):
            height = max(last + _GAP, heights[number])
            last, row = height, rows.iloc[number]
            axes.annotate(
                f"{row['method']}: {row['x']:.2f}x, KL {row['y']:.3f}",
                (row["x"], row["y"]),
                (-9 if is_left else 9, height - heights[number]),
                textcoords="offset points",
                horizontalalignment="right" if is_left else "left",
                verticalalignment="center",
                color=looks[row["kind"]]["color"],
            )
