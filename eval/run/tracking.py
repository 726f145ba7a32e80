"""Weights & Biases beside a run: what is shown of it, and that no fault of the tracker reaches the run.

The store stays the truth. Everything here is made from records that already lie in it, so a run that was stopped, or
measured without a tracker, is shown whole when the same command is given again with `tracker=wandb`.

of a W&B run     what it holds
config           the run's config, identity and provenance (`public`: without secrets and the home folder's name)
history          after each example: examples done, running score and speedups
per_example      a table, one row an example
summary          each row of the run's table as `<dataset, task or all>/<column>`, with `_low` and `_high`
figures/<name>   the run's pictures
artifact         type `run`: records.jsonl, run.json, summary.*, traces

Without a key everything is written to <run folder>/wandb and nothing is asked or sent.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.paper.summary import Summary, flat
from eval.store.record import Record
from eval.store.results import StoredRun, label_of

log = logging.getLogger(__name__)

TRACKERS = ("none", "wandb")
MODES = ("auto", "online", "offline", "disabled")

INIT_TIMEOUT_S, FINISH_TIMEOUT_S = 15.0, 120.0  # how long an unreachable server may keep a run waiting
HIDDEN = "(not shared)"
SHARED_FILES = ("run.json", "records*.jsonl", "summary.*", "traces/*.json")  # of a run folder; no lock, no half file

_SECRET = re.compile(
    r"secret|passw|credential|api.?key|access.?key|private.?key|auth(?!or)|token(?!s|iz|_id)", re.IGNORECASE
)


@dataclass
class TrackerConfig:
    """name: none or wandb. project, entity, tags: W&B's; entity null is the key's own.

    group: what W&B lists together; null takes the experiment's label.
    mode: auto is online where a key is configured (WANDB_API_KEY, or `wandb login`) and WANDB_MODE does not say
    otherwise, else offline; or online, offline, disabled.
    """

    name: str = "none"
    project: str = "lazyllm-bench"
    entity: str | None = None
    group: str | None = None
    mode: str = "auto"
    tags: list[str] = field(default_factory=list)


class Tracker:
    """Shows a run while it goes on. This one shows nothing."""

    def record(self, record: Record) -> None:
        """Show an example that was measured just now."""

    def finish(self, summary: Summary, records: Sequence[Record], pictures: Sequence[Path] = ()) -> None:
        """Show the whole run: its table, every example that the table is made of, pictures (PNG), and the folder."""


@contextmanager
def open_tracker(config: TrackerConfig, run: StoredRun, group: str | None = None, part: str = "") -> Iterator[Tracker]:
    """The tracker of a run until the block ends. Whatever fails in it is warned of once; nothing is raised.

    run: the folder, what the run is, and the records that it already holds. group: W&B's, where the config names none.
    part: told apart by it, the jobs that share a run are W&B runs of their own.
    """
    setting = label_of(run.method, run.settings)
    seed = f", seed {run.seed}" if "seed" in run.identity["method"] else ""
    about = {**run.about["config"], "setting": setting}
    about |= {key: value for key, value in run.about.items() if key != "config"}
    with _open(
        config,
        run.folder,
        id=run.about["fingerprint"] + part,  # so that a run that goes on is one W&B run
        name=f"{run.model}, {setting}{seed}{part}",
        job_type="run",
        group=config.group or group,
        config=public(about),
    ) as tracker:
        if isinstance(tracker, _WandbTracker):
            tracker.replay(run.records)
        yield tracker


def track_pictures(config: TrackerConfig, folder: Path, label: str, pictures: Sequence[Path]) -> None:
    """Show pictures that are of several runs, as a W&B run of their own in the group of that label. Never raises.

    folder: where W&B's files go (`folder`/wandb). pictures: the PNG files among them are shown.
    """
    name = f"{label}, figures"
    with _open(config, folder, name=name, job_type="figures", group=config.group or label, config={}) as tracker:
        if isinstance(tracker, _WandbTracker):
            tracker.show(pictures)


def public(value: Any) -> Any:
    """The value as plain JSON that may be shown: no secret by its key's name, `~` for the home folder."""
    return _public(json.loads(json.dumps(value, default=str)), Path.home())


