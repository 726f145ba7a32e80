r"""Insert into README.md, docs/*.md and results/*/README.md what other files hold: python -m
scripts.dev.docs

A page names its source in a pair of comments, and what stands between them is replaced:

    <!-- insert: results/demo/demo.md -->               the table of a Markdown file
    <!-- insert: results/demo/demo.md mean over -->     its rows that begin with this expression
    <!-- insert: results/demo/demo.md needle columns 2-4,9 -->  these columns of them, from 1
    <!-- insert: settings model -->                     the settings `model.*` of `--help`
    <!-- insert: methods -->                            the hyperparameters of the methods
    <!-- end -->
"""

import re
from itertools import pairwise
from pathlib import Path

from eval.config import RunConfig, documented
from lazyllm.methods import METHODS
from lazyllm.methods.__main__ import lines

ROOT = Path(__file__).parents[2]
_PART = re.compile(r"(<!-- insert: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled() -> list[Path]:
    """The pages that may have insertions: those, and the README.md of each folder of results/."""
    return [*pages(), *sorted(ROOT.glob("results/*/README.md"))]


def inserted(text: str) -> str:
    """A page with its insertions made anew. Raises FileNotFoundError or ValueError for a source
    that gives nothing.
    """
    return _PART.sub(lambda part: f"{part[1]}\n{_source(part[2])}\n\n{part[3]}", text)


def _source(name: str) -> str:
    if name == "methods":
        return _methods()
    if name.startswith("settings "):
        return _settings(name.split()[1:])
    name, _, columns = name.partition(" columns ")
    file, _, row = name.partition(" ")
    lines = [
        line
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    head, rows = lines[:2], [line for line in lines[2:] if re.match(row, line.strip("|* "))]
    if not rows:
        raise ValueError(f"{file}: no row of a table matches {row!r}")
    if not columns:
        return "\n".join([*head, *rows])
    ranges = [[int(end) for end in part.split("-")] for part in columns.split(",")]
    places = [place - 1 for ends in ranges for place in range(ends[0], ends[-1] + 1)]
    cells = [line.strip("|").split("|") for line in [*head, *rows]]
    return "\n".join(f"|{'|'.join(row[place] for place in places)}|" for row in cells)


def _settings(groups: list[str]) -> str:
    """The settings of these groups; `-` is those without a group."""
    rows = [
        row
        for row in documented(RunConfig)
        if (row[0].partition(".")[0] if "." in row[0] else "-") in groups
    ]
    if not rows:
        raise ValueError(f"settings {' '.join(groups)}: no such setting")
    lines = [
        f"| `{key}` | {meaning} | {f'`{default}`' if default else ''} |"
        for key, default, meaning in rows
    ]
    return "\n".join(["| key | meaning | default |", "|---|---|---|", *lines])


def _methods() -> str:
    """The hyperparameters of this repository's methods; installed packages' are left out."""
    rows = [
        f"| `{name}` | `{settings.strip()}` |"
        for summary, settings in pairwise(lines())
        if (name := summary.partition(":")[0]) in METHODS
    ]
    return "\n".join(["| `method=` | `method.*`, with defaults |", "|---|---|", *rows])


def main() -> None:
    for page in filled():
        text = page.read_text(encoding="utf-8")
        if (new := inserted(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
