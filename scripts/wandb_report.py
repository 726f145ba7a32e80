"""A W&B Report of runs that were tracked with `tracker=wandb`: tables, scores and speedups by task, runs side by side.

python scripts/wandb_report.py runs --out report.json                      the spec as a file, offline
python scripts/wandb_report.py runs --publish --entity NAME                the report in project lazyllm-bench
python scripts/wandb_report.py --group table1 --publish --entity NAME      of a project's runs, none of them here

Runs that are given are read from their folders: the report's tables are made from their records, and its panels show
these runs only, found in W&B by their fingerprint. Needs the extra wandb-report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.benchmarks.datasets import DATASETS, TASKS
from eval.paper.summary import compared_markdown, summarise
from eval.run.tracking import key_is_configured
from eval.store.folder import write_whole
from eval.store.frame import StoredRun, as_frame, find_runs
from eval.store.record import Record
from lazyllm.errors import UserError

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import Report

# Of a run's summary, by task: (column, heading)
COLUMNS = (
    ("score", "score (0 to 100)"),
    ("ttft_speedup", "TTFT speedup"),
    ("generation_speedup", "generation speedup"),
    ("pct_prompt_tokens_computed", "% of prompt tokens computed"),
)
MEMORY = (("kv_bytes", "KV cache (bytes)"), ("aux_bytes", "Aux Cache (bytes)"))
RUNNING = (("running/score", "score so far"), ("running/ttft_speedup", "TTFT speedup so far"))
WIDTH, HEIGHT = 24, 8  # of W&B's grid: a whole line, and a panel's usual height


def build_report(
    runs: Sequence[StoredRun], title: str, project: str, entity: str = "", group: str | None = None
) -> Report:
    """The report. Without runs: panels for all tasks, of the project's runs (of one group).

    entity: empty offline; otherwise W&B is asked for the project. Raises UserError without the extra, UserError
    where two runs measured the same.
    """
    wr = _library()
    runset: dict[str, Any] = {"entity": entity, "project": project} if entity else {}
    grid = {"runsets": [wr.Runset(name="runs", filters=_filter(runs, group), **runset)]}
    tasks = _tasks(runs)
    means = ["all"] if len(tasks) > 1 else tasks
    blocks = [
        wr.P(_introduction(runs, group)),
        wr.TableOfContents(),
        *([wr.H1("Tables"), *(wr.MarkdownBlock(text) for text in _tables(runs))] if runs else []),
        wr.H1("Score against speed"),
        wr.PanelGrid(**grid, panels=[_scatter(wr, task) for task in means]),
        wr.H1("By task"),
        *(block for task in [*tasks, *(one for one in means if one not in tasks)] for block in _task(wr, grid, task)),
        wr.H1("Run by run"),
        wr.P("Settings that differ, and how score and speedup settled while examples were measured."),
        wr.PanelGrid(
            **grid,
            panels=[
                *(
                    wr.LinePlot(title=heading, x="examples", y=[key], title_x="examples", layout=_half(wr, number))
                    for number, (key, heading) in enumerate(RUNNING)
                ),
                wr.RunComparer(diff_only="split", layout=wr.Layout(x=0, y=HEIGHT, w=WIDTH, h=2 * HEIGHT)),
            ],
        ),
        wr.H1("Examples"),
        wr.PanelGrid(
            **grid,
            panels=[
                wr.WeavePanelSummaryTable(table_name="per_example", layout=wr.Layout(x=0, y=0, w=WIDTH, h=2 * HEIGHT))
            ],
        ),
    ]
    return wr.Report(project=project, entity=entity, title=title, width="fluid", blocks=blocks)


def spec(report: Report) -> str:
    """The report as the JSON that W&B is sent."""
    return report._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"


def publish(report: Report) -> str:
    """Save the report in its project; its address. Raises UserError where W&B does not take it."""
    try:
        report.save()
    except Exception as error:  # of many kinds: no network, no such project, no right to write
        raise UserError(f"W&B did not take the report ({type(error).__name__}: {error})") from error
    return report.url


def _library() -> Any:
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise UserError(f"{error}: install the extra, pip install 'lazyllm-bench[wandb-report]'") from error
    return wr


def _filter(runs: Sequence[StoredRun], group: str | None) -> str:
    """Which of the project's runs the panels show."""
    parts = ["Metric('JobType') = 'run'"]
    if runs:
        parts.append(f"Config('fingerprint') in {[run.about['fingerprint'] for run in runs]}")
    if group is not None:
        parts.append(f"Metric('Group') = {group!r}")
    return " and ".join(parts)


