"""The loop of a run: make the visits that the run's folder lacks, then one table of all arms."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.arms import Arm
from eval.benchmarks.prompts import Prompt
from eval.run.identity import now
from eval.run.prepare import Run
from eval.run.wandb_run import Tracker, open_trackers
from eval.store.folder import RunStore, open_store
from eval.store.runs import StoredRun, counted
from eval.store.trace import trace_name
from lazyllm.errors import FailedExamplesError, UserError, reason_of
from lazyllm.files import write_whole

if TYPE_CHECKING:  # a run that lacks nothing loads no model, nor the code that runs it
    from eval.run.bench import Bench, Load, PlannedVisit

log = logging.getLogger(__name__)

BUSY = 1.5  # load average over cores that only other work can make
PROGRESS_EVERY_S = 10.0  # between lines of progress

# {key of a prompt: it, and labels of arms}
Untraced = dict[tuple[str, str], tuple[Prompt, set[str]]]


def measure(run: Run, show: bool = True, load: Load | None = None) -> StoredRun:
    """Measure what the run's folder does not hold yet, then make the table.

    show: print the table. load: gives the model, if several runs share it. Raises UserError, before
    the model loads if possible; FailedExamplesError if no arm has answered.
    """
    with open_store(run.folder, run.identity, run.about) as store:
        _check_prompts(run.prompts, store)
        store.plan(prompt.key for prompt in run.prompts)
        with open_trackers(run.config.tracker, _stored(run, store)) as trackers:
            missing, untraced = plan_visits(run, store), _untraced(run, store)
            done = len(run.prompts) - len(missing)
            log.info(
                "%s: %s, %d of them already measured",
                run.folder,
                counted(len(run.prompts), "example"),
                done,
            )
            if missing or untraced:
                from eval.run.bench import open_bench

                with _noted(store, len(missing)), open_bench(run, load) as bench:
                    _measure(bench, missing, run.config.warmup, store, trackers)
                    _trace(bench, run, untraced, store)
            stored = _stored(run, store)
            if not stored.answered:
                raise FailedExamplesError(f"no answer: {stored.failures}")
            from eval.run.finish import finish  # not at the top: it imports pandas

            finish(run, stored, trackers, show)
    return stored


def rotate(arms: Sequence[Arm], number: int) -> tuple[Arm, ...]:
    """The arms in the order of a run's visit with this number, from 0.

    It rotates with every second visit, and every other visit reverses it: in 2 visits each arm
    comes before any other once and after it once, and in 2 k visits of k arms each arm has each
    place twice.
    """
    first = number // 2 % len(arms)
    order = (*arms[first:], *arms[:first])
    return order[::-1] if number % 2 else order


def plan_visits(run: Run, store: RunStore) -> list[PlannedVisit]:
    """List the prompts that lack an answer of some arm, each with these arms in order.

    The baseline answers each of them again, as ratios compare answers of one visit.
    """
    planned: list[PlannedVisit] = []
    for number, prompt in enumerate(run.prompts):
        answered = store.answered(prompt.key)
        if lacking := [arm for arm in run.arms if arm.label not in answered]:
            again = [arm for arm in run.arms if arm in lacking or arm.label == run.baseline]
            planned.append((prompt, rotate(again, number)))
    return planned


def _stored(run: Run, store: RunStore) -> StoredRun:
    """The run as stored in its folder, planned examples first, without reading it again."""
    planned = dict.fromkeys([*(prompt.key for prompt in run.prompts), *store.visits])
    visits = [visit for key in planned for visit in store.visits.get(key, ())]
    return StoredRun(run.folder, store.about, visits)


def _check_prompts(prompts: Sequence[Prompt], store: RunStore) -> None:
    """Raise UserError if the store holds an example with another prompt than the current one."""
    for prompt in prompts:
        if any(visit.prompt_sha256 != prompt.sha256 for visit in store.visits.get(prompt.key, ())):
            where = "{}, row {}".format(*prompt.key)
            raise UserError(
                f"{store.folder}: holds {where}, with another prompt than the current one; give "
                "another folder with out=FOLDER"
            )


@contextmanager
def _noted(store: RunStore, examples: int) -> Iterator[None]:
    """Store when a job begins and ends, why it ended early, and the machine's load average."""

    def note(event: dict[str, Any]) -> None:
        load, cores = os.getloadavg(), os.cpu_count() or 1
        if load[0] > BUSY * cores:
            log.warning("a load of %.1f on %d cores: other work slows this run", load[0], cores)
        store.note({**event, "load": load})

    def end(error: str | None) -> None:
        note({"event": "end", "time": now(), "error": error})

    begin = {"event": "begin", "time": now(), "host": socket.gethostname(), "process": os.getpid()}
    note({**begin, "examples": examples})
    try:
        yield
    except BaseException as caught:
        try:
            end(f"{type(caught).__name__}: {caught}")
        except UserError as error:  # a full disk, for example: the log still gets the first error
            log.warning("%s", error)
        raise
    end(None)


