"""Every table and figure from stored runs, without a model: lazyllm-bench paper RUNS [RUNS ...]
[--out FOLDER]

OUT/index.html    all tables and figures, and the answers of every arm next to each other
OUT/README.md     all tables and figures with captions, and a list of those without runs, which are
                  not written (index.md, if OUT has a README.md that this command did not write)
OUT/tables/       each table as .md, .csv (full precision) and .tex
OUT/figures/      each figure as .svg, .pdf and .png, and its data as .csv
OUT/provenance.json   the runs used: fingerprint, commit, versions, machine, hashes of the visits

Runs that differ in more than arms, data and seed share no table: each group of them has a folder of
its own in OUT, and OUT itself has the verdicts on the paper's claims, which any group may decide.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.store.folder import files_of
from eval.store.results import Results, add_choice, explain, read_results
from eval.store.runs import counted
from lazyllm.errors import parser_of, require
from lazyllm.files import write_whole

if TYPE_CHECKING:
    from eval.analysis.table import Figure, Table
    from eval.report.content import Content, Picture

log = logging.getLogger(__name__)

TITLE = "# Tables and figures"
FORMATS = ("md", "csv", "tex", "svg", "pdf", "png", "html")
OF_ALL = "verdicts"  # the table that all groups of runs share


def write_paper(
    results: Results,
    out: Path,
    tables: Mapping[str, Callable[..., Table]],
    figures: Mapping[str, Figure],
    formats: Sequence[str] = FORMATS,
    most: int | None = None,
) -> list[Path]:
    """Write everything of runs that share tables into `out`, created if missing. Returns the paths,
    the index first.

    tables, figures: as in `eval.analysis.table`. formats: suffixes of the files; pictures in
        README.md are PNG.
    most: of `eval.report.page.render`. Raises UserError if a file cannot be written.
    """
    from eval.report.content import content_of

    content = content_of(results, tables, figures)
    _remove(out, tables, figures)
    paths, sections = [], []
    for table in content.tables:
        noted = replace(table, caption="\n".join([*results.unfinished, table.caption]))
        files = write_table(noted, out, formats)
        sections.append(f"{noted.to_markdown('##')}\n{_source(files, noted.command)}\n")
        paths += files.values()
    for picture in content.pictures:
        files = _write_picture(picture, out, formats)
        sections.append(_section_of(picture, files, formats))
        paths += files.values()
    if "html" in formats:
        paths.append(_write_page(results, content, out, most))
    write_whole(
        out / "provenance.json", json.dumps(provenance(results), indent=2, sort_keys=True) + "\n"
    )
    index = _free_index(out)
    write_whole(index, "\n".join([_introduce(results, content, formats), *sections]))
    return [index, out / "provenance.json", *paths]


def write_groups(
    groups: Sequence[Results],
    out: Path,
    tables: Mapping[str, Callable[..., Table]],
    figures: Mapping[str, Figure],
    formats: Sequence[str] = FORMATS,
    most: int | None = None,
) -> list[Path]:
    """`write_paper` of each group of runs in a folder of its own, and what all groups share.
    Arguments: as there.
    """
    if len(groups) == 1:
        return write_paper(groups[0], out, tables, figures, formats, most)
    from eval.analysis.table import legend

    _remove(out, tables, figures)
    paths = list[Path]()
    group_tables = {name: make for name, make in tables.items() if name != OF_ALL}
    links = []
    for results in groups:
        index, *files = write_paper(
            results, out / results.name, group_tables, figures, formats, most
        )
        runs = ", ".join(run.folder.name for run in results.runs)
        links.append(f"- [{results.name}]({index.relative_to(out).as_posix()}): {runs}")
        paths += [index, *files]
    sections = list[str]()
    if OF_ALL in tables and len((table := tables[OF_ALL](*groups)).frame):
        files = write_table(table, out, formats)
        sections = [
            f"{table.to_markdown('##')}\n{legend([table])}\n\n{_source(files, table.command)}\n"
        ]
        paths += files.values()
    why = explain(groups)
    text = f"{TITLE}\n\n{why[0].upper()}{why[1:]}.\n\n" + "\n".join([*links, "", *sections])
    index = _free_index(out)
    write_whole(index, text)
    return [index, *paths]


def write_table(table: Table, out: Path, formats: Sequence[str]) -> dict[str, Path]:
    """Write a table's files; returns them by suffix."""
    forms = {"md": table.to_page, "csv": table.to_csv, "tex": table.to_latex}
    files = {
        suffix: out / "tables" / f"{table.name}.{suffix}" for suffix in forms if suffix in formats
    }
    for suffix, file in files.items():
        write_whole(file, forms[suffix]())
    return files


