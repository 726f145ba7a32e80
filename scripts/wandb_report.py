"""A W&B Report of runs tracked with `tracker=wandb`: tables, scores and speedups by task, runs side by side.

python -m scripts.wandb_report runs --out report.json                      the spec as a file, offline
python -m scripts.wandb_report runs --publish --entity NAME                the report in project lazyllm-bench
python -m scripts.wandb_report --group table1 --publish --entity NAME      of a project's runs, without local records

The report's tables are made from the records of the given runs; its panels show these runs only, found in W&B by
fingerprint. Needs the extra wandb-report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.benchmarks.datasets import DATASETS, TASKS
from eval.store.results import Results
from eval.store.runs import StoredRun
from lazyllm.errors import UserError
from lazyllm.files import write_whole

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import Report

# (column of a run's summary by task, heading)
COLUMNS = (
    ("score", "score (0 to 100)"),
    ("ttft_speedup", "TTFT speedup"),
    ("generation_speedup", "generation speedup"),
    ("pct_prompt_tokens_computed", "% of prompt tokens computed"),
    ("kv_bytes", "KV cache (bytes)"),
    ("aux_bytes", "Aux Cache (bytes)"),
)
RUNNING = (("running/score", "score so far"), ("running/ttft_speedup", "TTFT speedup so far"))
WIDTH, HEIGHT = 24, 8  # in W&B's grid: of a whole line, and of a panel


def build_report(results: Results, title: str, project: str, entity: str = "", group: str | None = None) -> Report:
    """The report. Without runs: panels for all tasks, of the project's runs or of a group.

    entity: "" offline; otherwise W&B looks the project up. Raises UserError without the extra, or if two runs measured
    the same.
    """
    try:
        import wandb_workspaces.reports.v2 as library
    except ImportError as error:
        raise UserError(f"{error}: install the extra, pip install 'lazyllm-bench[wandb-report]'") from error
    wr: Any = library
    runset: dict[str, Any] = {"entity": entity, "project": project} if entity else {}
    runsets = [wr.Runset(name="runs", filters=_filter(results, group), **runset)]
    tasks = _tasks(results)
    means = ["all"] if len(tasks) > 1 else tasks

    places = [
        wr.Layout(x=number % 2 * WIDTH // 2, y=number // 2 * HEIGHT, w=WIDTH // 2, h=HEIGHT)
        for number in range(len(COLUMNS))
    ]
    wide, below = (wr.Layout(x=0, y=y, w=WIDTH, h=2 * HEIGHT) for y in (0, HEIGHT))

    def panels(*shown: Any) -> Any:
        return wr.PanelGrid(runsets=runsets, panels=list(shown))

    blocks = [wr.P(_introduction(results, group)), wr.TableOfContents()]
    if results.runs:
        blocks += [wr.H1("Tables"), *(wr.MarkdownBlock(text) for text in _tables(results))]
    blocks.append(wr.H1("Score against speed"))
    for task in means:
        x, y = (wr.SummaryMetric(f"{task}/{column}") for column in ("ttft_speedup", "score"))
        title_of = f"{_name(task)}: score against TTFT speedup"
        blocks.append(panels(wr.ScatterPlot(title=title_of, x=x, y=y, layout=wide)))
    blocks.append(wr.H1("By task"))
    for task in dict.fromkeys([*tasks, *means]):
        bars = (
            wr.BarPlot(title=f"{_name(task)}: {heading}", metrics=[f"{task}/{column}"], layout=place)
            for (column, heading), place in zip(COLUMNS, places, strict=True)
        )
        blocks += [wr.H2(_name(task)), panels(*bars)]
    curves = (
        wr.LinePlot(title=heading, x="examples", y=[key], title_x="examples", layout=place)
        for (key, heading), place in zip(RUNNING, places, strict=False)
    )
    blocks += [
        wr.H1("Run by run"),
        wr.P("Settings that differ, and score and speedup over the measured examples."),
        panels(*curves, wr.RunComparer(diff_only="split", layout=below)),
        wr.H1("Examples"),
        panels(wr.WeavePanelSummaryTable(table_name="per_example", layout=wide)),
    ]
    return wr.Report(project=project, entity=entity, title=title, width="fluid", blocks=blocks)


def spec(report: Report) -> str:
    """The report as JSON for W&B."""
    return report._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"


def publish(report: Report) -> str:
    """Save the report in its project; returns its address. Raises UserError if W&B refuses it."""
    try:
        report.save()
    except Exception as error:  # no network, no such project, no permission: many types
        raise UserError(f"W&B refused the report ({type(error).__name__}: {error})") from error
    return report.url


def _name(task: str) -> str:
    return "mean over tasks" if task == "all" else task


def _filter(results: Results, group: str | None) -> str:
    """W&B's filter for the runs of the panels."""
    parts = ["Metric('JobType') = 'run'"]
    if results.runs:
        parts.append(f"Config('fingerprint') in {[run.about['fingerprint'] for run in results.runs]}")
    if group is not None:
        parts.append(f"Metric('Group') = {group!r}")
    return " and ".join(parts)


