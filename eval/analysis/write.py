"""Every table and figure from stored runs, without a model: lazyllm-bench paper RUNS [RUNS ...] [--out FOLDER]

OUT/README.md     all tables and figures with captions, and a list of those without runs
OUT/tables/       each table as .md, .csv (full precision) and .tex
OUT/figures/      each figure as .svg, .pdf and .png, and its data as .csv
OUT/provenance.json   the runs used: fingerprint, commit, versions, machine, hash of the records
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.store.comparable import add_choice
from eval.store.results import Results
from lazyllm.files import write_whole

if TYPE_CHECKING:
    from eval.analysis.registry import Subject
    from eval.analysis.table import Figure, Table

_TABLE_FILES = ("md", "csv", "tex")
_PICTURES = ("svg", "pdf", "png")


def write_paper(results: Results, out: Path, subjects: Mapping[str, Subject]) -> list[Path]:
    """Write everything into `out`, created if missing. Returns the paths, README.md first.

    subjects: such as `eval.analysis.registry.SUBJECTS`. Raises UserError if a file cannot be written.
    """
    paths, sections, missing = [], [], []
    for name, subject in subjects.items():
        if subject.table is not None:
            table = subject.table(results)
            paths += _write_table(table, out / "tables" / name)
            sections.append(_table_section(table, subject.command))
            missing += [table.title] if table.frame.empty else []
    for name, subject in subjects.items():
        if subject.figure is not None:
            written = _write_figure(subject.figure, results, out / "figures" / name)
            paths += written
            sections.append(_figure_section(subject.figure, subject.command, has_run=bool(written)))
            missing += [] if written else [subject.figure.title]
    write_whole(out / "provenance.json", json.dumps(provenance(results), indent=2, sort_keys=True) + "\n")
    write_whole(out / "README.md", _index(results, sections, missing))
    return [out / "README.md", out / "provenance.json", *paths]


def provenance(results: Results) -> list[dict[str, Any]]:
    """For each run, in the order of folders: its setting, where it ran, and the hash of its records."""
    return [
        {
            "folder": run.folder.name,
            "fingerprint": run.about["fingerprint"],
            "model": run.model,
            "method": run.identity["method"],
            "parameters": run.identity.get("parameters"),
            "seed": run.seed,
            "examples": len(run.keys),
            "failed": len(run.failures),
            "records_sha256": run.records_sha256,
            "provenance": run.about.get("provenance"),
        }
        for run in results.runs
    ]


def _write_table(table: Table, stem: Path) -> list[Path]:
    texts = (table.to_markdown(), table.to_csv(), table.to_latex())
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in _TABLE_FILES]
    for path, text in zip(paths, texts, strict=True):
        write_whole(path, text)
    return paths


def _write_figure(figure: Figure, results: Results, stem: Path) -> list[Path]:
    """Write the figure's files. If no run has its data, write nothing and remove files of an earlier call."""
    data = figure.data(results)
    table = stem.with_name(f"{stem.name}.csv")
    if data.empty:
        for path in (table, *(stem.with_name(f"{stem.name}.{suffix}") for suffix in _PICTURES)):
            path.unlink(missing_ok=True)
        return []
    from eval.analysis.style import save  # not at the top: importing matplotlib is slow and writes caches

    write_whole(table, data.to_csv(index=False, lineterminator="\n"))
    return [table, *save(figure.plot(data), stem, _PICTURES)]


def _table_section(table: Table, command: str) -> str:
    files = " ".join(f"[{suffix}](tables/{table.name}.{suffix})" for suffix in _TABLE_FILES)
    return f"{table.to_markdown('##')}\n{files}; `{command}`\n"


def _figure_section(figure: Figure, command: str, has_run: bool) -> str:
    if not has_run:
        return f"## {figure.title}\n\nNo run for this figure. Command: `{command}`\n"
    files = " ".join(f"[{suffix}](figures/{figure.name}.{suffix})" for suffix in (*_PICTURES, "csv"))
    picture = f"![{figure.title}](figures/{figure.name}.png)"
    return f"## {figure.title}\n\n{picture}\n\n{figure.caption}\n\n{files}; `{command}`\n"


def _index(results: Results, sections: Sequence[str], missing: Sequence[str]) -> str:
    examples = sum(len(run.examples) for run in results.runs)
    lines = [
        "# Tables and figures",
        "",
        f"Made by `lazyllm-bench paper` from {len(results.runs)} stored runs with {examples} records, without a model. "
        "[provenance.json](provenance.json) lists the runs, their code and their machines.",
        "",
    ]
    if missing:
        lines += ["No run yet for:", "", *(f"- {what}" for what in missing), ""]
    return "\n".join([*lines, *sections])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code 0; raises UserError."""
    parser = argparse.ArgumentParser(
        prog="lazyllm-bench paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_choice(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="folder to write (default: %(default)s)")
    parser.add_argument(
        "--within", type=float, default=1.0, metavar="X",
        help="for the effective keep rate: accept a score up to X %% below the baseline's (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    results = Results.read(options.runs, options.where, options.newest)
    from eval.analysis.ranking import effective_keep  # not at the top: importing matplotlib is slow
    from eval.analysis.registry import SUBJECTS

    keep = replace(SUBJECTS["effective_keep"], table=partial(effective_keep, within=options.within))
    paths = write_paper(results, options.out, SUBJECTS | {"effective_keep": keep})
    print(f"{len(paths)} files from {len(results.runs)} runs: {paths[0]}")
    return 0