def _public(value: Any, home: Path) -> Any:
    if isinstance(value, dict):
        return {key: HIDDEN if one and _SECRET.search(key) else _public(one, home) for key, one in value.items()}
    if isinstance(value, list):
        return [_public(one, home) for one in value]
    if isinstance(value, str) and len(home.parts) > 1:
        return re.sub(rf"{re.escape(str(home))}(?=/|$)", "~", value)
    return value


# ---------------------------------------------------------------------------------------------------------------- W&B


@contextmanager
def _open(config: TrackerConfig, folder: Path, /, **init: Any) -> Iterator[Tracker]:
    if config.name == "none" or config.mode == "disabled":
        yield Tracker()
        return
    with _environment(folder):
        tracker = _WandbTracker(config, folder, init)
        try:
            yield tracker
        except BaseException:
            tracker.close(exit_code=1)
            raise
        tracker.close(exit_code=0)


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """W&B's own variables where the user has not set them: what it keeps lies below the folder, and it reports nothing.

    Without WANDB_ERROR_REPORTING=false wandb 0.31 calls home even when it is offline.
    """
    place = folder.absolute() / "wandb"
    ours = {
        "WANDB_CACHE_DIR": str(place / "cache"),
        "WANDB_DATA_DIR": str(place / "data"),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
    }
    ours = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _settings(folder: Path) -> dict[str, Any]:
    """wandb.Settings: the user's variables come first; the machine, its user and the command line are not recorded.

    No system metrics are sampled: that would take time from what is being timed.
    """
    unless_set = {  # variable: setting and our value
        "WANDB_CONSOLE": ("console", "off"),
        "WANDB_DIR": ("root_dir", str(folder.absolute())),
        "WANDB_INIT_TIMEOUT": ("init_timeout", INIT_TIMEOUT_S),
        "WANDB_FINISH_TIMEOUT": ("finish_timeout", FINISH_TIMEOUT_S),
    }
    return {
        **dict(ours for name, ours in unless_set.items() if name not in os.environ),
        "finish_timeout_raises": True,
        "symlink": False,
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "host": "",
        "x_disable_meta": True,
        "x_disable_machine_info": True,
        "x_disable_stats": True,
        "x_save_requirements": False,
    }


def key_is_configured() -> bool:
    """Whether W&B would find a key, without asking for one: WANDB_API_KEY, or what `wandb login` wrote.

    Raises wandb's AuthenticationError where it is none.
    """
    import wandb
    from wandb.sdk.lib import wbauth

    host = wandb.setup().settings.base_url
    key = wbauth.authenticate_session(host=host, source="lazyllm-bench", prompt=False, update_session=False)
    return key is not None


def _mode(wandb: Any, wanted: str) -> str:
    """online, offline or disabled. What is online has a key, so that W&B never asks for one."""
    configured = wandb.setup().settings.mode  # of WANDB_MODE and `wandb offline`, if the user has set them
    if wanted == "offline":
        return "offline"
    if wanted == "auto" and configured in ("offline", "dryrun", "disabled"):
        return "disabled" if configured == "disabled" else "offline"
    if key_is_configured():
        return "online"
    if wanted == "online":
        log.warning("W&B: tracker.mode=online needs a key (WANDB_API_KEY, or `wandb login`); this run is offline")
    return "offline"