def _tasks(runs: Sequence[StoredRun]) -> list[str]:
    """The tasks that the runs have, in the tables' order; all where no run is given."""
    found = {DATASETS[name].task for run in runs for name in run.datasets}
    return [task for task in TASKS if task in found or not runs]


def _introduction(runs: Sequence[StoredRun], group: str | None) -> str:
    if not runs:
        return f"Runs of {'the project' if group is None else f'group {group}'}, as W&B has them."
    examples = len({key for run in runs for key in run.keys})
    commits = {run.about.get("provenance", {}).get("git_commit") or "unknown" for run in runs}
    devices = {run.identity["device"] for run in runs}
    models = {run.model for run in runs}
    return (
        f"{len(runs)} runs of {_listed(models)} on {examples} examples; device: {_listed(devices)}; "
        f"commit: {_listed(commits)}. Speedups are over the baseline that was run beside each example."
    )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _tables(runs: Sequence[StoredRun]) -> list[str]:
    """A table in Markdown for each model: every setting on every task."""
    by_run = {(run.about["fingerprint"], *record.key): record for run in runs for record in run.records}
    frame = as_frame(runs)
    frame["seeds"] = frame.groupby(["model", "label"])["seed"].transform("nunique")
    models: dict[str, dict[str, list[Record]]] = {}
    for row in frame.to_dict("records"):
        name = f"{row['label']}, seed {row['seed']}" if row["seeds"] > 1 else row["label"]
        settings = models.setdefault(row["model"], {})
        settings.setdefault(name, []).append(by_run[row["run"], row["dataset"], row["id"]])
    return [
        compared_markdown({name: summarise(records) for name, records in settings.items()}, model)
        for model, settings in models.items()
    ]


def _task(wr: Any, grid: dict[str, Any], task: str) -> list[Any]:
    """A task's heading, and a bar a run for each column."""
    name = "mean over tasks" if task == "all" else task
    panels = [
        wr.BarPlot(title=f"{name}: {heading}", metrics=[f"{task}/{column}"], layout=_half(wr, number))
        for number, (column, heading) in enumerate((*COLUMNS, *MEMORY))
    ]
    return [wr.H2(name), wr.PanelGrid(**grid, panels=panels)]


def _scatter(wr: Any, task: str) -> Any:
    return wr.ScatterPlot(
        title=f"{'mean over tasks' if task == 'all' else task}: score against TTFT speedup",
        x=wr.SummaryMetric(f"{task}/ttft_speedup"),
        y=wr.SummaryMetric(f"{task}/score"),
        layout=wr.Layout(x=0, y=0, w=WIDTH, h=2 * HEIGHT),
    )


def _half(wr: Any, number: int) -> Any:
    """The place of a panel, two in a line."""
    return wr.Layout(x=number % 2 * WIDTH // 2, y=number // 2 * HEIGHT, w=WIDTH // 2, h=HEIGHT)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders that runs lie in; none: what the project holds")
    parser.add_argument("--out", type=Path, help="write the report's spec to this file, offline")
    parser.add_argument("--publish", action="store_true", help="save the report in W&B; needs a key and --entity")
    parser.add_argument("--project", default=os.environ.get("WANDB_PROJECT", "lazyllm-bench"))
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY"), help="the user or team of the project")
    parser.add_argument("--group", help="only runs of this group: a comparison's label, or a sweep's")
    parser.add_argument("--title", default="LazyLLM on LongBench")
    options = parser.parse_args(argv)
    if not options.out and not options.publish:
        parser.error("give --out FILE for the spec, or --publish")
    return options


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    options = parse(argv)
    try:
        if options.publish and not options.entity:
            raise UserError("--publish needs --entity NAME (or WANDB_ENTITY): the user or team of the project")
        if options.publish and not key_is_configured():
            raise UserError("--publish needs a key: WANDB_API_KEY, or `wandb login`. Offline: --out FILE")
        runs = find_runs(options.runs) if options.runs else []
        if options.out:
            write_whole(options.out, spec(build_report(runs, options.title, options.project, group=options.group)))
            print(options.out)
        if options.publish:
            print(publish(build_report(runs, options.title, options.project, options.entity, options.group)))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