def _tasks(results: Results) -> list[str]:
    """The tasks of the runs, in the tables' order; all tasks without runs."""
    there = {DATASETS[name].task for run in results.runs for name in run.datasets}
    return [task for task in TASKS if task in there or not there]


def _introduction(results: Results, group: str | None) -> str:
    runs = results.runs
    if not runs:
        return f"Runs of {'the project' if group is None else f'group {group}'}, as W&B has them."
    examples = len({key for run in runs for key in run.keys})
    commits = _listed(run.about.get("provenance", {}).get("git_commit") or "unknown" for run in runs)
    return (
        f"{len(runs)} runs of {_listed(run.model for run in runs)} on {examples} examples; "
        f"device: {_listed(run.identity['device'] for run in runs)}; commit: {commits}. "
        "Speedups are over the paired baseline of each example."
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _tables(results: Results) -> list[str]:
    """A table in Markdown for each model: every setting on every task."""
    from eval.analysis.run_table import compared_table  # not at the top: pandas is slow to import

    models: dict[str, dict[tuple[str, int], list[StoredRun]]] = {}
    for run in results.runs:
        models.setdefault(run.model, {}).setdefault((run.label, run.seed), []).append(run)
    tables = []
    for model, settings in models.items():
        seeds = Counter(label for label, _ in settings)
        named = {
            f"{label}, seed {seed}" if seeds[label] > 1 else label: Results(runs)
            for (label, seed), runs in settings.items()
        }
        tables.append(compared_table(named, model).to_markdown())
    return tables


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 with one message on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.wandb_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs; none: all runs of the project")
    parser.add_argument("--out", type=Path, help="write the report's spec to this file, offline")
    parser.add_argument("--publish", action="store_true", help="save the report in W&B; needs a key and --entity")
    parser.add_argument("--project", default=os.environ.get("WANDB_PROJECT", "lazyllm-bench"))
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY"), help="the user or team of the project")
    parser.add_argument("--group", help="only runs of this group: the label of a comparison or a sweep")
    parser.add_argument("--title", default="LazyLLM on LongBench")
    options = parser.parse_args(argv)
    try:
        if not options.out and not options.publish:
            raise UserError("give --out FILE for the spec, or --publish")
        if options.publish and not options.entity:
            raise UserError("--publish needs --entity NAME (or WANDB_ENTITY): the user or team of the project")
        if options.publish:
            import wandb  # not at the top: slow to import

            if not wandb.login(prompt=False):
                raise UserError("--publish needs a key: WANDB_API_KEY, or `wandb login`. Offline: --out FILE")
        results = Results.read(options.runs) if options.runs else Results([])
        if options.out:
            write_whole(options.out, spec(build_report(results, options.title, options.project, group=options.group)))
            print(options.out)
        if options.publish:
            print(publish(build_report(results, options.title, options.project, options.entity, options.group)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
