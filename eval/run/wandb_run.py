"""A run in Weights & Biases. An error of the tracker never stops the run.

Everything is made from stored records, so a run that was stopped, or measured without a tracker, is shown in full if
the same command is given again with `tracker=wandb`.

part of a W&B run   contents
config              the run's config, identity and provenance; nothing of the environment, the machine or the user
history             after each example: examples done, running score and speedups
per_example         a table, one row an example
summary             each row of the run's table as `<dataset, task or all>/<column>`, with `_low` and `_high`
figures/<name>      the run's pictures
artifact            type `run`: records.jsonl, run.json, summary.*, traces

Without a key everything is written to <run folder>/wandb, and nothing is sent.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eval.analysis.table import Table
from eval.run.config import TrackerConfig
from eval.store.record import Record
from eval.store.runs import StoredRun, example_rows
from lazyllm.errors import reason_of

log = logging.getLogger(__name__)

SHARED_FILES = ("run.json", "records*.jsonl", "summary.*", "traces/*.json")  # of a run folder
# wandb.Settings: machine, user and command line are not recorded; system metrics are not sampled, as that would disturb
# the timing
SETTINGS: dict[str, Any] = {
    "host": "", "disable_git": True, "disable_code": True, "save_code": False, "symlink": False,
    "x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True, "x_save_requirements": False,
    "finish_timeout_raises": True,
}  # fmt: skip
# Settings unless the user has set the variable. Timeouts: seconds that a run waits for an unreachable server
UNLESS_SET: dict[str, tuple[str, Any]] = {
    "WANDB_CONSOLE": ("console", "off"),
    "WANDB_INIT_TIMEOUT": ("init_timeout", 15.0),
    "WANDB_FINISH_TIMEOUT": ("finish_timeout", 120.0),
}


@contextmanager
def open_tracker(config: TrackerConfig, run: StoredRun, group: str | None = None, part: str = "") -> Iterator[Tracker]:
    """The tracker of a run until the block ends. Its first error is logged as a warning; none is raised.

    run: its folder, identity and records so far. group: W&B's, if the config names none. part: the shard's; each job of
    a shared run is its own W&B run.
    """
    setting = run.label
    seed = f", seed {run.seed}" if "seed" in run.identity["method"] else ""
    about = run.about["config"] | {key: value for key, value in run.about.items() if key != "config"}
    with _open(
        config,
        run.folder,
        id=run.about["fingerprint"] + part,  # so a resumed run is one W&B run
        name=f"{run.model}, {setting}{seed}{part}",
        job_type="run",
        group=config.group or group,
        config=json.loads(json.dumps(about | {"setting": setting}, default=str)),
    ) as tracker:
        tracker.replay(run.records)
        yield tracker


def track_pictures(config: TrackerConfig, folder: Path, label: str, pictures: Sequence[Path]) -> None:
    """Show pictures of several runs, as a separate W&B run in the group of this label. Never raises.

    folder: W&B's files go to `folder`/wandb. pictures: only PNG files are shown.
    """
    name = f"{label}, figures"
    with _open(config, folder, name=name, job_type="figures", group=config.group or label, config={}) as tracker:
        tracker.show(pictures)


@contextmanager
def _open(config: TrackerConfig, folder: Path, /, **init: Any) -> Iterator[Tracker]:
    tracker = Tracker(folder)
    if config.name == "none" or config.mode == "disabled":
        yield tracker
        return
    place = folder.absolute() / "wandb"
    environment = {  # options without a setting; without ERROR_REPORTING=false wandb sends reports even if offline
        "WANDB_CACHE_DIR": str(place / "cache"), "WANDB_DATA_DIR": str(place / "data"),
        "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true",
    }  # fmt: skip
    ours = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(ours)
    exit_code = 1
    try:
        tracker.start(config, init)
        yield tracker
        exit_code = 0
    finally:
        tracker.close(exit_code)
        for name in ours:
            os.environ.pop(name, None)


def key_is_configured() -> bool:
    """Whether W&B has a key: in WANDB_API_KEY, or in the netrc file of `wandb login`.

    `wandb.login(prompt=False)` would contact the server.
    """
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(file).authenticators(urlsplit(wandb.setup().settings.base_url).netloc) is not None
    return False


class Tracker:
    """Shows a run in W&B. It does nothing before `start`, and nothing after the first call of W&B that fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Any = None
        self._sums: defaultdict[str, float] = defaultdict(float)

    def start(self, config: TrackerConfig, init: dict[str, Any]) -> None:
        """Begin a W&B run. init: arguments of `wandb.init`."""
        try:
            self._run = _start(config, self._folder, init)
        except Exception as error:
            self._give_up("starting", error)

    def replay(self, records: Sequence[Record]) -> None:
        """Count the records of an earlier call, and show them unless the server has them already."""
        rows = [self._count(record) for record in records]
        self._attempt("logging", lambda run: [run.log(row) for row in rows if not run.resumed])

    def record(self, record: Record) -> None:
        """Show a new record."""
        row = self._count(record)
        self._attempt("logging", lambda run: run.log(row))

    def finish(self, table: Table, records: Sequence[Record], pictures: Sequence[Path] = ()) -> None:
        """Show the whole run: its table, every example in the table, pictures (PNG), and the folder."""
        self._attempt("logging the summary", lambda run: run.summary.update(summary_keys(table)))
        self._attempt("logging the examples", lambda run: run.log({"per_example": _table(records)}))
        self.show(pictures)
        self._attempt("logging the run folder", lambda run: run.log_artifact(_artifact(run.id, self._folder)))

    def show(self, pictures: Sequence[Path]) -> None:
        """Show those pictures that are PNG files."""
        self._attempt("logging figures", lambda run: _log_pictures(run, pictures))

    def close(self, exit_code: int) -> None:
        """End the W&B run, if it has not ended."""

        def end(run: Any) -> None:
            offline = run.offline
            run.finish(exit_code=exit_code)
            if offline:
                log.info("W&B was offline; send this run with  wandb sync %s", _place(run))

        self._attempt("finishing", end)
        self._run = None

    def _attempt(self, what: str, action: Callable[[Any], Any]) -> None:
        """Call `action` with the W&B run, unless a call failed before."""
        try:
            if self._run is not None:
                action(self._run)
        except Exception as error:
            self._give_up(what, error)

    def _give_up(self, what: str, error: Exception) -> None:
        run, self._run = self._run, None
        sync = f", and so does  wandb sync {_place(run)}" if run is not None else ""
        advice = f"The run goes on without it; afterwards, the same command shows it in full{sync}"
        log.warning("W&B: %s failed (%s). %s", what, reason_of(error), advice)
        with suppress(Exception):
            if run is not None:
                run.finish(exit_code=1)

    def _count(self, record: Record) -> dict[str, float]:
        """Means and speedups over the examples so far, this one included, all with the same weight."""
        sums, baseline, turns = self._sums, record.baseline, record.by_turn
        sums["examples"] += 1
        for part, measured in ((part, getattr(turn, part)) for turn in turns for part in ("method", "baseline")):
            for name in ("score", "pct_prompt_tokens_computed", "ttft_s", "total_s") if measured else ():
                sums[f"{part}_{name}"] += getattr(measured, name) / len(turns)
        number = sums["examples"]
        shown = {
            "examples": number,
            "running/score": 100 * sums["method_score"] / number,
            "running/pct_prompt_tokens_computed": sums["method_pct_prompt_tokens_computed"] / number,
        }
        if baseline is None:
            return shown
        if record.method.kl is not None:  # None in older records
            sums["kl"] += sum(turn.method.kl or 0.0 for turn in turns) / len(turns)
            shown["running/kl"] = sums["kl"] / number
        return shown | {
            "running/baseline_score": 100 * sums["baseline_score"] / number,
            "running/ttft_speedup": sums["baseline_ttft_s"] / sums["method_ttft_s"],
            "running/generation_speedup": sums["baseline_total_s"] / sums["method_total_s"],
        }


