"""A run in Weights & Biases, offline unless `tracker.mode=online`. An error of W&B never stops the run.

part of a W&B run   contents
config              the run's config, identity and provenance; nothing of the environment, the machine or the user
history             after each example of this job: examples done, score and speedups so far
per_example         a table, one row a turn of each example
summary             each row of the run's table as `<dataset, task or all>/<column>`, with `_low` and `_high`
figures/<name>      the run's pictures
artifact            type `run`: records.jsonl, run.json, summary.*, traces
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eval.analysis.table import Table
from eval.run.config import TrackerConfig
from eval.store.record import Record
from eval.store.runs import StoredRun, example_rows
from lazyllm.errors import reason_of

log = logging.getLogger(__name__)

SHARED_FILES = ("run.json", "records*.jsonl", "summary.*", "traces/*.json")  # of a run folder
# wandb.Settings: machine, user and command line are not recorded; system metrics are not sampled, as that would disturb
# the timing. Timeouts: seconds that a run waits for an unreachable server
SETTINGS: dict[str, Any] = {
    "host": "", "console": "off", "disable_git": True, "disable_code": True, "save_code": False, "symlink": False,
    "x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True, "x_save_requirements": False,
    "init_timeout": 15.0, "finish_timeout": 120.0, "finish_timeout_raises": True,
}  # fmt: skip


class Tracker:
    """Shows a run in W&B; without one it does nothing, nor after the first call of W&B that fails.

    folder: W&B's files go to `folder`/wandb. init: further arguments of `wandb.init`.
    """

    def __init__(self, config: TrackerConfig, folder: Path, init: Mapping[str, Any]) -> None:
        self._wandb: Any = None
        self._run: Any = None
        self._sums: Any = 0.0  # of the columns of `example_rows`, mean over an example's turns
        self._works, self._examples = config.name == "wandb", 0
        self._attempt(lambda _: self._start(config, folder, init))

    def _start(self, config: TrackerConfig, folder: Path, init: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # has no setting; W&B reports even if offline
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # not at the top: only if it is used

        self._wandb = wandb
        mode: Any = config.mode
        place = {"project": config.project, "entity": config.entity, "dir": str(folder.absolute())}
        again: Any = {"resume": "allow", "reinit": "create_new", "settings": wandb.Settings(**SETTINGS)}
        self._run = wandb.init(mode=mode, tags=config.tags, **place, **again, **init)
        self._run.define_metric("examples", hidden=True)
        self._run.define_metric("running/*", step_metric="examples")

    def _attempt(self, action: Callable[[Any], Any]) -> None:
        """Call `action` with the W&B run, unless a call failed before."""
        try:
            if self._works:
                action(self._run)
        except Exception as error:
            self._works = False
            log.warning("W&B failed (%s); the run goes on without it", reason_of(error))

    def record(self, record: Record) -> None:
        """Show a new record: means and speedups over this job's examples so far, all with the same weight."""
        if not self._works:  # most runs: rows cost milliseconds
            return
        self._examples += 1
        sums = self._sums = example_rows([record]).mean(numeric_only=True, skipna=False) + self._sums
        shown = {
            **{name: sums[name] / self._examples for name in ("score", "baseline_score", "pct_prompt_tokens_computed")},
            "ttft_speedup": sums["baseline_ttft_s"] / sums["ttft_s"],
            "generation_speedup": sums["baseline_total_s"] / sums["total_s"],
        }
        known = {f"running/{name}": float(value) for name, value in shown.items() if not math.isnan(value)}
        self._attempt(lambda run: run.log({"examples": self._examples, **known}))

    def finish(self, table: Table, records: Sequence[Record], pictures: Sequence[Path], folder: Path) -> None:
        """Show the whole run: its table, every example in the table, pictures (PNG), and the folder's files."""
        self._attempt(lambda run: run.summary.update(summary_keys(table)))
        self._attempt(lambda run: run.log({"per_example": _table(records)}))
        self.show(pictures)
        self._attempt(lambda run: run.log_artifact(_artifact(run.id, folder)))

    def show(self, pictures: Sequence[Path]) -> None:
        """Show those pictures that are PNG files."""
        for file in (file for file in pictures if file.suffix == ".png"):
            self._attempt(lambda run, file=file: run.log({f"figures/{file.stem}": self._wandb.Image(str(file))}))

    def close(self, exit_code: int) -> None:
        """End the W&B run."""
        self._attempt(lambda run: run.finish(exit_code=exit_code))
        if self._works and self._run.offline:
            log.info("W&B was offline; send it with  wandb sync %s", os.path.relpath(Path(self._run.dir).parent))


@contextmanager
def open_tracker(config: TrackerConfig, folder: Path, /, **init: Any) -> Iterator[Tracker]:
    """A tracker until the block ends. Arguments: as of `Tracker`."""
    tracker, exit_code = Tracker(config, folder, init), 1
    try:
        yield tracker
        exit_code = 0
    finally:
        tracker.close(exit_code)


def facts_of(run: StoredRun, part: str = "") -> dict[str, Any]:
    """The arguments of `wandb.init` for a run. part: the shard's; each job of a shared run is its own W&B run."""
    seed = f", seed {run.seed}" if "seed" in run.identity["method"] else ""
    about = run.about["config"] | {key: value for key, value in run.about.items() if key != "config"}
    return {
        "id": run.about["fingerprint"] + part,  # so a resumed run is one W&B run
        "name": f"{run.model}, {run.label}{seed}{part}",
        "job_type": "run",
        "config": json.loads(json.dumps(about | {"setting": run.label}, default=str)),
    }


def _table(records: Sequence[Record]) -> Any:
    """One row a turn: the columns of `example_rows`, and the answers. A cell is None without a paired baseline."""
    import wandb

    turns = [turn for record in records for turn in record.by_turn]
    frame = example_rows(records).assign(
        gold=[" | ".join(turn.answers) for turn in turns],
        answer=[turn.method.text for turn in turns],
        baseline_answer=[turn.baseline and turn.baseline.text for turn in turns],
    )
    frame.insert(5, "ttft_speedup", frame["baseline_ttft_s"] / frame["ttft_s"])
    frame = frame.astype(object).where(frame.notna(), None)
    return wandb.Table(columns=list(frame), data=frame.to_numpy().tolist())


def _artifact(name: str, folder: Path) -> Any:
    import wandb

    artifact = wandb.Artifact(f"run-{name}", type="run")
    for file in sorted(file for pattern in SHARED_FILES for file in folder.glob(pattern)):
        artifact.add_file(str(file), file.relative_to(folder).as_posix())
    return artifact


def summary_keys(table: Table) -> dict[str, float | int]:
    """{key: number} of the table: `multi_doc_qa/score`, its interval as `_low` and `_high`; `all/` is the mean."""
    rows = table.frame.assign(name=table.frame["name"].where(table.frame["kind"] != "all", "all"))
    values = rows.drop(columns=["kind", "task"]).set_index("name").to_dict("index")
    return {
        f"{name}/{column}": value for name, row in values.items() for column, value in row.items() if value == value
    }