class _WandbTracker(Tracker):
    """A W&B run. Every call of wandb goes through `_attempt`; after the first that fails no more are made."""

    def __init__(self, config: TrackerConfig, folder: Path, init: dict[str, Any]) -> None:
        self._folder = folder
        self._running = _Running()
        self._wandb: Any = None
        self._run: Any = None
        self._place = folder / "wandb"
        self._failed = False
        self._attempt("starting", lambda: self._start(config, init))

    def replay(self, records: Sequence[Record]) -> None:
        """Count what an earlier call measured; show it too, unless the server has it from that call."""
        metrics = [self._running.add(record) for record in records]
        if self._run is not None and not self._run.resumed:
            self._attempt("logging", lambda: [self._run.log(one) for one in metrics])

    def record(self, record: Record) -> None:
        metrics = self._running.add(record)
        self._attempt("logging", lambda: self._run.log(metrics))

    def finish(self, summary: Summary, records: Sequence[Record], pictures: Sequence[Path] = ()) -> None:
        self._attempt("logging the summary", lambda: self._run.summary.update(summary_keys(summary)))
        self._attempt("logging the examples", lambda: self._run.log({"per_example": self._table(records)}))
        self.show(pictures)
        self._attempt("logging the run folder", lambda: self._run.log_artifact(self._artifact()))

    def show(self, pictures: Sequence[Path]) -> None:
        shown = [picture for picture in pictures if picture.suffix == ".png"]
        if shown:
            self._attempt("logging figures", lambda: self._run.log(self._images(shown)))

    def close(self, exit_code: int) -> None:
        """End the W&B run, also one that failed on the way."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            offline = run.offline
            run.finish(exit_code=exit_code)
        except Exception as error:
            if not self._failed:
                log.warning("W&B: finishing failed (%s); send what was written with  wandb sync %s", error, self._place)
            return
        if offline:
            log.info("W&B was offline; send this run with  wandb sync %s", self._place)

    def _attempt(self, what: str, action: Callable[[], Any]) -> None:
        """Do it unless W&B has failed before. A tracker never stops a run: a fault is reported, and that is all."""
        if self._run is None and what != "starting":
            return
        try:
            action()
        except Exception as error:
            self._failed = True
            log.warning(
                "W&B: %s failed (%s: %s). The run goes on without it; when it is done, the same command shows it whole",
                what,
                *_said(error),
            )
            self.close(exit_code=1)

    def _start(self, config: TrackerConfig, init: dict[str, Any]) -> None:
        import wandb  # only where it is asked for

        self._wandb = wandb
        init |= {"project": config.project, "entity": config.entity, "tags": config.tags, "resume": "allow"}
        mode = config.mode
        try:
            mode = _mode(wandb, config.mode)
            if mode == "disabled":
                log.info("W&B is disabled (WANDB_MODE); nothing is tracked")
                return
            self._run = self._init(mode, init)
        except Exception as error:
            if mode == "offline":
                raise
            log.warning("W&B: not online (%s: %s); this run is offline", *_said(error))
            wandb.teardown()  # else the run's id counts as taken
            self._run = self._init("offline", init)
        self._place = _shown(Path(self._run.dir).parent)
        if mode == "online" and self._run.url:
            log.info("W&B: %s", self._run.url)
        self._run.define_metric("examples", hidden=True)
        self._run.define_metric("running/*", step_metric="examples")

    def _init(self, mode: str, init: dict[str, Any]) -> Any:
        settings = self._wandb.Settings(**_settings(self._folder))
        return self._wandb.init(mode=mode, reinit="create_new", settings=settings, **init)

    def _table(self, records: Sequence[Record]) -> Any:
        rows = [example_row(record) for record in records]
        return self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])

    def _images(self, pictures: Sequence[Path]) -> dict[str, Any]:
        return {f"figures/{picture.stem}": self._wandb.Image(str(picture)) for picture in pictures}

    def _artifact(self) -> Any:
        artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
        for file in sorted(file for pattern in SHARED_FILES for file in self._folder.glob(pattern)):
            name = file.relative_to(self._folder).as_posix()
            if file.suffix == ".json" and (shown := public(content := json.loads(file.read_text("utf-8")))) != content:
                with artifact.new_file(name, encoding="utf-8") as opened:
                    opened.write(json.dumps(shown, indent=2, sort_keys=True) + "\n")
            else:
                artifact.add_file(str(file), name)
        return artifact


def _said(error: Exception) -> tuple[str, str]:
    """An error's kind and text, in one line."""
    return type(error).__name__, " ".join(str(error).split())


def _shown(folder: Path) -> Path:
    folder = folder.absolute()
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


# ------------------------------------------------------------------------------------------------------- what is shown


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
    """An example's row of the table `per_example`. Scores 0 to 100; None where no baseline was run beside it."""
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
        for column, value in flat(row).items():
            if isinstance(value, (int, float)):
                keys[f"{name}/{column}"] = value
    return keys
