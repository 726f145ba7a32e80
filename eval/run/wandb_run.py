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
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.analysis.table import Table
from eval.run.config import QUIET, TrackerConfig
from eval.store.record import Record
from eval.store.runs import StoredRun, example_rows
from lazyllm.errors import reason_of

log = logging.getLogger(__name__)

# wandb.Settings: machine, user and command line are not recorded; system metrics are not sampled, as that would disturb
# the timing. Timeouts: seconds that a run waits for an unreachable server
SETTINGS: dict[str, Any] = {
    "host": "", "console": "off", "disable_git": True, "disable_code": True, "save_code": False, "symlink": False,
    "x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True, "x_save_requirements": False,
    "init_timeout": 15.0, "finish_timeout": 120.0, "finish_timeout_raises": True,
}  # fmt: skip


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """The method of a tracker, which does nothing without W&B, nor after the first call that fails."""

    def call(self: Tracker, *arguments: Any) -> None:
        try:
            if self.works:
                method(self, *arguments)
        except Exception as error:
            self.works = False
            log.warning("W&B failed (%s); the run goes on without it", reason_of(error))

    return call


@dataclass
class Tracker:
    """Shows a run in W&B, if it works. sums: of the columns of `example_rows` over this job's examples."""

    works: bool
    sums: Any = 0.0

    @_harmless
    def start(self, config: TrackerConfig, folder: Path, init: Mapping[str, Any]) -> None:
        """Begin the W&B run."""
        os.environ |= QUIET | os.environ
        import wandb  # not at the top: only if it is used

        self._wandb = wandb
        given: Any = {key: getattr(config, key) for key in ("project", "entity", "mode", "tags")}
        again: Any = {"resume": "allow", "reinit": "create_new", "settings": wandb.Settings(**SETTINGS)}
        self._run = wandb.init(dir=str(folder.absolute()), **given, **again, **init)
        self._run.define_metric("examples", hidden=True)
        self._run.define_metric("running/*", step_metric="examples")

    @_harmless
    def record(self, record: Record) -> None:
        """Show a new record: means and speedups over this job's examples so far, all with the same weight."""
        sums = self.sums = example_rows([record]).assign(examples=1).mean(numeric_only=True, skipna=False) + self.sums
        shown = sums[["score", "baseline_score", "pct_prompt_tokens_computed"]] / sums["examples"]
        shown["ttft_speedup"] = sums["baseline_ttft_s"] / sums["ttft_s"]
        shown["generation_speedup"] = sums["baseline_total_s"] / sums["total_s"]
        known = {f"running/{name}": float(value) for name, value in shown.dropna().items()}
        self._run.log({"examples": int(sums["examples"]), **known})

    @_harmless
    def finish(self, table: Table, records: Sequence[Record], pictures: Sequence[Path], folder: Path) -> None:
        """Show the whole run: its table, every turn in another, pictures (PNG), and the folder's files."""
        named = table.frame.assign(name=table.frame["name"].where(table.frame["kind"] != "all", "all"))
        values = named.drop(columns=["kind", "task"]).astype(object).melt("name").dropna()
        self._run.summary.update({f"{name}/{column}": value for name, column, value in values.itertuples(index=False)})
        turns = [turn for record in records for turn in record.by_turn]
        rows = example_rows(records).assign(
            gold=[" | ".join(turn.answers) for turn in turns],
            answer=[turn.method.text for turn in turns],
            baseline_answer=[turn.baseline and turn.baseline.text for turn in turns],
        )
        rows.insert(5, "ttft_speedup", rows["baseline_ttft_s"] / rows["ttft_s"])
        cells: Any = rows.astype(object).where(rows.notna(), None)  # None without a paired baseline
        self._run.log({"per_example": self._wandb.Table(columns=list(cells), data=cells.to_numpy().tolist())})
        artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
        for pattern in ("run.json", "records*.jsonl", "summary.*", "traces/*.json"):
            for file in folder.glob(pattern):
                artifact.add_file(str(file), file.relative_to(folder).as_posix())
        self._run.log_artifact(artifact)
        self.show(pictures)

    @_harmless
    def show(self, pictures: Sequence[Path]) -> None:
        """Show those pictures that are PNG files."""
        for file in (file for file in pictures if file.suffix == ".png"):
            self._run.log({f"figures/{file.stem}": self._wandb.Image(str(file))})

    @_harmless
    def close(self, exit_code: int) -> None:
        """End the W&B run."""
        self._run.finish(exit_code=exit_code)
        if self._run.offline:
            log.info("W&B was offline; send it with  wandb sync %s", os.path.relpath(Path(self._run.dir).parent))


@contextmanager
def open_tracker(config: TrackerConfig, folder: Path, /, **init: Any) -> Iterator[Tracker]:
    """A tracker until the block ends. W&B's files go to `folder`/wandb. init: further arguments of `wandb.init`."""
    tracker, exit_code = Tracker(config.name == "wandb"), 1
    tracker.start(config, folder, init)
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
