r"""Insert into README.md, docs/*.md and results/*/README.md what other files hold: python -m
scripts.dev.docs

A page names its source in a pair of comments, and what stands between them is replaced:

    <!-- insert: results/demo/demo.md -->               the table of a Markdown file
    <!-- insert: results/demo/demo.md mean over -->     its rows that begin with this expression
    <!-- insert: results/demo/demo.md needle columns 2-4,9 -->  these columns of them, from 1
    <!-- end -->
"""

import re
from pathlib import Path

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


def main() -> None:
    for page in filled():
        text = page.read_text(encoding="utf-8")
        if (new := inserted(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
