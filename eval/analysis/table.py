"""A table, and its forms: Markdown, terminal, CSV at full precision, LaTeX. A figure: data and a plot of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pandas as pd

from eval.benchmarks import SUITES

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure
    from rich.table import Table as RichTable

    from eval.store.results import Results

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "Δ": r"$\Delta$", "<": r"\textless{}",
    ">": r"\textgreater{}", "[": "{[}", "|": r"\textbar{}", "\n": " ",
}  # fmt: skip
COMPUTED = "tokens run by any model to score the prompt are included"  # for captions of "% tokens computed"
MB = 1e6
_EMPTY = "No run for this table."


@dataclass(frozen=True)
class Table:
    """name: the stem of its files. title, caption: for people.

    frame: keys and values at full precision, for the CSV. cells: the text shown, one column per heading; the first
    `keys` columns name the row and are left-aligned. A name in `**` marks a summary of the rows above it. brief: the
    cells that a terminal shows, if they are too many; the columns after the keys come in the order of importance.
    """

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    cells: pd.DataFrame
    keys: int = 1
    brief: pd.DataFrame | None = None

    def to_markdown(self, heading: str = "#") -> str:
        """Title, table and caption. heading: the Markdown prefix of the title."""
        body = markdown_lines(list(self.cells.columns), self.cells.to_numpy().tolist(), self.keys)
        return "\n".join(
            [f"{heading} {self.title}", "", *(body if len(self.cells) else [_EMPTY]), "", self.caption, ""]
        )

    def to_csv(self) -> str:
        """All keys and values; an empty field was not measured."""
        return self.frame.to_csv(index=False, lineterminator="\n")

    def to_rich(self, width: int | None = None) -> RichTable:
        """The table for a terminal, with headings in two lines and summaries in bold.

        width: in characters; the last columns that do not fit are left out, and a line says so.
        """
        from rich import box
        from rich.markup import escape
        from rich.table import Table as RichTable

        shown = self.cells if self.brief is None else self.brief
        headings = {name: self._terminal_heading(name, number < self.keys) for number, name in enumerate(shown)}
        room, fits = (float("inf") if width is None else width), list[str]()
        for name, heading in headings.items():
            texts = [*heading.split("\n"), *shown[name].str.replace("**", "")]
            room -= 1 + max(map(len, texts))
            if room < 0 and len(fits) > self.keys:
                break
            fits.append(name)
        notes = [self.caption]
        if left_out := [name for name in shown if name not in fits]:
            notes.insert(0, f"Not shown for want of room, but in the files: {', '.join(left_out)}.")
        if self.brief is not None:
            notes.insert(0, f"{len(self.brief)} of {len(self.cells)} rows; the files have all.")
        table = RichTable(title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.caption, table.caption_justify = escape("\n".join(notes)), "left"
        for number, name in enumerate(fits):
            table.add_column(headings[name], justify="left" if number < self.keys else "right", no_wrap=True)
        rows, ends = shown[fits].to_numpy().tolist(), self._ends(shown)
        for row, is_last in zip(rows, ends, strict=True):
            is_sum = any(text.startswith("**") for text in row[: self.keys])
            texts = [escape(text.replace("**", "")) for text in row]
            table.add_row(*texts, style="bold" if is_sum else None, end_section=is_last)
        return table

    @staticmethod
    def _terminal_heading(name: str, is_key: bool) -> str:
        first, _, rest = name.partition(" ")
        return name.replace("**", "") if is_key or not rest else f"{first}\n{rest}"

    def to_latex(self) -> str:
        """A `longtable` (it may span pages) with booktabs rules, and thin rules between groups of rows.

        A name of a group stands in its first row only. Neighbouring headings such as `XGen: score` share a line above.
        """
        headings, rows = list(self.cells.columns), self.cells.to_numpy().tolist()
        lines, begins = [], True
        for row, ends in zip(rows, self._ends(self.cells), strict=True):
            groups = row[: self.keys - 1]
            lines += [_latex_line(row if begins else [*([""] * len(groups)), *row[len(groups) :]])]
            lines += [r"\midrule"] if ends else []
            begins = ends
        if not rows:
            headings, lines = [""], [_latex_line([_EMPTY])]
        head = [r"\toprule", *_latex_head(headings), r"\midrule"]  # on every page
        columns = "l" * self.keys + "r" * (len(headings) - self.keys)
        return "\n".join(
            [
                r"% \usepackage{booktabs, longtable}",
                rf"\begin{{longtable}}{{{columns}}}",
                rf"\caption{{{latex(self.title)}. {latex(self.caption)}}}\label{{tab:{self.name}}} \\",
                *head,
                r"\endfirsthead",
                *head,
                r"\endhead",
                *lines,
                r"\bottomrule",
                r"\end{longtable}",
                "",
            ]
        )

    def _ends(self, shown: pd.DataFrame) -> list[bool]:
        """For each row, whether the next one differs in a key before the last one."""
        groups = shown.iloc[:, : self.keys - 1].to_numpy().tolist()
        return [group != following for group, following in zip(groups, [*groups[1:], *groups[-1:]], strict=True)]


@dataclass(frozen=True)
class Figure:
    """name: the stem of its files. title, caption: for people; the caption names averages and omissions.

    data: makes the table behind the picture, which is also its CSV; empty if no run has the necessary data.
    plot: draws the picture from this table alone, so also from the CSV; never called with an empty table.
    opens_report: the report opens with the first of these figures that has data.
    """

    name: str
    title: str
    caption: str
    data: Callable[[Results], pd.DataFrame]
    plot: Callable[[pd.DataFrame], MplFigure]
    opens_report: bool = False


def forms(*names: str) -> list[str]:
    """The columns of values and their intervals."""
    return [f"{name}{end}" for name in names for end in ("", "_low", "_high")]


@dataclass(frozen=True)
class Column:
    """A column of a table as people read it.

    name: the column of the values; `<name>_low` and `<name>_high`, if there are such columns, hold the interval.
    digits: after the decimal point; None for text and whole numbers. missing: shown if the value was not measured.
    scale: divisor, such as 1e6 for bytes shown in MB. sign: "+" to sign positive values too.
    """

    name: str
    heading: str
    digits: int | None = None
    missing: str = "-"
    scale: float = 1
    interval: bool = True
    sign: str = ""

    def text(self, row: Mapping[Any, Any]) -> str:
        """The cell of a row of values: `25.30 ±1.20`, with half of the interval, if there is one."""
        value = row[self.name]
        if pd.isna(value):
            return self.missing
        if self.digits is None:
            return str(value)
        text = f"{value / self.scale:{self.sign}.{self.digits}f}"
        ends: Any = [row.get(f"{self.name}_{end}") for end in ("low", "high")]
        if not self.interval or pd.isna(ends).any():
            return text
        low, high = ends
        return f"{text} ±{(high / self.scale - low / self.scale) / 2:.{self.digits}f}"


MODEL, LABEL, EXAMPLES = Column("model", "model"), Column("label", "method"), Column("examples", "n")


def cells(values: pd.DataFrame, columns: Sequence[Column], results: Results | None = None) -> pd.DataFrame:
    """The text of each row of values, by heading. results: to show a model with its notes (`model_name`)."""
    rows = values.to_dict("records")
    if results is not None:
        rows = [row | {"model": model_name(row, results)} for row in rows]
    headings = [column.heading for column in columns]
    return pd.DataFrame([[column.text(row) for column in columns] for row in rows], columns=headings, dtype=object)


def model_name(row: Mapping[Any, Any], results: Results) -> str:
    """The model's name, with its suite unless that is LongBench, and with a note if its weights were random."""
    notes = [row["suite"]] if not SUITES[row["suite"]].in_paper else []
    notes += ["random weights"] if row["model"] in random_models(results) else []
    return f"{row['model']} ({', '.join(notes)})" if notes else row["model"]


def random_models(results: Results) -> set[str]:
    """Models with random weights: their times are meaningful, their scores are not."""
    return {run.model for run in results.runs if run.identity.get("load_format") == "dummy"}


def markdown_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], keys: int) -> list[str]:
    """A pipe table. The first `keys` columns are left-aligned, the others right-aligned."""
    rule = "|" + "---|" * keys + "---:|" * (len(headings) - keys)
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in (headings, *rows)]
    return [lines[0], rule, *lines[1:]]


def latex(text: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _latex_head(headings: Sequence[str]) -> list[str]:
    """One line, or two if headings have a part before a colon."""
    shared = [heading.rpartition(": ")[0] for heading in headings]
    if not any(shared):
        return [_latex_line(headings)]
    above = [rf"\multicolumn{{{len(list(group))}}}{{c}}{{{latex(name)}}}" for name, group in groupby(shared)]
    return [" & ".join(above) + r" \\", _latex_line([heading.rpartition(": ")[2] for heading in headings])]


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(latex(text) for text in cells) + r" \\"
