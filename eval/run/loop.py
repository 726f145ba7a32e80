"""The run: config in, records and a table out."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from eval.paper.summary import Summary, compared_table, summarise, summary_table, to_json
from eval.run import device_lock, provenance
from eval.run.config import DEFAULT_LABEL, RunConfig, model_spec
from eval.run.measure import Bench, Case
from eval.run.plan import Plan, check_comparison, prepare
from eval.run.progress import progress
from eval.run.tracing import trace
from eval.run.tracking import Tracker, open_tracker, track_pictures
from eval.store.folder import RunStore, open_store, read_about, write_whole
from eval.store.record import Failure, Record
from eval.store.results import PLANNED, Results, StoredRun, planned_text
from eval.store.trace import Trace
from lazyllm.engine.devices import devices_of, read_clock, release_memory
from lazyllm.errors import UserError
from lazyllm.models.load import load_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """A finished run: where its files are, and its table; None while other shards have examples to measure."""

    folder: Path
    summary: Summary | None


def run(config: RunConfig, show: bool = True) -> RunResult:
    """Measure every example that the run folder does not hold yet, then summarise all of the run's examples.

    show: print the table.

    Everything that can be refused is refused before the model loads. Raises UserError,
    UserError with one message for the user.
    """
    plan = prepare(config)
    part = plan.file_part
    with open_store(plan.folder, plan.identity, plan.about, part) as store:
        _check_prompts(plan.cases, store)
        store.write(PLANNED, planned_text(case.key for case in plan.cases))
        group = config.label if config.label != DEFAULT_LABEL else None
        stored = StoredRun(plan.folder, store.about, list(store.records.values()))
        with open_tracker(config.tracker, stored, group, part) as tracker:
            _measure_missing(plan, store, tracker)
            store.reload()
            summary = _summarise(plan, store)
            if summary is not None:
                records = [store.records[case.key] for case in plan.cases if case.key in store.records]
                tracker.finish(summary, records, [] if config.tracker.name == "none" else _pictures(plan.folder))
    if summary is not None and show:
        _console().print(summary_table(summary, plan.title).to_rich())
    if plan.skipped:
        log.warning("%s", plan.skipped)
    return RunResult(plan.folder, summary)


def compare(config: RunConfig) -> list[RunResult]:
    """Run each method of `config.compare`, then print one table of them all; `runs/<label>-<model>.*` hold it too.

    With `config.only` that method alone is run, as any other run. Same errors as `run`.
    """
    if config.only is not None:
        return [run(replace(config, method=config.compare[config.only], compare={}))]
    from eval.paper.figures import (  # not at the top: matplotlib is slow to import, and writes caches
        plot_comparison,
        save,
    )

    check_comparison(config)
    results = {label: run(replace(config, method=method), show=False) for label, method in config.compare.items()}
    # every run has its table: shards are refused beside compare
    summaries = {label: result.summary for label, result in results.items() if result.summary is not None}
    console = _console()
    title = config.label if config.half is None else f"{config.label}, {config.half} half"
    table = compared_table(summaries, title)
    console.print(table.to_rich())
    runs = {label: read_about(result.folder / "run.json") for label, result in results.items()}
    texts = {
        "md": table.to_markdown(),
        "csv": table.to_csv(),
        "json": json.dumps({"config": asdict(config), "runs": runs}, indent=2, sort_keys=True, default=str) + "\n",
    }
    model = Path(config.model.name).name
    stem = Path("runs") / f"{config.label}-{model}"
    for suffix, text in texts.items():
        write_whole(Path(f"{stem}.{suffix}"), text)
    methods = {label: method["name"] for label, method in config.compare.items()}
    pictures = save(plot_comparison(table.frame, f"{model}, {title}", methods), stem)
    track_pictures(config.tracker, Path("runs"), config.label, pictures)
    console.print("Files:")
    for path in (*(result.folder for result in results.values()), Path(f"{stem}.md"), *pictures):
        console.print(f"  {path}", highlight=False)
    if config.model.name == "tiny":
        console.print("The same on a checkpoint and LongBench, on a GPU:", highlight=False)
        console.print("  python run.py model=llama2 method=lazy dataset=hotpotqa", highlight=False)
    return list(results.values())


# --------------------------------------------------------------------------------------------------------- measurement


def _trace_file(case: Case) -> str:
    return f"traces/{Trace.file_name(case.dataset.name, case.example.id)}"


def _check_prompts(cases: list[Case], store: RunStore) -> None:
    """Raise UserError where the store holds another prompt of an example than the one that is built now."""
    for case in cases:
        record = store.records.get(case.key)
        if record is not None and record.prompt_sha256 != case.prompt.sha256:
            raise UserError(
                f"{store.folder}: holds {case.dataset.name}, row {case.example.id}, with another prompt than the one "
                "built now; give another folder with out=FOLDER"
            )


@contextmanager
def _noted(store: RunStore, used: tuple[torch.device, ...], examples: int) -> Iterator[None]:
    """Write down when a job begins and ends to measure, why it ended early, and the machine's load at both times."""

    def end(error: str | None) -> None:
        store.note({"event": "end", "time": provenance.now(), "error": error, "load": device_lock.load(*used)})

    begin = {"event": "begin", "time": provenance.now(), "host": socket.gethostname(), "process": os.getpid()}
    store.note({**begin, "examples": examples, "load": device_lock.load(*used)})
    try:
        yield
    except BaseException as caught:
        try:
            end(f"{type(caught).__name__}: {caught}")
        except UserError as error:  # a full disk, say: what ended the job is what the user must hear
            log.warning("%s", error)
        raise
    end(None)


