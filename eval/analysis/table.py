"""A table, and its forms: Markdown, terminal, CSV at full precision, LaTeX. A figure: data and a
plot of them.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Self

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from eval.benchmarks import SUITES
from eval.store.results import Results

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "Δ": r"$\Delta$",
    "<": r"\textless{}",
    ">": r"\textgreater{}", "[": "{[}", "|": r"\textbar{}", "\n": " ",
}  # fmt: skip
MB = 1e6
KEPT_WITHIN = 10  # points: a share of the baseline's score that is not known so well is not shown
_LEAST = 2  # even the narrowest terminal shows this many columns of values
# {what occurs in a heading or a cell: what it stands for}, explained once a page
_SIGNS = {
    "±": "±: half of the 95 % bootstrap interval over examples",
    "ideal": "ideal: the speedup by prefill FLOPs, scoring included",
    "computed": "% computed: prompt tokens, mean over layers; tokens run by any model to score the "
    "prompt are included",
    "KL": "KL: divergence of the first token's distribution from the baseline's, in nats",
    "answer's KL": "answer's KL: the mean over the tokens of the baseline's answer, given to the "
    "method as its own",
    "gold": "gold KL: the same of the gold answer; gold log-likelihood: a token's, less the "
    "baseline's",
    "?": f"?: a share of the baseline's score that is not known to within ±{KEPT_WITHIN} points",
    "unpaired": "unpaired: no baseline was run",
    "-": "-: not measured",
}


@dataclass(frozen=True)
class Table:
    """name: the stem of its files. title, caption: as shown; a caption has at most two sentences,
    and `notes`, shown on demand, explain the columns that only this table has.

    frame: keys and values at full precision, for the CSV. cells: what is shown (`Cell`), one column
    per heading; the first `keys` columns name the row and are left-aligned. A name in `**` marks a
    summary of the rows above it. brief: the cells that a terminal shows, if they are too many; the
    columns after the keys come in the order of importance.
    command: an example of a run that gives its data.
    """

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    cells: pd.DataFrame
    keys: int = 1
    brief: pd.DataFrame | None = None
    notes: str = ""
    command: str = ""

    def to_markdown(self, heading: str = "#") -> str:
        """Title, table, caption and notes. heading: the Markdown prefix of the title."""
        rows = markdown_lines(list(self.cells.columns), self.cells.to_numpy().tolist(), self.keys)
        texts = filter(None, (self.caption, self.notes))
        lines = rows if len(self.cells) else ["No run for this table."]
        return "\n".join([f"{heading} {self.title}", "", *lines, "", "\n\n".join(texts), ""])

    def to_page(self) -> str:
        """`to_markdown` as a file of its own, with the `legend` of its signs."""
        return "\n".join([self.to_markdown(), legend([self]), ""])

    def to_csv(self) -> str:
        """All keys and values; an empty field was not measured."""
        return self.frame.to_csv(index=False, lineterminator="\n")

    def to_rich(self, width: int) -> RichTable:
        """The table for a terminal: rows below the name of their group, headings in two lines,
        summaries in bold.

        width: in characters; the last columns that do not fit are left out, and a line says so.
        """
        table_cells = self.cells if self.brief is None else self.brief
        rows = list(self._terminal_rows(table_cells))
        first, *others = table_cells.columns[self.keys - 1 :]
        headings = [first.replace("**", ""), *(heading.replace(" ", "\n", 1) for heading in others)]
        widths = [
            2 + max(map(len, (*heading.split("\n"), *(texts[place] for texts, _ in rows))))
            for place, heading in enumerate(headings)
        ]
        # names are cut rather than the first two values
        widths[0] = min(widths[0], max(18, width - 1 - sum(widths[1 : 1 + _LEAST])))
        shows = max(2, sum(end <= width - 1 for end in accumulate(widths)))
        notes = [text for text in (self.caption, self.notes, legend([self])) if text]
        if self.brief is not None and len(self.brief) < len(self.cells):
            notes.insert(0, f"{len(self.brief)} of {len(self.cells)} rows; the files have all.")
        if left_out := others[shows - 1 :]:
            notes.insert(
                0, f"Not shown for want of room, a wider terminal has: {'; '.join(left_out)}."
            )
        table = RichTable(
            title=escape(self.title),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.caption, table.caption_justify = escape("\n".join(notes)), "left"
        for number, heading in enumerate(headings[:shows]):
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        room = widths[0] - 2
        for (name, *texts), is_bold in rows:
            cut = name if len(name) <= room else f"{name[: room - 1]}…"
            table.add_row(
                *map(escape, [cut, *texts[: shows - 1]]), style="bold" if is_bold else None
            )
        return table

    def _terminal_rows(self, table_cells: pd.DataFrame) -> Iterator[tuple[list[str], bool]]:
        """(texts, whether they are bold) of each line: a group's name, without values, stands
        above its rows.
        """
        group = None
        for row in table_cells.to_numpy().tolist():
            *above, name = row[: self.keys]
            if above and above != group:
                group = above
                yield [", ".join(above).replace("**", ""), *[""] * (len(row) - self.keys)], True
            is_sum = name.startswith("**")
            yield [("  " if above else "") + name.replace("**", ""), *row[self.keys :]], is_sum

    def to_latex(self) -> str:
        """A `longtable` (it may span pages) with booktabs rules, then caption and notes.

        A name of a group stands in its first row only. Neighbouring headings such as `XGen: score`
            share a line above.
        """
        latex_cells = self.cells.map(latex)
        latex_cells.columns = [latex(heading) for heading in self.cells]
        groups: Any = latex_cells.iloc[:, : self.keys - 1]
        repeats = (groups == groups.shift()).all(axis=1)
        for heading in groups:
            latex_cells[heading] = latex_cells[heading].mask(repeats, "")
        if any(": " in heading for heading in latex_cells):
            latex_cells.columns = pd.MultiIndex.from_tuples(
                [heading.rpartition(": ")[::2] for heading in latex_cells]
            )
        alignment = "l" * self.keys + "r" * (latex_cells.shape[1] - self.keys)
        body = latex_cells.to_latex(
            index=False, longtable=True, escape=False, column_format=alignment,
            multicolumn_format="c", caption=latex(self.title), label=f"tab:{self.name}",
        )  # fmt: skip
        text = " ".join(text for text in (self.caption, self.notes, legend([self])) if text)
        return f"% \\usepackage{{booktabs, longtable}}\n{body}\n{{\\footnotesize {latex(text)}}}\n"


def legend(tables: Iterable[Table]) -> str:
    """What the signs in these tables stand for, in sentences; "" without any."""
    texts = {
        str(text)
        for table in tables
        for text in [*table.cells.columns, *table.cells.to_numpy().ravel()]
    }
    found = [
        meaning
        for sign, meaning in _SIGNS.items()
        if (sign in texts if sign in ("-", "?") else any(sign in text for text in texts))
    ]
    return " ".join(f"{meaning}." for meaning in found)


@dataclass(frozen=True)
class Figure:
    """title, caption: as shown, the caption with at most two sentences; `notes`, shown on demand,
    name averages and omissions.

    data: makes the table behind the picture, which is also its CSV; empty if no run has the
        necessary data.
    plot: draws matplotlib's picture from this table alone, so also from the CSV; never called with
        an empty table.
    command: an example of a run that gives its data.
    """

    title: str
    caption: str
    data: Callable[[Results], pd.DataFrame]
    plot: Callable[[pd.DataFrame], Any]
    notes: str = ""
    command: str = ""


class Cell(str):
    """The text of a cell. value: the number that its column is sorted by; None for text."""

    value: float | None

    def __new__(cls, text: str, value: float | None = None) -> Self:
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


def console() -> Console:
    """A console for tables, as wide as the terminal or COLUMNS says; a file or a pipe without it
    gets a fixed width.
    """
    usual = Console()
    return usual if usual.is_terminal or "COLUMNS" in os.environ else Console(width=120)


def forms(*names: str) -> list[str]:
    """The names of the frame's columns with the values and both ends of their intervals."""
    return [f"{name}{end}" for name in names for end in ("", "_low", "_high")]


