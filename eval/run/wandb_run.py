"""A run in Weights & Biases: a W&B run for each arm, all in one group. Offline unless
`tracker.mode=online`.

An error of W&B never stops the run.

part of a W&B run   contents
config              the run's config, identity and provenance, and the arm
history             after each visit of this job: examples done, score and speedups so far
per_example         a table, one row an example
summary             each row of the arm in the run's table as `<dataset, task or all>/<column>`,
                    with `_low` and `_high`
figures/<name>      the run's pictures; of the first arm only
artifact            type `run`: visits, run.json, summary.*, traces; of the first arm only
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.config import TrackerSettings
from eval.run.check import QUIET
from eval.store.record import Visit
from eval.store.results import Results
from eval.store.runs import StoredArm, StoredRun
from lazyllm.errors import reason_of

if TYPE_CHECKING:
    from eval.analysis.table import Table

log = logging.getLogger(__name__)

# Nothing of machine, user and command line, and no samples of the system, which would disturb the
# timing
SETTINGS: dict[str, Any] = {
    "host": "", "console": "off", "disable_git": True, "disable_code": True, "save_code": False,
    "symlink": False,
    "x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True,
    "x_save_requirements": False,
    "init_timeout": 15.0, "finish_timeout": 120.0, "finish_timeout_raises": True,
}  # fmt: skip


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """The method of a tracker, which does nothing without W&B, nor after the first call that
    fails.
    """

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
    """Shows an arm in W&B while that works. number: the arm's, from 0. sums: over this job's
    visits with its answer.
    """

    run: StoredRun
    arm: StoredArm
    number: int
    works: bool = True
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @_harmless
    def start(self, config: TrackerSettings) -> None:
        """Begin the W&B run."""
        os.environ |= QUIET | os.environ
        import wandb  # not at the top: only if it is used

        self._wandb, about = wandb, self.run.about
        values = about["config"] | {key: value for key, value in about.items() if key != "config"}
        values |= {"arm": self.arm.name, "setting": self.arm.label}
        self._run = wandb.init(
            dir=str(self.run.folder.absolute()),
            id=f"{about['fingerprint']}-{self.number}",  # so a resumed run has the same W&B runs
            name=f"{self.run.model}, {self.arm.name}",
            group=os.environ.get("WANDB_RUN_GROUP")
            or about["config"].get("label")
            or self.run.folder.name,
            job_type="run",
            config=json.loads(json.dumps(values, default=str)),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**SETTINGS),
            project=config.project,
            mode=config.mode,
        )
        self._run.define_metric("examples", hidden=True)
        self._run.define_metric("running/*", step_metric="examples")

    @_harmless
    def visit(self, visit: Visit) -> None:
        """Show a new visit: means and speedups over this job's visits so far, all with the same
        weight.
        """
        from eval.store.frame import numbers_of  # not at the top: it imports pandas

        answers = {label: numbers_of(visit, answer) for label, answer in visit.answers.items()}
        numbers, reference = answers.get(self.arm.name), answers.get(self.run.identity["baseline"])
        if numbers is None:
            return
        sums = self.sums
        sums["examples"] += 1
        for name in ("score", "pct_prompt_tokens_computed"):
            sums[name] += numbers[name]
        metrics = {
            name: sums[name] / sums["examples"] for name in ("score", "pct_prompt_tokens_computed")
        }
        for name, speedup in {"ttft_s": "ttft_speedup", "total_s": "generation_speedup"}.items():
            if reference is not None:
                sums[name] += numbers[name]
                sums[f"reference {name}"] += reference[name]
            if name in sums:
                metrics[speedup] = sums[f"reference {name}"] / sums[name]
        known = {f"running/{name}": value for name, value in metrics.items() if value == value}
        self._run.log({"examples": int(sums["examples"]), **known})

    @_harmless
    def finish(self, results: Results, table: Table, pictures: Sequence[Path]) -> None:
        """Show the arm's rows of the run's table, and every answer. results: of this run.
        pictures: PNG files.
        """
        from eval.analysis.run_table import row_name  # not at the top: it imports pandas

        rows: Any = table.frame[table.frame["method"] == row_name(self.arm)]
        named = rows.assign(name=rows["name"].where(rows["kind"] != "all", "all"))
        values = (
            named.drop(columns=["run", "kind", "task", "method"])
            .astype(object)
            .melt("name")
            .dropna()
        )
        self._run.summary.update(
            {f"{name}/{column}": value for name, column, value in values.itertuples(index=False)}
        )
        self._run.log({"per_example": self._per_example(results)})
        if self.number == 0:  # what belongs to all arms
            artifact, folder = (
                self._wandb.Artifact(f"run-{self.run.about['fingerprint']}", type="run"),
                self.run.folder,
            )
            for pattern in ("run.json", "visits*.jsonl*", "summary.*", "traces/*.json"):
                for file in folder.glob(pattern):
                    artifact.add_file(str(file), file.relative_to(folder).as_posix())
            self._run.log_artifact(artifact)
            for file in pictures:
                self._run.log({f"figures/{file.stem}": self._wandb.Image(str(file))})

    def _per_example(self, results: Results) -> Any:
        from eval.store.summary import match_baselines

        frame: Any = results.frame
        rows = frame[(frame["arm"] == self.arm.name) & frame["counts"]].drop(columns="token_s")
        pairs = list(results.answers(rows))
        gold = [" | ".join(visit.gold) for visit, _ in pairs]
        rows = rows.assign(gold=gold, answer=[answer.text for _, answer in pairs])
        rows.insert(5, "ttft_speedup", match_baselines(rows, frame)["ttft_s"] / rows["ttft_s"])
        cells: Any = rows.astype(object).where(rows.notna(), None)  # None without a baseline
        return self._wandb.Table(columns=list(cells), data=cells.to_numpy().tolist())

    @_harmless
    def close(self, exit_code: int) -> None:
        """End the W&B run."""
        self._run.finish(exit_code=exit_code)
        if self._run.offline:
            log.info(
                "W&B was offline; send it with  wandb sync %s",
                os.path.relpath(Path(self._run.dir).parent),
            )


@contextmanager
def open_trackers(config: TrackerSettings, run: StoredRun) -> Iterator[list[Tracker]]:
    """Trackers of the arms until the block ends; none without W&B. Files: `<run folder>/wandb`."""
    arms = run.arms.values() if config.name == "wandb" else ()
    trackers, exit_code = [Tracker(run, arm, number) for number, arm in enumerate(arms)], 1
    with ExitStack() as closed:
        for tracker in trackers:
            tracker.start(config)
            closed.callback(lambda tracker=tracker: tracker.close(exit_code))
        yield trackers
        exit_code = 0
