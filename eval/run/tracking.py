"""Weights & Biases beside a run: what is shown of it. No fault of the tracker stops the run.

The store stays the truth. Everything shown is made from stored records, so a run that was stopped, or measured without
a tracker, is shown whole when the same command is given again with `tracker=wandb`.

part of a W&B run   what it holds
config              the run's config, identity and provenance; nothing of the environment, the machine or the user
history             after each example: examples done, running score and speedups
per_example         a table, one row an example
summary             each row of the run's table as `<dataset, task or all>/<column>`, with `_low` and `_high`
figures/<name>      the run's pictures
artifact            type `run`: records.jsonl, run.json, summary.*, traces

Without a key everything is written to <run folder>/wandb, and nothing is asked or sent.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eval.paper.summary import Summary, flat
from eval.run.config import TrackerConfig
from eval.store.record import Record
from eval.store.results import StoredRun, label_of

log = logging.getLogger(__name__)

SHARED_FILES = ("run.json", "records*.jsonl", "summary.*", "traces/*.json")  # of a run folder
# wandb.Settings: neither the machine, its user nor the command line is recorded, and no system metrics are sampled,
# which would take time from what is being timed
SETTINGS: dict[str, Any] = {
    "host": "", "disable_git": True, "disable_code": True, "save_code": False, "symlink": False,
    "x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True, "x_save_requirements": False,
    "finish_timeout_raises": True,
}  # fmt: skip
# Our settings if the user has not set the variable. Timeouts: seconds that an unreachable server may keep a run waiting
UNLESS_SET = {
    "WANDB_CONSOLE": {"console": "off"},
    "WANDB_INIT_TIMEOUT": {"init_timeout": 15.0},
    "WANDB_FINISH_TIMEOUT": {"finish_timeout": 120.0},
}


class Tracker:
    """Shows a run while it goes on. This one shows nothing."""

    def record(self, record: Record) -> None:
        """Show an example that was measured just now."""

    def finish(self, summary: Summary, records: Sequence[Record], pictures: Sequence[Path] = ()) -> None:
        """Show the whole run: its table, every example in the table, pictures (PNG), and the folder."""


@contextmanager
def open_tracker(config: TrackerConfig, run: StoredRun, group: str | None = None, part: str = "") -> Iterator[Tracker]:
    """The tracker of a run until the block ends. A fault in it is logged as a warning, once; none is raised.

    run: the folder, what the run is, and the records that it already holds. group: W&B's, if the config names none.
    part: the shard's; the jobs that share a run are W&B runs of their own.
    """
    setting = label_of(run.method, run.settings)
    seed = f", seed {run.seed}" if "seed" in run.identity["method"] else ""
    about = run.about["config"] | {key: value for key, value in run.about.items() if key != "config"}
    with _open(
        config,
        run.folder,
        id=run.about["fingerprint"] + part,  # a run that goes on is one W&B run
        name=f"{run.model}, {setting}{seed}{part}",
        job_type="run",
        group=config.group or group,
        config=json.loads(json.dumps(about | {"setting": setting}, default=str)),
    ) as tracker:
        if isinstance(tracker, _Wandb):
            tracker.replay(run.records)
        yield tracker


def track_pictures(config: TrackerConfig, folder: Path, label: str, pictures: Sequence[Path]) -> None:
    """Show pictures of several runs, as a W&B run of their own in the group of that label. Never raises.

    folder: W&B's files go to `folder`/wandb. pictures: only PNG files are shown.
    """
    name = f"{label}, figures"
    with _open(config, folder, name=name, job_type="figures", group=config.group or label, config={}) as tracker:
        if isinstance(tracker, _Wandb):
            tracker.show(pictures)


@contextmanager
def _open(config: TrackerConfig, folder: Path, /, **init: Any) -> Iterator[Tracker]:
    if config.name == "none" or config.mode == "disabled":
        yield Tracker()
        return
    place = folder.absolute() / "wandb"
    environment = {  # what has no setting; without ERROR_REPORTING=false wandb calls home even if it is offline
        "WANDB_CACHE_DIR": str(place / "cache"), "WANDB_DATA_DIR": str(place / "data"),
        "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true",
    }  # fmt: skip
    ours = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(ours)
    tracker = _Wandb(folder)
    try:
        tracker.start(config, init)
        yield tracker
    except BaseException:
        tracker.close(exit_code=1)
        raise
    finally:
        tracker.close(exit_code=0)
        for name in ours:
            os.environ.pop(name, None)


def key_is_configured() -> bool:
    """Whether W&B has a key: in WANDB_API_KEY, or in the netrc file, where `wandb login` writes it.

    `wandb.login(prompt=False)` would ask the server about it.
    """
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(file).authenticators(urlsplit(wandb.setup().settings.base_url).netloc) is not None
    return False


class _Wandb(Tracker):
    """A W&B run. After the first call that fails no more are made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = _Running()
        self._wandb: Any = None
        self._run: Any = None

    def start(self, config: TrackerConfig, init: dict[str, Any]) -> None:
        try:
            self._run = self._start(config, init)
        except Exception as error:
            self._give_up("starting", error)

    def _start(self, config: TrackerConfig, init: dict[str, Any]) -> Any:
        import wandb  # not at the top: only if it is asked for

        self._wandb = wandb
        set_by_user = wandb.setup().settings.mode  # by WANDB_MODE or `wandb offline`
        mode: Any = config.mode
        if mode == "auto":
            mode = {"dryrun": "offline", "offline": "offline", "disabled": "disabled"}.get(set_by_user, "online")
        if mode == "online" and not key_is_configured():
            mode = "offline"
            if config.mode == "online":
                log.warning("W&B: tracker.mode=online needs a key (WANDB_API_KEY, or `wandb login`): this is offline")
        if mode == "disabled":
            log.info("W&B is disabled (WANDB_MODE); nothing is tracked")
            return None
        settings = {"WANDB_DIR": {"root_dir": str(self._folder.absolute())}, **UNLESS_SET}
        ours = {key: value for name, one in settings.items() if name not in os.environ for key, value in one.items()}
        init |= {"project": config.project, "entity": config.entity, "tags": config.tags, "resume": "allow"}
        init |= {"reinit": "create_new", "settings": wandb.Settings(**SETTINGS, **ours)}
        try:
            run = wandb.init(mode=mode, **init)
        except Exception as error:
            if mode == "offline":
                raise
            log.warning("W&B: not online (%s); this run is offline", _said(error))
            wandb.teardown()  # else the run's id counts as taken
            run = wandb.init(mode="offline", **init)
        if run.url and not run.offline:
            log.info("W&B: %s", run.url)
        run.define_metric("examples", hidden=True)
        run.define_metric("running/*", step_metric="examples")
        return run

    def replay(self, records: Sequence[Record]) -> None:
        """Count what an earlier call measured; show it too, unless the server has it from that call."""
        metrics = [self._running.add(record) for record in records]
        if self._run is not None and not self._run.resumed:
            self._attempt("logging", lambda run: [run.log(row) for row in metrics])

    def record(self, record: Record) -> None:
        metrics = self._running.add(record)
        self._attempt("logging", lambda run: run.log(metrics))

    def finish(self, summary: Summary, records: Sequence[Record], pictures: Sequence[Path] = ()) -> None:
        self._attempt("logging the summary", lambda run: run.summary.update(summary_keys(summary)))
        self._attempt("logging the examples", lambda run: run.log({"per_example": self._table(records)}))
        self.show(pictures)
        self._attempt("logging the run folder", lambda run: run.log_artifact(self._artifact(run)))

    def show(self, pictures: Sequence[Path]) -> None:
        shown = [picture for picture in pictures if picture.suffix == ".png"]
        if shown:
            self._attempt("logging figures", lambda run: run.log(self._images(shown)))

    def close(self, exit_code: int) -> None:
        """End the W&B run, if it has not ended."""
        run, self._run = self._run, None
        if run is None:
            return
        place = Path(run.dir).parent
        place = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
        try:
            offline = run.offline
            run.finish(exit_code=exit_code)
        except Exception as error:
            log.warning("W&B: finishing failed (%s); send what was written with  wandb sync %s", _said(error), place)
            return
        if offline:
            log.info("W&B was offline; send this run with  wandb sync %s", place)

    def _attempt(self, what: str, action: Callable[[Any], Any]) -> None:
        """Do something with the W&B run, unless it has failed before."""
        try:
            if self._run is not None:
                action(self._run)
        except Exception as error:
            self._give_up(what, error)

    def _give_up(self, what: str, error: Exception) -> None:
        log.warning(
            "W&B: %s failed (%s). The run goes on without it; when it is done, the same command shows it whole",
            what,
            _said(error),
        )
        run, self._run = self._run, None
        with suppress(Exception):
            if run is not None:
                run.finish(exit_code=1)

    def _images(self, pictures: Sequence[Path]) -> dict[str, Any]:
        return {f"figures/{picture.stem}": self._wandb.Image(str(picture)) for picture in pictures}

    def _table(self, records: Sequence[Record]) -> Any:
        rows = [example_row(record) for record in records]
        return self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])

    def _artifact(self, run: Any) -> Any:
        artifact = self._wandb.Artifact(f"run-{run.id}", type="run")
        for file in sorted(file for pattern in SHARED_FILES for file in self._folder.glob(pattern)):
            artifact.add_file(str(file), file.relative_to(self._folder).as_posix())
        return artifact


