"""Every table and figure from stored runs, without a model: lazyllm-bench paper RUNS [RUNS ...] [--out FOLDER]

OUT/index.html    all tables and figures, and the answers of every arm beside each other, on one page
OUT/README.md     all tables and figures with captions, and a list of those without runs, which are not written
                  (index.md, if OUT has a README.md that this command did not write)
OUT/tables/       each table as .md, .csv (full precision) and .tex
OUT/figures/      each figure as .svg, .pdf and .png, and its data as .csv
OUT/provenance.json   the runs used: fingerprint, commit, versions, machine, hashes of the visits
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.store.folder import files_of
from eval.store.results import Results, add_choice
from eval.store.runs import counted
from lazyllm.errors import parser_of, require
from lazyllm.files import write_whole

if TYPE_CHECKING:
    from eval.analysis.table import Figure, Table

log = logging.getLogger(__name__)

TITLE = "# Tables and figures"
FORMATS = ("md", "csv", "tex", "svg", "pdf", "png", "html")


def write_paper(
    results: Results,
    out: Path,
    tables: Mapping[str, Callable[[Results], Table]],
    figures: Mapping[str, Figure],
    formats: Sequence[str] = FORMATS,
    most: int | None = None,
) -> list[Path]:
    """Write everything into `out`, created if missing. Returns the paths, the index first.

    tables, figures: as in `eval.analysis.table`. formats: suffixes of the files; pictures in README.md are PNG.
    most: of `render`. Raises UserError if a file cannot be written.
    """
    from eval.analysis.style import save  # not at the top: importing matplotlib is slow and writes caches
    from eval.analysis.table import legend
    from eval.report.content import content_of

    content, notes = content_of(results, tables, figures), results.unfinished
    for stem in [*(out / "tables" / name for name in tables), *(out / "figures" / name for name in figures)]:
        _remove(stem)
    paths, sections = [], []
    for made in content.tables:
        table = replace(made, caption="\n".join([*notes, made.caption]))
        forms = {"md": table.to_page, "csv": table.to_csv, "tex": table.to_latex}
        files = {suffix: out / "tables" / f"{table.name}.{suffix}" for suffix in forms if suffix in formats}
        for suffix, file in files.items():
            write_whole(file, forms[suffix]())
        sections.append(f"{table.to_markdown('##')}\n{_source(files, table.command)}\n")
        paths += files.values()
    for picture in content.pictures:
        stem, figure = out / "figures" / picture.name, picture.figure
        pictures = [suffix for suffix in formats if suffix in ("svg", "pdf", "png")]
        saved = save(picture.drawn, stem, pictures) if pictures else []
        files = {file.suffix[1:]: file for file in saved}
        if "csv" in formats:
            files["csv"] = stem.with_name(f"{picture.name}.csv")
            write_whole(files["csv"], picture.data.to_csv(index=False, lineterminator="\n"))
        texts = [text for text in (figure.caption, figure.notes) if text]
        if "png" in formats:
            texts.insert(0, f"![{figure.title}](figures/{picture.name}.png)")
        sections.append("\n\n".join([f"## {figure.title}", *texts, _source(files, figure.command)]) + "\n")
        paths += files.values()
    if "html" in formats:
        from eval.report.page import render

        page = render(results, content, most)
        write_whole(out / "index.html", page)
        if (size := len(page.encode()) / 1e6) > 30:
            log.warning("index.html has %.0f MB, so a browser loads it slowly: --examples N shows fewer answers", size)
        paths.append(out / "index.html")
    write_whole(out / "provenance.json", json.dumps(provenance(results), indent=2, sort_keys=True) + "\n")
    runs, answers = len(results.runs), len(results.counting)
    index = (
        f"{TITLE}\n\nMade by `lazyllm-bench paper` from {counted(runs, 'stored run')} with "
        f"{counted(answers, 'answer')}, without a model. [provenance.json](provenance.json) lists the runs, their "
        "code and their machines.\n\n"
    )
    if notes:
        index += "\n".join([*(f"**{note}**" for note in notes), "", ""])
    if "html" in formats:
        index += "[index.html](index.html) has all of it on one page, with the answers of every arm.\n\n"
    if content.missing:
        missing = [f"- {title}: `{command}`" for title, command in content.missing]
        index += "\n".join(["No run yet for:", "", *missing, "", ""])
    index += f"In all tables, {signs}\n\n" if (signs := legend(content.tables)) else ""
    written = _index(out)
    write_whole(written, index + "\n".join(sections))
    return [written, out / "provenance.json", *paths]


def _index(out: Path) -> Path:
    """README.md; index.md beside one that somebody else wrote."""
    file = out / "README.md"
    is_free = not file.exists() or file.read_text(encoding="utf-8").startswith(TITLE)
    return file if is_free else out / "index.md"


def _source(files: Mapping[str, Path], command: str) -> str:
    """Markdown links to these files of a folder below README.md, and the command. files: by suffix."""
    links = " ".join(f"[{suffix}]({file.parent.name}/{file.name})" for suffix, file in files.items())
    return f"{links}; `{command}`" if links else f"`{command}`"


def _remove(stem: Path) -> None:
    """Remove what an earlier call wrote of a table or figure: it may have no run now."""
    for suffix in FORMATS:
        stem.with_name(f"{stem.name}.{suffix}").unlink(missing_ok=True)


def provenance(results: Results) -> list[dict[str, Any]]:
    """For each run, in the order of folders: its arms, where it ran, and the hashes of its visits."""
    return [
        {
            "folder": run.folder.name,
            "fingerprint": run.about["fingerprint"],
            "model": run.model,
            "arms": run.identity["arms"],
            "examples": len(run.answered),
            "failed": len(run.failed),
            "visits_sha256": {
                file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(run.folder, "visits")
            },
            "provenance": run.about.get("provenance"),
        }
        for run in results.runs
    ]


def main(arguments: Sequence[str]) -> int:
    """The command `paper`. Returns the exit code. Raises UserError."""
    parser = parser_of("paper", __doc__)
    add_choice(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to write (default: paper beside the runs)")
    parser.add_argument(
        "--within", type=float, default=1.0, metavar="X",
        help="for the effective keep rate: accept a score up to X %% below the baseline's (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--examples", type=int, metavar="N", help="index.html: only the first N of a run and dataset")
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="SUFFIX",
        help="the files to write: %(choices)s (default: all)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    require(options.examples is None or options.examples > 0, "--examples", options.examples, "1 or more")
    require(0 <= options.within < 100, "--within", options.within, "0 or more, and less than 100")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    results = Results.read(options.runs, options.where, options.newest)
    from eval.analysis.ranking import effective_keep  # not at the top: importing matplotlib is slow
    from eval.analysis.table import figures, tables

    made = tables() | {"effective_keep": partial(effective_keep, within=options.within)}
    out = options.out or options.runs[0] / "paper"
    paths = write_paper(results, out, made, figures(), options.formats, options.examples)
    print(f"{counted(len(paths), 'file')} from {counted(len(results.runs), 'run')}: {paths[0]}")
    return 0