@dataclass(frozen=True)
class Column:
    """A column of a table as people read it.

    name: the column of the values; `<name>_low` and `<name>_high`, if there are such columns, hold
        the interval.
    digits: after the decimal point; None for text and whole numbers. missing: shown if the value
        was not measured.
    scale: divisor, such as 1e6 for bytes shown in MB. sign: "+" to sign positive values too.
    sorted_by: the column of the numbers behind texts. widest: half of the widest interval with
    which a value is shown, else `?`: a number that is hardly known misleads. optional: whether a
    table leaves it out if no row has a value.
    """

    name: str
    heading: str
    digits: int | None = None
    missing: str = "-"
    scale: float = 1
    interval: bool = True
    sign: str = ""
    sorted_by: str | None = None
    widest: float | None = None
    optional: bool = False

    def cell(self, row: Mapping[Any, Any]) -> Cell:
        """The cell of a row of values: `25.30 ±1.20`, with half of the interval, if there is
        one.
        """
        value, number = row[self.name], row[self.sorted_by or self.name]
        ends: Any = [row.get(f"{self.name}_{end}") for end in ("low", "high")]
        if pd.isna(value):
            text = self.missing
        elif self.digits is None:
            text = str(value)
        elif self.widest is not None and not ends[1] - ends[0] <= 2 * self.widest:
            text = "?"
        else:
            text = f"{value / self.scale:{self.sign}.{self.digits}f}"
            if self.interval and pd.notna(ends).all():
                low, high = ends
                text += f" ±{(high / self.scale - low / self.scale) / 2:.{self.digits}f}"
        return Cell(text, None if isinstance(number, str) or pd.isna(number) else float(number))


