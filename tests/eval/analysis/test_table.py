import io

import pandas as pd
from rich.console import Console

from eval.analysis.table import Column, Table, cells, latex, markdown_lines

TABLE = Table(
    "two",
    "Two & more",
    "50 % of a_b.",
    pd.DataFrame(
        {"model": ["a", "a", "b"], "task": ["x", "y", "x"], "score": [1 / 3, float("nan"), 2.0]}
    ),
    pd.DataFrame(
        {
            "model": ["a", "a", "b"],
            "task": ["x", "y|z", "x"],
            "score": ["0.33 ±0.10", "no run", "2.00"],
        }
    ),
    keys=2,
)
EMPTY = Table("none", "None", "Nothing.", pd.DataFrame({"model": []}), pd.DataFrame())


def test_markdown() -> None:
    assert TABLE.to_markdown("##") == (
        "## Two & more\n"
        "\n"
        "| model | task | score |\n"
        "|---|---|---:|\n"
        "| a | x | 0.33 ±0.10 |\n"
        "| a | y\\|z | no run |\n"
        "| b | x | 2.00 |\n"
        "\n"
        "50 % of a_b.\n"
    )
    assert EMPTY.to_markdown() == "# None\n\nNo run for this table.\n\nNothing.\n"
    assert markdown_lines(["a"], [["x|<b>\ny <= 1"]], 1)[2] == r"| x\|&lt;b> y <= 1 |"


def test_csv_keeps_every_digit() -> None:
    assert TABLE.to_csv() == "model,task,score\na,x,0.3333333333333333\na,y,\nb,x,2.0\n"
    assert pd.read_csv(io.StringIO(TABLE.to_csv()))["score"].iloc[0] == 1 / 3
    assert EMPTY.to_csv() == "model\n"


def test_latex() -> None:
    """The head stands on every page, a name of a group in its first row; caption and signs
    follow."""
    lines = TABLE.to_latex().splitlines()
    assert lines[:2] == [r"% \usepackage{booktabs, longtable}", r"\begin{longtable}{llr}"]
    assert lines[2] == r"\caption{Two \& more} \label{tab:two} \\"
    assert lines.count(r"model & task & score \\") == 2
    rows = lines[lines.index(r"\endlastfoot") + 1 : lines.index(r"\end{longtable}")]
    assert rows == [
        r"a & x & 0.33 $\pm$0.10 \\",
        r" & y\textbar{}z & no run \\",
        r"b & x & 2.00 \\",
    ]
    assert lines[-1] == (
        r"{\footnotesize 50 \% of a\_b. $\pm$: half of the 95 \% bootstrap interval over examples.}"
    )


def test_latex_takes_nothing_for_its_own() -> None:
    assert (
        latex("a_b & 5 % of $3 #1, {2: 0.3}, Δ ±1")
        == r"a\_b \& 5 \% of \$3 \#1, \{2: 0.3\}, $\Delta$ $\pm$1"
    )
    assert latex("a\\b~c^d") == r"a\textbackslash{}b\textasciitilde{}c\textasciicircum{}d"
    # at the beginning of a line, LaTeX would read it as a length
    assert latex("[1, 2]") == "{[}1, 2]"


def test_columns_show_values_with_their_intervals() -> None:
    nan = float("nan")
    values = pd.DataFrame(
        {
            "n": [3, 4],
            "x": [2e6, nan],
            "x_low": [1e6, nan],
            "x_high": [4e6, nan],
            "y": [-1.0, 2.346],
        }
    )
    values[["y_low", "y_high"]] = nan
    columns = [
        Column("n", "count"),
        Column("x", "x, MB", 1, missing="unpaired", scale=1e6),
        Column("x", "alone", 0, interval=False),
        Column("y", "y", 2, sign="+"),
    ]
    table = cells(values, columns)
    assert list(table) == ["count", "x, MB", "alone", "y"]
    assert table.to_numpy().tolist() == [
        ["3", "2.0 ±1.5", "2000000", "-1.00"],
        ["4", "unpaired", "-", "+2.35"],
    ]
    assert list(cells(values[:0], columns)) == list(table)


def test_terminal_shows_brackets_as_they_are() -> None:
    names = pd.DataFrame({"method": ["mine [int8]", "lazy [/x]"], "score": ["1", "2"]})
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(Table("n", "a [title]", "a [/caption]", names, names).to_rich(80))
    output = console.export_text()
    assert all(text in output for text in ("mine [int8]", "lazy [/x]", "a [title]", "a [/caption]"))
