"""The loop of a run: make the visits that the run's folder lacks, then one table of all arms."""

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path

from eval.run.arms import Arm
from eval.run.bench import Bench
from eval.run.case import Case
from eval.run.identity import now
from eval.run.local import Load
from eval.run.run import Run
from eval.run.tracing import traces_of
from eval.run.wandb_run import Tracker, open_trackers
from eval.store.folder import RunStore, open_store
from eval.store.runs import StoredRun, counted
from eval.store.trace import trace_name
from lazyllm.errors import FailedExamplesError, UserError, reason_of
from lazyllm.files import write_whole

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 10.0  # between lines of progress


def in_turn(arms: Sequence[Arm], number: int) -> tuple[Arm, ...]:
    """The arms in the order of a run's visit with this number, from 0.

    It rotates with every second visit, and every other visit reverses it: in 2 visits each arm comes before any other
    once and after it once, and in 2 k visits of k arms each arm has each place twice.
    """
    first = number // 2 % len(arms)
    order = (*arms[first:], *arms[:first])
    return order[::-1] if number % 2 else order


def measure(run: Run, show: bool = True, load: Load | None = None) -> StoredRun:
    """Measure what the run's folder does not hold yet, then make the table.

    show: print the table. load: gives the model, if several runs share it. Raises UserError, before the model loads if
    possible; FailedExamplesError if no arm has answered.
    """
    with open_store(run.folder, run.identity, run.about) as store:
        _check_prompts(run.cases, store)
        store.plan(case.key for case in run.cases)
        with open_trackers(run.asked.config.tracker, _stored(run, store)) as trackers:
            _measure_missing(run, store, trackers, load)
            stored = _stored(run, store)
            if not stored.answered:
                raise FailedExamplesError(f"no answer: {stored.failures}")
            from eval.run.summary import summarise  # not at the top: it imports pandas

            summarise(run, stored, trackers, show)
    if run.skipped:
        where, reason = run.skipped[0]
        count = counted(len(run.skipped), "row")
        log.warning("skipped %s (data.on_error=skip), the first: %s: %s", count, where, reason)
    return stored


def _stored(run: Run, store: RunStore) -> StoredRun:
    """The run as stored in its folder, planned examples first, without reading it again."""
    planned = dict.fromkeys([*(case.key for case in run.cases), *store.visits])
    return StoredRun(run.folder, store.about, [visit for key in planned for visit in store.visits.get(key, ())])


def _check_prompts(cases: Sequence[Case], store: RunStore) -> None:
    """Raise UserError if the store holds an example with another prompt than the current one."""
    for case in cases:
        for visit in store.visits.get(case.key, ()):
            if visit.prompt_sha256 != case.prompt.sha256:
                raise UserError(
                    f"{store.folder}: holds {case.dataset.name}, row {case.example.id}, with another prompt than the "
                    "current one; give another folder with out=FOLDER"
                )


@contextmanager
def _noted(store: RunStore, examples: int) -> Iterator[None]:
    """Store when a job begins and ends to measure, why it ended early, and the machine's load average at both times."""

    def end(error: str | None) -> None:
        store.note({"event": "end", "time": now(), "error": error, "load": os.getloadavg()})

    begin = {"event": "begin", "time": now(), "host": socket.gethostname(), "process": os.getpid()}
    store.note({**begin, "examples": examples, "load": os.getloadavg()})
    try:
        yield
    except BaseException as caught:
        try:
            end(f"{type(caught).__name__}: {caught}")
        except UserError as error:  # a full disk, for example: the log still gets the first error
            log.warning("%s", error)
        raise
    end(None)


def _measure_missing(run: Run, store: RunStore, trackers: list[Tracker], load: Load | None) -> None:
    """Measure and trace what the store lacks of the run's examples; the model is loaded only if that is anything.

    An example that some arms have answered is visited again with the baseline and the other arms.
    """
    todo = list[Case]()
    for number, case in enumerate(run.cases):
        answered = store.answered(case.key)
        if lacking := [arm for arm in run.arms if arm.label not in answered]:
            again = [arm for arm in run.arms if arm in lacking or arm.label == run.asked.baseline]
            todo.append(replace(case, arms=in_turn(again, number)))
    untraced, planned = _untraced(run, store), len(run.cases)
    log.info("%s: %s, %d of them already measured", run.folder, counted(planned, "example"), planned - len(todo))
    if not todo and not untraced:
        return
    ready = run.asked.subject.ready(run.arms, run.asked.baseline, run.batch_size, load)
    with _noted(store, len(todo)), ready as bench:
        if todo:
            _measure(bench, todo, run.asked.config.warmup, store, trackers)
        for case, labels in untraced.items():
            arms = [arm for arm in run.arms if arm.label in labels & store.answered(case.key)]
            try:
                for trace in traces_of(bench, case, arms) if arms else ():
                    write_whole(_trace_file(store, case, trace.arm), trace.to_json())
            except (RuntimeError, FloatingPointError) as error:  # out of memory: a trace has data of all layers
                log.warning("%s, row %s: no trace (%s)", *case.key, reason_of(error))


def _untraced(run: Run, store: RunStore) -> dict[Case, set[str]]:
    """{case: labels of arms} without the trace that the run asks for; the baseline's only if it is the only arm."""
    labels = {arm.label for arm in run.arms if arm.label != run.asked.baseline or len(run.arms) == 1}
    untraced = dict[Case, set[str]]()
    for _, cases in groupby(run.cases, key=lambda case: case.dataset.name):
        for case in islice(cases, run.asked.config.trace):
            lacking = {label for label in labels if not _trace_file(store, case, label).is_file()}
            if lacking:
                untraced[case] = lacking
    return untraced


def _trace_file(store: RunStore, case: Case, label: str) -> Path:
    return store.folder / "traces" / trace_name(*case.key, label)


def _measure(bench: Bench, todo: list[Case], warmup: int, store: RunStore, trackers: list[Tracker]) -> None:
    """Store each visit as soon as it is made, and log the progress."""
    log.info("warming up: %s of each arm", counted(warmup, "run"))
    bench.warm_up(todo, warmup)
    start = last = time.monotonic()
    for done, visit in enumerate(bench.visits(todo), start=1):
        for label, failure in visit.failures.items():
            log.warning("%s, row %s: %s failed: %s", *visit.key, label, failure.error)
        store.append(visit)
        for tracker in trackers:
            tracker.visit(visit)
        time_now = time.monotonic()
        if time_now - last >= PROGRESS_EVERY_S or done == len(todo):
            last, each_s = time_now, (time_now - start) / done
            progress = f"{done} of {len(todo)} examples ({visit.dataset}), {60 / each_s:.3g} a minute"
            log.info("%s, ETA %.0f s", progress, each_s * (len(todo) - done))
