"""A W&B Report of runs tracked with `tracker=wandb`: lazyllm-bench wandb-report RUNS [RUNS ...]

--out FILE                     the report's specification as JSON, offline, in the terms of
                               wandb_workspaces
--publish --entity NAME        the report in W&B, with the figures as images; needs a key and
                               the extra wandb-report

Tables and figures are those of `lazyllm-bench paper`; the panels show the given runs, which W&B
finds by fingerprint.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.analysis.table import figures, legend, tables
from eval.benchmarks.datasets import DATASETS, TASKS
from eval.report.content import Content, content_of
from eval.store.folder import fingerprint
from eval.store.results import Results, add_choice, explain, read_results
from lazyllm.errors import UserError, parser_of
from lazyllm.files import write_whole

_TABLES = ("table1_paper", "table2_paper", "verdicts", "field")
_BARS = (
    "score", "ttft_speedup", "equal_length_speedup", "generation_speedup",
    "pct_prompt_tokens_computed", "kv_bytes",
    "aux_bytes",
)  # fmt: skip
# "kind": a class of wandb_workspaces.reports.v2; the others are its arguments
Block = dict[str, Any]


def specification(
    results: Results, content: Content, title: str, project: str, entity: str = ""
) -> Block:
    """Describe the report. The same runs give the same one. content: the tables and pictures to
    show.
    """
    # a line of W&B's grid; other panels take the next free place
    wide = dict(kind="Layout", w=24, h=16)
    place = {"entity": entity, "project": project} if entity else {}
    prints = [run.about["fingerprint"] for run in results.runs]

    def panels(
        panel_blocks: list[Block], only: str = f"Config('fingerprint') in {prints}"
    ) -> Block:
        return dict(
            kind="PanelGrid",
            runsets=[dict(kind="Runset", name="runs", filters=only, **place)],
            panels=panel_blocks,
        )

    examples = len({key for run in results.runs for key in run.answered})
    devices = ", ".join(sorted({run.device for run in results.runs}))
    text = (
        f"Runs: {len(prints)}; examples: {examples}; device: {devices}. Speedups are over the same "
        "visits' baseline."
    )
    blocks = [
        dict(kind="P", text=text),
        dict(kind="TableOfContents"),
        dict(kind="P", text=legend(content.tables)),
    ]
    blocks += [dict(kind="MarkdownBlock", text=table.to_markdown("#")) for table in content.tables]
    blocks.append(dict(kind="H1", text="Figures"))
    for picture in content.pictures:
        block = dict(
            kind="MediaBrowser",
            title=picture.figure.title,
            media_keys=[f"figures/{picture.name}"],
            layout=wide,
        )
        blocks.append(panels([block], only=f"Config('report') = '{report_id(results)}'"))
    measured = {DATASETS[name].task for run in results.runs for name in run.datasets}
    for task in [*(task for task in TASKS if task in measured), "all"]:
        bars = [dict(kind="BarPlot", metrics=[f"{task}/{column}"]) for column in _BARS]
        blocks += [dict(kind="H1", text=task), panels(bars)]
    curves = [
        dict(kind="LinePlot", x="examples", y=[f"running/{name}"])
        for name in ("score", "ttft_speedup")
    ]
    rows = dict(kind="WeavePanelSummaryTable", table_name="per_example", layout=wide)
    blocks += [dict(kind="H1", text="Run by run"), panels([*curves, rows])]
    return dict(
        kind="Report", project=project, entity=entity, title=title, width="fluid", blocks=blocks
    )


def report_id(results: Results) -> str:
    """Name the report in the config of the W&B run that holds its images."""
    return fingerprint({"report of": [run.about["fingerprint"] for run in results.runs]})[:16]


def made(value: Any) -> Any:
    """Make the objects of a specification. Raises UserError without the extra."""
    try:
        import wandb_workspaces.reports.v2 as library
    except ImportError as error:
        raise UserError(
            f"{error}: install the extra, pip install 'lazyllm-bench[wandb-report]'"
        ) from error
    if isinstance(value, list):
        return [made(item) for item in value]
    if isinstance(value, dict):
        return getattr(library, value["kind"])(
            **{name: made(item) for name, item in value.items() if name != "kind"}
        )
    return value


def publish(results: Results, content: Content, report: Block) -> str:
    """Save the images as a W&B run, then the report; returns its address. Raises UserError if
    W&B refuses it.
    """
    import matplotlib.pyplot  # noqa: F401 - wandb.Image uses it without importing it
    import wandb  # not at the top, both: slow to import

    report_made = made(report)
    place = {
        "project": report["project"],
        "entity": report["entity"],
        "config": {"report": report_id(results)},
    }
    try:
        with wandb.init(**place, name=report["title"], job_type="report") as run:
            run.log(
                {
                    f"figures/{picture.name}": wandb.Image(picture.drawn)
                    for picture in content.pictures
                }
            )
        report_made.save()
    except Exception as error:  # no network, no such project, no permission: many types
        raise UserError(f"W&B refused the report ({type(error).__name__}: {error})") from error
    return report_made.url


def main(arguments: Sequence[str]) -> int:
    """The command `wandb-report`. Returns the exit code. Raises UserError."""
    parser = parser_of("wandb-report", __doc__)
    add_choice(parser)
    parser.add_argument("--out", type=Path, help="write the specification to this file, offline")
    parser.add_argument("--publish", action="store_true", help="save the report in W&B")
    parser.add_argument("--project", default=os.environ.get("WANDB_PROJECT", "lazyllm-bench"))
    parser.add_argument(
        "--entity",
        default=os.environ.get("WANDB_ENTITY", ""),
        help="the user or team of the project",
    )
    parser.add_argument("--title", help="default: the models of the runs")
    options = parser.parse_args(arguments)
    if not options.out and not options.publish:
        raise UserError("give --out FILE for the specification, or --publish")
    if options.publish:
        import wandb  # not at the top: slow to import

        if not options.entity:
            raise UserError(
                "--publish needs --entity NAME (or WANDB_ENTITY): the user or team of the project"
            )
        if not wandb.login(prompt=False):
            raise UserError(
                "--publish needs a key: WANDB_API_KEY, or `wandb login`. Offline: --out FILE"
            )
    results, *others = read_results(options.runs, options.where)
    if others:
        raise UserError(f"{explain([results, *others])}: choose one with --where KEY=VALUE")
    content = content_of(results, {name: tables()[name] for name in _TABLES}, figures())
    title = options.title or ", ".join(dict.fromkeys(run.model for run in results.runs))
    report = specification(results, content, title, options.project, options.entity)
    if options.out:
        write_whole(options.out, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        print(options.out)
    if options.publish:
        print(publish(results, content, report))
    return 0