def _write_picture(picture: Picture, out: Path, formats: Sequence[str]) -> dict[str, Path]:
    # not at the top: importing matplotlib is slow and writes caches
    from eval.analysis.style import save

    stem = out / "figures" / picture.name
    suffixes = [suffix for suffix in formats if suffix in ("svg", "pdf", "png")]
    files = {
        file.suffix[1:]: file for file in (save(picture.drawn, stem, suffixes) if suffixes else [])
    }
    if "csv" in formats:
        files["csv"] = stem.with_name(f"{picture.name}.csv")
        write_whole(files["csv"], picture.data.to_csv(index=False, lineterminator="\n"))
    return files


def _section_of(picture: Picture, files: Mapping[str, Path], formats: Sequence[str]) -> str:
    figure = picture.figure
    texts = [text for text in (figure.caption, figure.notes) if text]
    if "png" in formats:
        texts.insert(0, f"![{figure.title}](figures/{picture.name}.png)")
    return "\n\n".join([f"## {figure.title}", *texts, _source(files, figure.command)]) + "\n"


def _write_page(results: Results, content: Content, out: Path, most: int | None) -> Path:
    from eval.report.page import render

    page = render(results, content, most)
    write_whole(out / "index.html", page)
    if (size := len(page.encode()) / 1e6) > 30:
        log.warning(
            "index.html has %.0f MB, so a browser loads it slowly: --examples N shows fewer "
            "answers",
            size,
        )
    return out / "index.html"


def _introduce(results: Results, content: Content, formats: Sequence[str]) -> str:
    """The text of the index before the tables."""
    from eval.analysis.table import legend

    made_from = (
        f"{counted(len(results.runs), 'stored run')} with "
        f"{counted(len(results.counting), 'answer')}"
    )
    parts = [
        f"{TITLE}\n",
        f"Made by `lazyllm-bench paper` from {made_from}, without a model. "
        "[provenance.json](provenance.json) lists the runs, their code and their machines.\n",
    ]
    if results.unfinished:
        parts += [*(f"**{sentence}**" for sentence in results.unfinished), ""]
    if "html" in formats:
        parts.append(
            "[index.html](index.html) has all of it on one page, with the answers of every arm.\n"
        )
    if content.missing:
        parts += [
            "No run yet for:",
            "",
            *(f"- {title}: `{command}`" for title, command in content.missing),
            "",
        ]
    if signs := legend(content.tables):
        parts.append(f"In all tables, {signs}\n")
    return "\n".join(parts)


def _free_index(out: Path) -> Path:
    """README.md; index.md beside one that somebody else wrote."""
    file = out / "README.md"
    is_free = not file.exists() or file.read_text(encoding="utf-8").startswith(TITLE)
    return file if is_free else out / "index.md"


def _source(files: Mapping[str, Path], command: str) -> str:
    """Markdown links to these files of a folder below README.md, and the command. files: by
    suffix.
    """
    links = " ".join(
        f"[{suffix}]({file.parent.name}/{file.name})" for suffix, file in files.items()
    )
    return f"{links}; `{command}`" if links else f"`{command}`"


def _remove(out: Path, tables: Iterable[str], figures: Iterable[str]) -> None:
    """Remove what an earlier call wrote into this folder: a table or figure may have no run now,
    or be of a group.
    """
    stems = [
        *(out / "tables" / name for name in tables),
        *(out / "figures" / name for name in figures),
    ]
    for file in (stem.with_name(f"{stem.name}.{suffix}") for stem in stems for suffix in FORMATS):
        file.unlink(missing_ok=True)
    for name in ("index.html", "provenance.json"):
        (out / name).unlink(missing_ok=True)


def provenance(results: Results) -> list[dict[str, Any]]:
    """For each run, in the order of folders: its arms, where it ran, and the hashes of its
    visits.
    """
    return [
        {
            "folder": run.folder.name,
            "fingerprint": run.about["fingerprint"],
            "model": run.model,
            "arms": run.identity["arms"],
            "examples": len(run.answered),
            "failed": len(run.failed),
            "visits_sha256": {
                file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                for file in files_of(run.folder, "visits")
            },
            "provenance": run.about.get("provenance"),
        }
        for run in results.runs
    ]


def main(arguments: Sequence[str]) -> int:
    """The command `paper`. Returns the exit code. Raises UserError."""
    parser = parser_of("paper", __doc__)
    add_choice(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder to write (default: paper beside the runs)",
    )
    parser.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="index.html: only the first N of a run and dataset",
    )
    formats = {"nargs": "+", "choices": FORMATS, "default": FORMATS, "metavar": "SUFFIX"}
    parser.add_argument(
        "--formats", help="the files to write: %(choices)s (default: all)", **formats
    )
    options = parser.parse_args(arguments)
    require(
        options.examples is None or options.examples > 0,
        "--examples",
        options.examples,
        "1 or more",
    )
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    groups = read_results(options.runs, options.where)
    from eval.analysis.table import figures, tables  # not at the top: matplotlib is slow to import

    out = options.out or options.runs[0] / "paper"
    paths = write_groups(groups, out, tables(), figures(), options.formats, options.examples)
    runs = sum(len(results.runs) for results in groups)
    print(f"{counted(len(paths), 'file')} from {counted(runs, 'run')}: {paths[0]}")
    return 0
