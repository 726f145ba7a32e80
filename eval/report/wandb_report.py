"""A W&B Report of runs tracked with `tracker=wandb`: lazyllm-bench wandb-report RUNS [RUNS ...]

--out FILE                     the report's specification as JSON, offline: its blocks, as wandb_workspaces names them
--publish --entity NAME        the report in W&B, with the figures as images; needs a key and the extra wandb-report

Tables and figures are those of `lazyllm-bench paper`; the panels show the given runs, which W&B finds by fingerprint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eval.benchmarks.datasets import DATASETS, TASKS
from eval.store.folder import fingerprint
from eval.store.results import Results, add_choice
from lazyllm.errors import UserError, parser_of
from lazyllm.files import write_whole

_TABLES = ("table1_paper", "table2_paper", "verdicts", "field")
# {column of a run's summary by task: heading}
_COLUMNS = {
    "score": "score (0 to 100)", "ttft_speedup": "TTFT speedup", "generation_speedup": "generation speedup",
    "pct_prompt_tokens_computed": "% of prompt tokens computed", "kv_bytes": "KV cache (bytes)",
    "aux_bytes": "Aux Cache (bytes)",
}  # fmt: skip
_RUNNING = {"running/score": "score so far", "running/ttft_speedup": "TTFT speedup so far"}
_WIDTH, _HEIGHT = 24, 8  # in W&B's grid: of a whole line, and of a panel

Block = dict[str, Any]  # "kind": a class of wandb_workspaces.reports.v2; the others are its arguments


def specification(results: Results, title: str, project: str, entity: str = "") -> Block:
    """The report. The same runs give the same one."""
    from eval.analysis.registry import FIGURES, TABLES  # not at the top: matplotlib is slow to import

    runs = {"entity": entity, "project": project} if entity else {}
    prints = [run.about["fingerprint"] for run in results.runs]

    def panels(*shown: Block, only: str = f"Config('fingerprint') in {prints}") -> Block:
        return _block("PanelGrid", runsets=[_block("Runset", name="runs", filters=only, **runs)], panels=list(shown))

    def section(title: str, *shown: Block) -> list[Block]:
        return [_block("H1", text=title), panels(*shown)]

    there = {DATASETS[name].task for run in results.runs for name in run.datasets}
    speed, score = (_block("SummaryMetric", name=f"all/{column}") for column in ("ttft_speedup", "score"))
    blocks = [_block("P", text=_introduction(results)), _block("TableOfContents")]
    blocks += [_block("MarkdownBlock", text=TABLES[name](results).to_markdown("#")) for name in _TABLES]
    blocks.append(_block("H1", text="Figures"))
    for name, figure in FIGURES.items():
        if not figure.data(results).empty:
            picture = {"title": figure.title, "media_keys": [f"figures/{name}"], "layout": _place(0, 2)}
            blocks.append(panels(_block("MediaBrowser", **picture), only=f"Config('report') = '{report_id(results)}'"))
    against = _block("ScatterPlot", x=speed, y=score, layout=_place(0, 2))
    blocks += section("Score against speed, mean over tasks", against)
    for task in [*(task for task in TASKS if task in there), "all"]:
        bars = [
            _block("BarPlot", title=f"{task}: {heading}", metrics=[f"{task}/{column}"], layout=_place(number))
            for number, (column, heading) in enumerate(_COLUMNS.items())
        ]
        blocks += section(task, *bars)
    curves = [
        _block("LinePlot", title=heading, x="examples", y=[key], title_x="examples", layout=_place(number))
        for number, (key, heading) in enumerate(_RUNNING.items())
    ]
    blocks += section("Run by run", *curves, _block("RunComparer", diff_only="split", layout=_place(2, 2)))
    examples = _block("WeavePanelSummaryTable", table_name="per_example", layout=_place(0, 2))
    blocks += section("Examples", examples)
    return _block("Report", project=project, entity=entity, title=title, width="fluid", blocks=blocks)


def report_id(results: Results) -> str:
    """In the config of the W&B run that holds the report's images."""
    return fingerprint({"report of": [run.about["fingerprint"] for run in results.runs]})[:16]


def made(value: Any) -> Any:
    """The objects of a specification. Raises UserError without the extra."""
    try:
        import wandb_workspaces.reports.v2 as library
    except ImportError as error:
        raise UserError(f"{error}: install the extra, pip install 'lazyllm-bench[wandb-report]'") from error
    if isinstance(value, list):
        return [made(item) for item in value]
    if not isinstance(value, dict):
        return value
    return getattr(library, value["kind"])(**{name: made(item) for name, item in value.items() if name != "kind"})


def publish(results: Results, report: Block) -> str:
    """Save the images as a W&B run, then the report; returns its address. Raises UserError if W&B refuses it."""
    import wandb  # not at the top: slow to import

    from eval.analysis.registry import draw_all

    report_made = made(report)
    try:
        place = {"project": report["project"], "entity": report["entity"], "name": report["title"]}
        facts = {"report": report_id(results)}
        with TemporaryDirectory() as folder, wandb.init(**place, job_type="report", config=facts) as run:
            for file in draw_all(results, Path(folder)):
                run.log({f"figures/{file.stem}": wandb.Image(str(file))})
        report_made.save()
    except Exception as error:  # no network, no such project, no permission: many types
        raise UserError(f"W&B refused the report ({type(error).__name__}: {error})") from error
    return report_made.url


def _block(kind: str, **arguments: Any) -> Block:
    return {"kind": kind, **arguments}


def _place(number: int, size: int = 1) -> Block:
    """The place of a grid's panel, two in a line. size: 2 for a whole line."""
    x, y = number % 2 * _WIDTH // 2, number // 2 * _HEIGHT
    return _block("Layout", x=x, y=y, w=size * _WIDTH // 2, h=size * _HEIGHT)


def _introduction(results: Results) -> str:
    runs = results.runs
    examples = len({key for run in runs for key in run.keys})
    facts = {
        "model": [run.model for run in runs],
        "device": [run.identity["device"] for run in runs],
        "commit": [run.about.get("provenance", {}).get("git_commit") or "unknown" for run in runs],
    }
    listed = "; ".join(f"{name}: {', '.join(sorted(set(values)))}" for name, values in facts.items())
    return f"Runs: {len(runs)}; examples: {examples}; {listed}. Speedups are over the paired baseline of each example."


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0. Raises UserError."""
    parser = parser_of("wandb-report", __doc__)
    add_choice(parser)
    parser.add_argument("--out", type=Path, help="write the specification to this file, offline")
    parser.add_argument("--publish", action="store_true", help="save the report in W&B")
    parser.add_argument("--project", default=os.environ.get("WANDB_PROJECT", "lazyllm-bench"))
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY", ""), help="the user or team of the project")
    parser.add_argument("--title", default="LazyLLM on LongBench")
    options = parser.parse_args(argv)
    if not options.out and not options.publish:
        raise UserError("give --out FILE for the specification, or --publish")
    if options.publish and not options.entity:
        raise UserError("--publish needs --entity NAME (or WANDB_ENTITY): the user or team of the project")
    if options.publish:
        import wandb  # not at the top: slow to import

        if not wandb.login(prompt=False):
            raise UserError("--publish needs a key: WANDB_API_KEY, or `wandb login`. Offline: --out FILE")
    results = Results.read(options.runs, options.where, options.newest)
    report = specification(results, options.title, options.project, options.entity)
    if options.out:
        write_whole(options.out, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        print(options.out)
    if options.publish:
        print(publish(results, report))
    return 0
