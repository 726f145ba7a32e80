"""All tables and pictures of some runs, each made once: what files, the page and the W&B Report
show.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from eval.analysis.table import Figure, Table
from eval.store.results import Results

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Picture:
    """A figure of some runs: its data, and matplotlib's figure of them."""

    name: str
    figure: Figure
    data: pd.DataFrame
    drawn: Any


@dataclass(frozen=True)
class Content:
    """tables, pictures: those with data, in order. missing: (title, a command that gives data)
    of the others.
    """

    tables: list[Table]
    pictures: list[Picture]
    missing: list[tuple[str, str]]


def content_of(
    results: Results,
    tables: Mapping[str, Callable[[Results], Table]],
    figures: Mapping[str, Figure],
) -> Content:
    """Make tables and draw figures of these runs. tables, figures: such as those of
    `eval.analysis.table`.
    """
    content, total = Content([], [], []), len(tables) + len(figures)
    for number, (name, make) in enumerate(tables.items(), start=1):
        log.info("%d of %d: table %s", number, total, name)
        table = make(results)
        if table.frame.empty:
            content.missing.append((table.title, table.command))
        else:
            content.tables.append(table)
    for number, (name, figure) in enumerate(figures.items(), start=1 + len(tables)):
        log.info("%d of %d: figure %s", number, total, name)
        data = figure.data(results)
        if data.empty:
            content.missing.append((figure.title, figure.command))
        else:
            content.pictures.append(Picture(name, figure, data, figure.plot(data)))
    return content
