"""The page: one HTML text without references to other files.

It holds the runs and their provenance (`overview`), tables and figures, and every example's answers
(`answers`). Its scripts are `*.js`, its style `report.css`, its frame `page.html.jinja`.
"""

import base64
import hashlib
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.analysis.table import Cell, Table, legend
from eval.report import overview
from eval.report.answers import embed_answers
from eval.report.content import Content
from eval.store.results import Results

_HERE = Path(__file__).parent
_SCRIPTS = ("tables.js", "answers.js")
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_IDS = re.compile(r'(\bid="|url\(#|href="#)')
# What a reader compares: these columns are shown before a reader asks for more, or the first `MOST` of a table without
COMPARED = ("score", "TTFT speedup", "% computed", "% tokens computed", "KL, nats", "answer's KL")
MOST = 4


def render(results: Results, content: Content, most: int | None = None) -> str:
    """The page of some runs. content: of these. most: examples shown of each run and dataset, None for all."""
    runs = results.runs
    common, differing = overview.provenance(runs)
    tables = content.tables
    pictures = [
        {**vars(one.figure), "name": f"figure-{one.name}", "svg": inline_svg(one.drawn, f"figure-{one.name}")}
        for one in content.pictures
    ]
    first = next(iter(pictures), None)
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template("page.html.jinja").render(
        title=", ".join(dict.fromkeys(run.model.removesuffix(run.variant) for run in runs)),
        summary=overview.summary(runs),
        warnings=overview.warnings(runs, most),
        runs=grid(overview.runs_table(runs), whole=True),
        settings=grid(settings, whole=True) if (settings := overview.settings_table(runs)) else None,
        results=grid(overview.results_table(results), filtered=0),
        common=common,
        differing=grid(differing, whole=True) if differing else None,
        findings=overview.findings(results),
        legend=legend(tables),
        tables=[grid(replace(table, name=f"table-{table.name}")) for table in tables],
        missing=content.missing,
        first=first,
        pictures=pictures[1:],
        records=embed_answers(runs, most),
        style=Markup((_HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # for the content security policy: no other script may run
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def grid(table: Table, filtered: int | None = None, whole: bool = False) -> dict[str, Any]:
    """What the template shows of a table: its texts, columns, rows, and the choices of a column to filter by.

    A column with a number in any cell is numeric: it is sorted by these. A reader has to ask for more than the columns
    that name the row (if they differ in any row) and those that are compared, unless the table is shown as a whole.
    """
    rows = [[text if isinstance(text, Cell) else Cell(text) for text in row] for row in table.cells.to_numpy().tolist()]
    keys, values = list(table.cells)[: table.keys], list(table.cells)[table.keys :]
    first = {*([heading for heading in values if heading in COMPARED] or values[:MOST]), *keys[-1:]}
    columns = []
    for number, heading in enumerate(table.cells):
        texts = [row[number] for row in rows]
        at_once = whole or number == filtered or heading in first or (heading in keys and len(set(texts)) > 1)
        numeric = any(text.value is not None for text in texts)
        columns.append({"text": heading, "numeric": numeric, "more": not at_once})
    choices = [] if filtered is None else list(dict.fromkeys(row[filtered] for row in rows))
    return {**vars(table), "columns": columns, "rows": rows, "filtered": filtered, "choices": choices}


def inline_svg(figure: Any, name: str) -> Markup:
    """The figure as an `<svg>` element. Its ids begin with `name`: figures share none. Its letters are paths."""
    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", bbox_inches="tight", metadata=_NO_METADATA)
    text = written.getvalue()
    element = text[text.index("<svg") :]
    attributes = f'<svg role="img" aria-labelledby="{name}-title" '
    return Markup(attributes + _IDS.sub(rf"\g<1>{name}-", element).removeprefix("<svg "))
