"""The paper's Table 1 with our numbers, as a picture."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.analysis import style
from eval.analysis.columns import BASELINE
from eval.analysis.paper_tables import AS_PRINTED, table1, table1_paper
from eval.analysis.table import as_figure
from eval.store.results import Results

_LINE, _LETTER, _GAP = 0.19, 0.078, 0.18  # inches: a line's height, a letter's width, between columns
_RULE: Any = {"color": "black", "linewidth": 0.9, "clip_on": False}
_THIN: Any = {"color": style.GREY, "linewidth": 0.4, "clip_on": False}


def data(results: Results) -> pd.DataFrame:
    """The cells of `table1_paper`; none if no method of it was run."""
    has_methods = set(table1(results).frame["method"]) - {BASELINE}
    return table1_paper(results).cells if has_methods else pd.DataFrame()


@as_figure(
    50,
    "table1_paper",
    data,
    title="Table 1 as the paper prints it",
    caption=AS_PRINTED,
    command="python run.py -m experiment=table1 model=llama2,xgen",
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """The cells under two lines of headings: a model's name above its columns. The first two columns name the row."""
    headings, rows = list(frame.columns), frame.astype(str).to_numpy().tolist()
    names = [heading.rpartition(": ")[2].replace(" ", "\n", 1) for heading in headings]
    models = [heading.rpartition(": ")[0] for heading in headings]
    widths = [
        _LETTER * max(len(text) for text in (*name.split("\n"), *(row[place] for row in rows))) + _GAP
        for place, name in enumerate(names)
    ]
    lefts = [sum(widths[:place]) for place in range(len(widths))]
    width, height = sum(widths), _LINE * (len(rows) + 4)
    figure = style.new_figure(width + _GAP, height)
    axes = figure.add_subplot()
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()

    def write(place: int, y: float, text: str, **look: Any) -> None:
        is_name = place < 2
        x = lefts[place] if is_name else lefts[place] + widths[place] - _GAP / 2
        axes.text(x, y, text, ha="left" if is_name else "right", va="center", fontsize=8, **look)

    for model in dict.fromkeys(filter(None, models)):
        places = [place for place, name in enumerate(models) if name == model]
        left, right = lefts[places[0]] + _GAP / 2, lefts[places[-1]] + widths[places[-1]] - _GAP / 2
        axes.text((left + right) / 2, 0.5 * _LINE, model, ha="center", va="center", fontsize=8.5, fontweight="bold")
        axes.plot([left, right], [_LINE] * 2, **_THIN)
    for place, name in enumerate(names):
        write(place, 2 * _LINE, name)
    before = None
    for number, row in enumerate(rows):
        y = (3.6 + number) * _LINE
        begins = row[0] != before
        if begins:
            axes.plot([0, width], [y - _LINE / 2] * 2, **_THIN if number else _RULE)
        for place, text in enumerate(row):
            if place or begins:
                write(place, y, text, fontweight="bold" if row[1].startswith("LazyLLM") and place else "normal")
        before = row[0]
    for y in (0, height - 0.9 * _LINE):
        axes.plot([0, width], [y] * 2, **_RULE)
    return figure
