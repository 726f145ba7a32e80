"""make paper RUNS=runs [OUT=runs/paper]: every table and figure from stored runs, without a model.

OUT/README.md     every table and picture with its caption, and what had no run
OUT/tables/       each table as .md, .csv (full precision) and .tex
OUT/figures/      each figure as .svg, .pdf and .png, and the .csv behind it
OUT/provenance.json   the runs they were made from: fingerprint, commit, versions, machine, hash of the records
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eval.paper.table import Table
from eval.paper.tables import TABLES
from eval.store.folder import write_whole
from eval.store.frame import StoredRun, find_runs
from lazyllm.errors import UserError

Save = Callable[[Any, Path, Sequence[str]], list[Path]]

# What to run for what is missing: an experiment of eval/conf/experiment, or what any run gives
_COMMANDS = {
    "table1": "python run.py -m experiment=table1 model=llama2,xgen",
    "table2": "python run.py -m experiment=table2 model=llama2,xgen",
    "figure2": "python run.py experiment=figure2 model=llama2 dataset=hotpotqa",
    "figure5": "python run.py -m experiment=figure5 model=llama2,xgen",
    "figure6": "python run.py -m experiment=figure6 model=llama2,xgen",
    "figure7": "python run.py experiment=figure7 model=llama2",
    "mechanism": "python run.py experiment=figure2 model=tiny",
    "sensitivity": "python run.py -m experiment=figure6 model=tiny",
}
_ANY_RUN = "python run.py model=tiny method=lazy"


def make_paper(runs: Sequence[StoredRun], out: Path, figures: Mapping[str, Any], save: Save) -> list[Path]:
    """Write everything into `out`, made if it is not there. Returns the paths, README.md first.

    figures: {name: `Figure`}. save: `eval.paper.figures.save`. Raises UserError where a file cannot be written.
    """
    for folder in ("tables", "figures"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    paths, sections, missing = [], [], []
    for name, make in TABLES.items():
        table = make(runs)
        paths += _write_table(table, out / "tables" / name)
        sections.append(_table_section(table))
        missing += [f"{table.title}: {what}" for what in _without_run(table)]
    for name, figure in figures.items():
        data = figure.data(runs)
        written = _write_figure(figure, data, out / "figures" / name, save)
        paths += written
        sections.append(_figure_section(figure, has_run=bool(written)))
        missing += [] if written else [figure.title]
    write_whole(out / "provenance.json", json.dumps(provenance(runs), indent=2, sort_keys=True) + "\n")
    write_whole(out / "README.md", _index(runs, sections, missing))
    return [out / "README.md", out / "provenance.json", *paths]


def provenance(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Of each run, in the order of their folders: what it was, where it ran, and the hash of its records."""
    return [
        {
            "folder": run.folder.name,
            "fingerprint": run.about["fingerprint"],
            "model": run.model,
            "method": run.identity["method"],
            "parameters": run.identity.get("parameters"),
            "seed": run.seed,
            "examples": len(run.examples),
            "failed": len(run.failures),
            "records_sha256": run.records_sha256,
            "provenance": run.about.get("provenance"),
        }
        for run in runs
    ]


def _write_table(table: Table, stem: Path) -> list[Path]:
    texts = {"md": table.to_markdown(), "csv": table.to_csv(), "tex": table.to_latex()}
    paths = {stem.with_name(f"{stem.name}.{suffix}"): text for suffix, text in texts.items()}
    for path, text in paths.items():
        write_whole(path, text)
    return list(paths)


def _write_figure(figure: Any, data: pd.DataFrame, stem: Path, save: Save) -> list[Path]:
    """The figure's files; none where no run has what it needs, and then none of an earlier time either."""
    suffixes = ("svg", "pdf", "png")
    table = stem.with_name(f"{stem.name}.csv")
    if data.empty:
        for path in (table, *(stem.with_name(f"{stem.name}.{suffix}") for suffix in suffixes)):
            path.unlink(missing_ok=True)
        return []
    write_whole(table, data.to_csv(index=False, lineterminator="\n"))
    return [table, *save(figure.plot(data), stem, suffixes)]


def _without_run(table: Table) -> list[str]:
    """What of a table had no run, by model and method: `tiny on embedded: lazy (2 of 6 tasks)`; or all of it."""
    if table.frame.empty:
        return ["all of it"]
    if "status" not in table.frame:
        return []
    found: dict[str, dict[str, list[bool]]] = {}
    for row in table.frame.to_dict("records"):
        methods = found.setdefault(f"{row['model']} on {row['suite']}", {})
        methods.setdefault(row["method"], []).append(row["status"] == "no run")
    lines = []
    for model, methods in found.items():
        lacking = [_share(method, absent) for method, absent in methods.items() if any(absent)]
        everything = all(all(absent) for absent in methods.values())
        lines += [f"{model}: {'everything' if everything else ', '.join(lacking)}"] if lacking else []
    return lines


def _share(method: str, absent: Sequence[bool]) -> str:
    return method if all(absent) else f"{method} ({sum(absent)} of {len(absent)} tasks)"


def _table_section(table: Table) -> str:
    files = " ".join(f"[{suffix}](tables/{table.name}.{suffix})" for suffix in ("md", "csv", "tex"))
    return f"{table.to_markdown('##')}\n{files}; `{_COMMANDS.get(table.name, _ANY_RUN)}`\n"


def _figure_section(figure: Any, has_run: bool) -> str:
    command = _COMMANDS.get(figure.name, _ANY_RUN)
    if not has_run:
        return f"## {figure.title}\n\nNo run for this figure. What gives it: `{command}`\n"
    files = " ".join(f"[{suffix}](figures/{figure.name}.{suffix})" for suffix in ("svg", "pdf", "png", "csv"))
    picture = f"![{figure.title}](figures/{figure.name}.png)"
    return f"## {figure.title}\n\n{picture}\n\n{figure.caption}\n\n{files}; `{command}`\n"


def _index(runs: Sequence[StoredRun], sections: Sequence[str], missing: Sequence[str]) -> str:
    examples = sum(len(run.examples) for run in runs)
    lines = [
        "# Tables and figures",
        "",
        f"Made by `make paper` from {len(runs)} stored runs with {examples} records, without a model; which runs, of "
        "which code and on which machines, is in [provenance.json](provenance.json).",
        "",
    ]
    if missing:
        lines += ["No run yet for:", "", *(f"- {what}" for what in missing), ""]
    return "\n".join([*lines, *sections])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that the runs lie in, or below")
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="where to (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        runs = find_runs(given.runs)
        from eval.paper.figures import FIGURES, save  # not at the top: matplotlib is slow to import, and writes caches

        paths = make_paper(runs, given.out, FIGURES, save)
    except UserError as error:
        print(f"make_paper: {error}", file=sys.stderr)
        return 1
    print(f"{len(paths)} files from {len(runs)} runs: {paths[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