def _said(error: Exception) -> str:
    """An error's kind and text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _Running:
    """Means and speedups over the examples so far, every example counting the same."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def add(self, record: Record) -> dict[str, float]:
        sums, method, baseline = self._sums, record.method, record.baseline
        sums.update(examples=1)  # type: ignore[call-arg]
        for name in ("score", "pct_prompt_tokens_computed", "ttft_s", "total_s"):
            sums[name] += getattr(method, name)
        shown = {
            "examples": sums["examples"],
            "running/score": 100 * sums["score"] / sums["examples"],
            "running/pct_prompt_tokens_computed": sums["pct_prompt_tokens_computed"] / sums["examples"],
        }
        if baseline is None:
            return shown
        for name in ("score", "ttft_s", "total_s"):
            sums[f"baseline_{name}"] += getattr(baseline, name)
        return shown | {
            "running/baseline_score": 100 * sums["baseline_score"] / sums["examples"],
            "running/ttft_speedup": sums["baseline_ttft_s"] / sums["ttft_s"],
            "running/generation_speedup": sums["baseline_total_s"] / sums["total_s"],
        }


def example_row(record: Record) -> dict[str, Any]:
    """An example's row of the table `per_example`. Scores 0 to 100; None if no baseline was run beside it."""
    method, baseline = record.method, record.baseline
    return {
        "dataset": record.dataset,
        "id": record.id,
        "prompt_tokens": record.prompt_tokens,
        "score": 100 * method.score,
        "baseline_score": None if baseline is None else 100 * baseline.score,
        "ttft_s": method.ttft_s,
        "ttft_speedup": None if baseline is None else baseline.ttft_s / method.ttft_s,
        "total_s": method.total_s,
        "pct_prompt_tokens_computed": method.pct_prompt_tokens_computed,
        "kv_bytes": method.kv_bytes,
        "aux_bytes": method.aux_bytes,
        "gold": " | ".join(record.answers),
        "answer": method.text,
        "baseline_answer": None if baseline is None else baseline.text,
    }


def summary_keys(summary: Summary) -> dict[str, float | int]:
    """Every number of the table: `multi_doc_qa/score`, its interval as `_low` and `_high`; `all/` is the mean."""
    keys = {}
    for row in summary.rows:
        name = "all" if row.kind == "all" else row.name
        keys |= {f"{name}/{column}": value for column, value in flat(row).items() if isinstance(value, (int, float))}
    return keys