def _measure(
    bench: Bench,
    planned: Sequence[PlannedVisit],
    warmup: int,
    store: RunStore,
    trackers: Sequence[Tracker],
) -> None:
    """Store each visit as soon as it is made, and show the progress."""
    if not planned:
        return
    hint = "; warmup=1 is enough for a first look" if warmup > len(planned) else ""
    log.info("warming up: %s of each of %d arms%s", counted(warmup, "run"), len(bench.arms), hint)
    bench.warm_up([prompt for prompt, _ in planned], warmup)
    with _progress(len(planned)) as show:
        for done, visit in enumerate(bench.visits(planned), start=1):
            for label, failure in visit.failures.items():
                log.warning("%s, row %s: %s failed: %s", *visit.key, label, failure.error)
            store.append(visit)
            for tracker in trackers:
                tracker.visit(visit)
            show(done, visit.dataset)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """Give a function that shows the number of visits so far and the time left.

    On a terminal it moves a bar, which nothing redraws while an arm is timed. Elsewhere it logs a
    line every `PROGRESS_EVERY_S`.
    """
    start = last = time.monotonic()

    def write(done: int, dataset: str) -> None:
        nonlocal last
        time_now = time.monotonic()
        if time_now - last >= PROGRESS_EVERY_S or done == total:
            last, each_s = time_now, (time_now - start) / done
            progress = f"{done} of {total} examples ({dataset}), {60 / each_s:.3g} a minute"
            log.info("%s, ETA %.0f s", progress, each_s * (total - done))

    if not sys.stderr.isatty():
        yield write
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("examples"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=total)

        def move(done: int, dataset: str) -> None:
            left = (time.monotonic() - start) / done * (total - done)
            text = f"{dataset}, {left:.0f} s left"
            bar.update(task, completed=done, description=text, refresh=True)

        yield move


def _trace(bench: Bench, run: Run, untraced: Untraced, store: RunStore) -> None:
    """Write the traces that are missing, of arms that have answered."""
    from eval.run.tracing import traces_of

    for prompt, labels in untraced.values():
        arms = [arm for arm in run.arms if arm.label in labels & store.answered(prompt.key)]
        try:
            for trace in traces_of(bench, prompt, arms) if arms else ():
                write_whole(_trace_file(store, prompt, trace.arm), trace.to_json())
        # out of memory, for example: a trace has data of all layers
        except (RuntimeError, FloatingPointError) as error:
            log.warning("%s, row %s: no trace (%s)", *prompt.key, reason_of(error))


def _untraced(run: Run, store: RunStore) -> Untraced:
    """The prompts without the traces that the run asks for; the baseline's only if it is the
    only arm.
    """
    labels = {arm.label for arm in run.arms if arm.label != run.baseline or len(run.arms) == 1}
    untraced = Untraced()
    for _, prompts in groupby(run.prompts, key=lambda prompt: prompt.dataset.name):
        for prompt in islice(prompts, run.config.trace):
            lacking = {label for label in labels if not _trace_file(store, prompt, label).is_file()}
            if lacking:
                untraced[prompt.key] = prompt, lacking
    return untraced


def _trace_file(store: RunStore, prompt: Prompt, label: str) -> Path:
    return store.folder / "traces" / trace_name(*prompt.key, label)
