"""A table as a value, and its three forms: Markdown for a reader, CSV at full precision, LaTeX for a paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "Δ": r"$\Delta$", "<": r"\textless{}",
    ">": r"\textgreater{}", "[": "{[}", "|": r"\textbar{}", "\n": " ",
}  # fmt: skip
_EMPTY = "No run for this table."


@dataclass(frozen=True)
class Table:
    """name: the stem of its files. title, caption: one line, and what a reader needs to know.

    frame: keys and values at full precision, which the CSV holds. cells: the text shown, one column a heading; the
    first `keys` of them name the row and are aligned to the left.
    """

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    cells: pd.DataFrame
    keys: int = 1

    def to_markdown(self, heading: str = "#") -> str:
        """Title, table, caption. heading: how deep the title is."""
        body = markdown_lines(list(self.cells.columns), self.cells.to_numpy().tolist(), self.keys)
        return "\n".join(
            [f"{heading} {self.title}", "", *(body if len(self.cells) else [_EMPTY]), "", self.caption, ""]
        )

    def to_csv(self) -> str:
        """Every key and value; an empty field is a value that was not measured."""
        return self.frame.to_csv(index=False, lineterminator="\n")

    def to_latex(self) -> str:
        """A `longtable` with the rules of booktabs, thin ones between groups of rows; it may be longer than a page."""
        headings, rows = list(self.cells.columns), self.cells.to_numpy().tolist()
        groups = [row[: self.keys - 1] for row in rows]  # of the same keys but the last
        lines = []
        for number, row in enumerate(rows):
            if number and groups[number] != groups[number - 1]:
                lines.append(r"\midrule")
            lines.append(_latex_line(row))
        if not rows:
            headings, lines = [""], [_latex_line([_EMPTY])]
        head = [r"\toprule", _latex_line(headings), r"\midrule"]  # on every page
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


def cell(mean: float, low: float | None, high: float | None, digits: int) -> str:
    """`25.30 ±1.20`: a value and half of its interval, where it has one."""
    text = f"{mean:.{digits}f}"
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return text
    return f"{text} ±{(high - low) / 2:.{digits}f}"


def markdown_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], keys: int) -> list[str]:
    """A pipe table; the first `keys` columns to the left, numbers to the right."""
    rule = "|" + "---|" * keys + "---:|" * (len(headings) - keys)
    lines = ["| " + " | ".join(one.replace("|", "\\|") for one in row) + " |" for row in (headings, *rows)]
    return [lines[0], rule, *lines[1:]]


def latex(text: str) -> str:
    """The text with what LaTeX takes for its own escaped."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(latex(one) for one in cells) + r" \\"
