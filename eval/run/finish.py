"""The end of a run: its table and its pictures, in its folder, on the screen and in W&B."""

import logging
from collections.abc import Sequence
from pathlib import Path

from eval.analysis.run_table import run_json, run_table
from eval.analysis.table import console
from eval.run.prepare import Run
from eval.run.wandb_run import Tracker
from eval.store.results import Results
from eval.store.runs import StoredRun
from lazyllm.files import write_whole

log = logging.getLogger(__name__)

_NEXT = (
    "A first look at a checkpoint on LongBench, on a GPU:",
    "  python run.py model=llama2 method=lazy dataset=hotpotqa",
)


def finish(run: Run, stored: StoredRun, trackers: Sequence[Tracker], show: bool) -> None:
    """Write the run's table and its pictures into its folder, and show them in W&B. show: print
    the table too.
    """
    results, folder = Results([stored]), run.folder
    title = ", ".join([stored.model, run.title])
    table = run_table(results, title)
    write_whole(folder / "summary.json", run_json(table, {**run.about, "identity": run.identity}))
    write_whole(folder / "summary.csv", table.to_csv())
    write_whole(folder / "summary.md", table.to_page())
    pictures = list[Path]()
    if run.baseline is not None and len(run.arms) > 2:  # a picture compares methods
        from eval.analysis.picture import save_picture  # not at the top: it needs matplotlib

        pictures += save_picture(stored, table.frame, title, folder / "figures" / "methods")
    if run.config.tracker.name != "none":
        from eval.analysis.style import save
        from eval.analysis.table import figures
        from eval.report.content import content_of

        for picture in content_of(results, {}, figures()).pictures:
            pictures += save(picture.drawn, folder / "figures" / picture.name, ["png"])
    for tracker in trackers:
        tracker.finish(results, table, pictures)
    log.info("visits, summary.json, .csv and .md are in %s", folder)
    if show:
        screen = console()
        screen.print(table.to_rich(screen.width))
        lines = ["Files:", *(f"  {path}" for path in (folder / "summary.md", *pictures))]
        if _is_first_run(run):
            lines += _NEXT
        screen.print("\n".join(lines), highlight=False)


def _is_first_run(run: Run) -> bool:
    """Say whether it is a newcomer's `python run.py`: tiny, LazyLLM, embedded rows."""
    config, labels = run.config, [arm.label for arm in run.arms]
    return not config.dataset and config.model.name == "tiny" and labels == ["baseline", "lazy"]


def show_together(runs: Sequence[StoredRun]) -> None:
    """Print one table of a sweep's runs, each joined within itself."""
    screen = console()
    screen.print(run_table(Results(runs), "All runs of the sweep").to_rich(screen.width))