@dataclass(frozen=True)
class Rows:
    """What a table holds (fields as of `Table`). values: of what stands in braces in its texts."""

    frame: pd.DataFrame
    cells: pd.DataFrame
    keys: int = 1
    values: Mapping[str, Any] = field(default_factory=dict)


_TABLES = dict[
    str, tuple[int, Callable[..., Table]]
]()  # each with its place among all tables and figures
_FIGURES = dict[str, tuple[int, Figure]]()


def as_table(place: int, title: str, caption: str, command: str, notes: str = "") -> Any:
    """Makes a function that returns `Rows` a table of its own name, with these texts (fields as
    of `Table`).
    """

    def named(make: Callable[..., Rows]) -> Callable[..., Table]:
        name = make.__name__

        @wraps(make)
        def made(*results: Results, **settings: Any) -> Table:
            rows = make(*results, **settings)
            full_title, full_caption, full_notes = (
                text.format(**rows.values) for text in (title, caption, notes)
            )
            return Table(
                name,
                full_title,
                full_caption,
                rows.frame,
                rows.cells,
                rows.keys,
                notes=full_notes,
                command=command,
            )

        _TABLES[name] = place, made
        return made

    return named


def as_figure(
    place: int,
    name: str,
    data: Callable[[Results], Any],
    title: str,
    caption: str,
    command: str,
    notes: str = "",
) -> Any:
    """Makes a function that plots a frame a figure of this name (fields as of `Figure`)."""

    def named(plot: Callable[[pd.DataFrame], Any]) -> Callable[[pd.DataFrame], Any]:
        _FIGURES[name] = place, Figure(title, caption, data, plot, notes, command)
        return plot

    return named


@cache
def _load() -> None:
    """Import every module of this package, as each names its own tables and figures."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"eval.analysis.{module.name}")


def tables() -> dict[str, Callable[..., Table]]:
    """All tables by name, in order, made of stored results only."""
    _load()
    return {name: make for name, (_, make) in sorted(_TABLES.items(), key=lambda item: item[1][0])}


def figures() -> dict[str, Figure]:
    """All figures by name, in order, made of stored results only."""
    _load()
    return {
        name: figure for name, (_, figure) in sorted(_FIGURES.items(), key=lambda item: item[1][0])
    }


MODEL, LABEL, EXAMPLES = (
    Column("model", "model"),
    Column("label", "method"),
    Column("examples", "n"),
)
KEPT = Column("relative_score", "% of baseline", 1, widest=KEPT_WITHIN)
KL = Column("kl", "KL, nats", 5)
# With `fidelity=answer`; rankings and pictures take the first that was measured, then the first
# token's KL
FIDELITY = (
    Column("answer_kl", "answer's KL", 5, optional=True),
    Column("gold_kl", "gold KL", 5, optional=True),
    Column("gold_log_likelihood", "gold log-likelihood", 3, sign="+", optional=True),
)
UNFORCED = "The KL is of the first token alone: fidelity=answer measures whole answers"


def has_values(values: Any, name: str) -> bool:
    """Whether any row of a frame has a value in this column."""
    return name in values and bool(values[name].notna().any())


def measured(columns: Iterable[Column], values: pd.DataFrame) -> list[Column]:
    """The columns without optional ones that no row has."""
    return [column for column in columns if not column.optional or has_values(values, column.name)]


def cells(
    values: pd.DataFrame, columns: Sequence[Column], results: Results | None = None
) -> pd.DataFrame:
    """The `Cell`s of each row of values, by heading. results: to show a model with its notes
    (`model_name`).
    """
    rows = values.to_dict("records")
    if results is not None:
        rows = [row | {"model": model_name(row, results)} for row in rows]
    headings = [column.heading for column in columns]
    return pd.DataFrame(
        [[column.cell(row) for column in columns] for row in rows], columns=headings, dtype=object
    )


def model_name(row: Mapping[Any, Any], results: Results) -> str:
    """The model's name, with its suite unless that is LongBench, and with a note if its weights
    were random.
    """
    notes = [row["suite"]] if SUITES[row["suite"]].published is None else []
    notes += ["random weights"] if row["model"] in random_models(results) else []
    return f"{row['model']} ({', '.join(notes)})" if notes else row["model"]


def random_models(results: Results) -> set[str]:
    """Models with random weights: their times are meaningful, their scores are not."""
    return {run.model for run in results.runs if run.identity.get("load_format") == "dummy"}


def markdown_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], keys: int) -> list[str]:
    """A pipe table. The first `keys` columns are left-aligned, the others right-aligned."""
    rule = "|" + "---|" * keys + "---:|" * (len(headings) - keys)
    lines = ["| " + " | ".join(map(_in_pipes, row)) + " |" for row in (headings, *rows)]
    return [lines[0], rule, *lines[1:]]


def _in_pipes(text: str) -> str:
    """The text without what would end its cell, or begin an HTML tag."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text.replace("|", "\\|").replace("\n", " "))


def latex(text: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return "".join(_LATEX.get(letter, letter) for letter in text)