def load_model(config: RunConfig) -> PreTrainedModel:
    """The model that a config names, as its run measures it. Raises as `lazyllm.load_model`."""
    model = load_weights(model_spec(config))
    if config.model.device_map is not None:
        log.info("layers are computed on %s", ", ".join(map(str, devices_of(model))))
    return model


def _measure_missing(plan: Plan, store: RunStore, tracker: Tracker) -> None:
    """Load the model and measure this job's examples that the store does not hold, if there are any."""
    todo = [case for case in plan.cases if case.key in plan.ours and case.key not in store.records]
    untraced = [case for case in plan.traced if not store.has(_trace_file(case))]
    log.info("%s: %d examples, %d of them already measured", plan.folder, len(plan.ours), len(plan.ours) - len(todo))
    if not todo and not untraced:
        return
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    holder = f"process {os.getpid()} for {plan.folder}"
    with device_lock.all_held(plan.devices, holder), _noted(store, plan.devices, len(todo)):
        model = load_model(plan.config)
        bench = Bench(model, plan.tokenizer, plan.config.model.chat, plan.paired)
        try:
            _measure_cases(bench, todo, store, tracker, plan.config.timing.warmup)
            for case in untraced:
                if case.key in store.records:
                    _trace_case(bench, case, store)
        finally:
            del model, bench
            try:
                release_memory(*plan.devices)  # before another run has the device
            except RuntimeError as error:  # what ended the run goes first
                log.warning("%s: its memory could not be freed (%s)", ", ".join(map(str, plan.devices)), error)


def _measure_cases(bench: Bench, cases: list[Case], store: RunStore, tracker: Tracker, warmup: int) -> None:
    if not cases:
        return
    log.info("warming up: %d runs", warmup)
    for case in (cases[0], min(cases, key=lambda case: len(case.prompt.token_ids))):
        try:
            bench.warm_up(case, warmup)
            break
        except UserError:
            raise
        except Exception as error:  # the first example may be one that does not fit; what fails is written down below
            log.warning("warming up on %s, row %s failed (%s: %s)", *case.key, type(error).__name__, error)
            free(*devices_of(bench.model))
    with progress(len(cases)) as advance:
        for number, case in enumerate(cases):
            outcome = _measure(bench, case, baseline_first=number % 2 == 0)
            if isinstance(outcome, Failure):
                log.warning("%s, row %s failed: %s", *outcome.key, outcome.reason)
                store.fail(outcome)
                free(*devices_of(bench.model))
            else:
                store.append(outcome)
                tracker.record(outcome)
            advance(case.dataset.name)