def _start(config: TrackerConfig, folder: Path, init: dict[str, Any]) -> Any:
    """The W&B run, offline if the server is unreachable; None if the environment disables W&B."""
    import wandb  # not at the top: only if it is used

    set_by_user = wandb.setup().settings.mode  # by WANDB_MODE or `wandb offline`
    mode: Any = config.mode
    if mode == "auto":
        mode = {"dryrun": "offline", "offline": "offline", "disabled": "disabled"}.get(set_by_user, "online")
    if mode == "online" and not key_is_configured():
        mode = "offline"
        if config.mode == "online":
            log.warning("W&B: tracker.mode=online needs a key (WANDB_API_KEY, or `wandb login`): this run is offline")
    if mode == "disabled":
        log.info("W&B is disabled (WANDB_MODE); nothing is tracked")
        return None
    defaults = {"WANDB_DIR": ("root_dir", str(folder.absolute())), **UNLESS_SET}
    ours = dict(setting for variable, setting in defaults.items() if variable not in os.environ)
    init |= {"project": config.project, "entity": config.entity, "tags": config.tags, "resume": "allow"}
    init |= {"reinit": "create_new", "settings": wandb.Settings(**SETTINGS, **ours)}
    try:
        run = wandb.init(mode=mode, **init)
    except Exception as error:
        if mode == "offline":
            raise
        log.warning("W&B: not online (%s); this run is offline", reason_of(error))
        wandb.teardown()  # frees the run's id
        run = wandb.init(mode="offline", **init)
    if run.url and not run.offline:
        log.info("W&B: %s", run.url)
    run.define_metric("examples", hidden=True)
    run.define_metric("running/*", step_metric="examples")
    return run


def _place(run: Any) -> str:
    """The folder of a W&B run's files."""
    return os.path.relpath(Path(run.dir).parent)


def _log_pictures(run: Any, pictures: Sequence[Path]) -> None:
    import wandb

    shown = {f"figures/{file.stem}": wandb.Image(str(file)) for file in pictures if file.suffix == ".png"}
    if shown:
        run.log(shown)


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