def free(*used: torch.device) -> None:
    """Give back what a failed example has left. Raises UserError where a device itself has failed."""
    try:
        release_memory(*used)
        read_clock(*used)  # waits for them
    except RuntimeError as error:
        raise UserError(
            f"{', '.join(map(str, used))} does not recover from the last failure ({' '.join(str(error).split())}): "
            "every other example would end the same. Finished ones are safe; give the same command again"
        ) from error


def _trace_case(bench: Bench, case: Case, store: RunStore) -> None:
    """Trace an example that was measured. A trace is an addition: without it the run is as good."""
    try:
        text = trace(bench.model, bench.tokenizer, case).to_json()
    except (RuntimeError, FloatingPointError) as error:  # out of memory: it watches every layer
        log.warning("%s, row %s: no trace (%s: %s)", *case.key, type(error).__name__, error)
        return
    store.write(_trace_file(case), text)


def _measure(bench: Bench, case: Case, baseline_first: bool) -> Record | Failure:
    """The example's record, or why there is none: out of memory, logits that are not finite, a fault in a method."""
    try:
        return bench.measure(case, baseline_first)
    except UserError:
        raise  # every other example would end the same way
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Failure(*case.key, reason, traceback.format_exc())


# ------------------------------------------------------------------------------------------------------------- results


def _summarise(plan: Plan, store: RunStore) -> Summary | None:
    """The run's table, written beside the records; None while other shards have examples to measure.

    Raises UserError where every example has failed.
    """
    done = [store.records[case.key] for case in plan.cases if case.key in store.records]
    keys = {case.key for case in plan.cases}
    failed = [failure for failure in store.failures if failure.key in keys]
    if len(failed) == len(plan.cases):  # fewer where other shards have not begun
        raise UserError(_all_failed(store, failed))
    if failed:
        log.warning("%s", _some_failed(store, failed, len(plan.cases)))
    pending = len(plan.cases) - len(done) - len(failed)
    if pending:
        log.info("%s: %d examples are left to other shards; the last of them makes the table", plan.folder, pending)
        return None
    summary = summarise(done, failed)
    store.write("summary.json", to_json(summary, plan.about | {"identity": plan.identity}))
    table = summary_table(summary, plan.title)
    store.write("summary.csv", table.to_csv())
    store.write("summary.md", table.to_markdown())
    log.info("records, summary.json, .csv and .md are in %s", plan.folder)
    return summary


def _all_failed(store: RunStore, failed: list[Failure]) -> str:
    return (
        f"all {len(failed)} examples failed, the first: {failed[0].dataset}, row {failed[0].id}: {failed[0].reason}. "
        f"{store.folder / 'failures.jsonl'} says where; another model.dtype, a smaller model.max_prompt_tokens or "
        "more memory may help"
    )


def _some_failed(store: RunStore, failed: list[Failure], examples: int) -> str:
    return (
        f"{len(failed)} of {examples} examples failed and are not in the table, the first: {failed[0].dataset}, row "
        f"{failed[0].id}: {failed[0].reason}. {store.folder / 'failures.jsonl'} holds all; the same command tries them "
        "again"
    )


def _pictures(folder: Path) -> list[Path]:
    """What can be drawn of a run by itself, as PNG in its folder."""
    from eval.paper.figures import FIGURES, save  # not at the top: matplotlib is slow to import, and writes caches

    results = Results([StoredRun(folder, read_about(folder / "run.json"))])
    data = {name: figure.data(results) for name, figure in FIGURES.items()}
    (folder / "figures").mkdir(exist_ok=True)
    return [
        path
        for name, figure in FIGURES.items()
        if not data[name].empty
        for path in save(figure.plot(data[name]), folder / "figures" / name, ("png",))
    ]


def _console() -> Console:
    console = Console()
    # a file or a pipe has no width of its own
    return console if console.is_terminal else Console(width=120)
