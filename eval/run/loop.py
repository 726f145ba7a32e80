"""The loop of a run: from its settings to visits, and to one table of all arms."""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby, islice
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from eval.analysis.run_table import run_json, run_table
from eval.analysis.table import console
from eval.benchmarks.subsets import parse_shard
from eval.run import identity
from eval.run.cases import Case
from eval.run.device_lock import held
from eval.run.measure import Bench, in_turn, released
from eval.run.run import Run
from eval.run.tracing import traces
from eval.run.wandb_run import Tracker, open_trackers
from eval.serving.subject import Servers
from eval.store.folder import RunStore, open_store
from eval.store.results import Results
from eval.store.runs import StoredRun, counted
from eval.store.visit import Trace
from lazyllm.engine.devices import devices_of
from lazyllm.errors import FailedExamplesError, UserError, reason_of
from lazyllm.files import write_whole
from lazyllm.models.load import devices_in_use, load_weights, unapplied_settings

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 10.0  # between lines of progress
DEFAULT_THREADS = torch.get_num_threads()  # restored in a sweep, where an earlier job may have set its own number


def measure(run: Run, show: bool = True, load: Callable[[], PreTrainedModel] | None = None) -> StoredRun:
    """Measure what the run's folder does not hold yet, then make the table, unless other shards are `unvisited`.

    show: print the table. load: gives the model, if several runs share it. Raises UserError, before the model loads if
    possible; FailedExamplesError if no arm has answered.
    """
    config = run.config
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    log.info("reading %s", ", ".join(dataset.name for dataset in run.datasets))
    part = "" if config.shard is None else "-{}-of-{}".format(*parse_shard(config.shard))
    with open_store(run.folder, run.identity, run.about, part) as store:
        _check_prompts(run.cases, store)
        store.plan(case.key for case in run.cases)
        with open_trackers(config.tracker, _stored(run, store), part) as trackers:
            _measure_missing(run, store, trackers, load or (lambda: load_model(run)))
            if part:
                store.reload()  # with the other shards' visits so far
            stored = _stored(run, store)
            if stored.unvisited:
                left = counted(len(stored.unvisited), "example")
                log.info("%s: %s left for other shards; the last makes the table", run.folder, left)
            elif not stored.answered:
                raise FailedExamplesError(f"no answer: {stored.failures}")
            else:
                _summarise(run, Results([stored]), trackers, show)
    if bad := [row for data in run.loaded for row in data.skipped]:
        where, reason = bad[0]
        log.warning("skipped %s (data.on_error=skip), the first: %s: %s", counted(len(bad), "row"), where, reason)
    return stored


def _summarise(run: Run, results: Results, trackers: list[Tracker], show: bool) -> None:
    """Write the run's table and its pictures into its folder, and show them in W&B. show: print the table too."""
    folder, name = run.folder, results.runs[0].model
    table = run_table(results, ", ".join([name, run.name, run.data_name, *filter(None, [run.config.split])]))
    write_whole(folder / "summary.json", run_json(table, {**run.about, "identity": run.identity}))
    write_whole(folder / "summary.csv", table.to_csv())
    write_whole(folder / "summary.md", table.to_page())
    pictures: list[Path] = []
    if run.baseline is not None and len(run.arms) > 2:  # the picture is of speedups, and compares methods
        from eval.analysis.field import plot_comparison  # not at the top: matplotlib is slow to import
        from eval.analysis.style import save

        (folder / "figures").mkdir(exist_ok=True)
        pictures += save(plot_comparison(results, table), folder / "figures" / "comparison")
    if run.config.tracker.name != "none":
        from eval.analysis.style import draw_all

        pictures += draw_all(results, folder / "figures")
    for tracker in trackers:
        tracker.finish(results, table, pictures)
    log.info("visits, summary.json, .csv and .md are in %s", folder)
    if show:
        screen = console()
        screen.print(table.to_rich(screen.width))
        lines = ["Files:", *(f"  {path}" for path in (folder / "summary.md", *pictures))]
        if name == "tiny":
            lines.append("A first look at a checkpoint on LongBench, on a GPU:")
            lines.append("  python run.py model=llama2 method=lazy dataset=hotpotqa")
        screen.print("\n".join(lines), highlight=False)


def show_together(runs: Sequence[StoredRun]) -> None:
    """Print one table of a sweep's runs, each joined within itself."""
    screen = console()
    screen.print(run_table(Results(runs), "All runs of the sweep").to_rich(screen.width))


def _stored(run: Run, store: RunStore) -> StoredRun:
    """The run as stored in its folder, planned examples first, without reading it again."""
    planned = dict.fromkeys([*(case.key for case in run.cases), *store.visits])
    return StoredRun(run.folder, store.about, [visit for key in planned for visit in store.visits.get(key, ())])


def _check_prompts(cases: list[Case], store: RunStore) -> None:
    """Raise UserError if the store holds an example with another prompt than the current one."""
    for case in cases:
        for visit in store.visits.get(case.key, ()):
            if [turn.sha256 for turn in visit.turns] != [message.sha256 for message in case.prompts]:
                raise UserError(
                    f"{store.folder}: holds {case.dataset.name}, row {case.example.id}, with another prompt than the "
                    "current one; give another folder with out=FOLDER"
                )


@contextmanager
def _noted(store: RunStore, examples: int) -> Iterator[None]:
    """Store when a job begins and ends to measure, why it ended early, and the machine's load average at both times."""

    def end(error: str | None) -> None:
        store.note({"event": "end", "time": identity.now(), "error": error, "load": os.getloadavg()})

    begin = {"event": "begin", "time": identity.now(), "host": socket.gethostname(), "process": os.getpid()}
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


def load_model(run: Run) -> PreTrainedModel:
    """The run's model, ready to be measured. Raises as `lazyllm.load_model`."""
    log.info("loading %s", run.spec.name)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    if unapplied := unapplied_settings(run.spec):
        settings = ", ".join(f"{key}={value}" for key, value in unapplied.items())
        log.info("answers are greedy: of the model's generation_config.json these have no effect: %s", settings)
    model = load_weights(run.spec)
    if run.spec.device_map is not None:
        log.info("layers run on %s", ", ".join(map(str, devices_of(model))))
    return model


@contextmanager
def loaded_once(run: Run) -> Iterator[Callable[[], PreTrainedModel]]:
    """A function that loads the run's model when it is first called. From then on until the block ends, its devices
    are held."""
    with ExitStack() as stack:

        @cache
        def load() -> PreTrainedModel:
            devices = devices_in_use(run.spec)
            stack.enter_context(held(devices))
            stack.enter_context(released(devices))
            stack.callback(load.cache_clear)
            return load_model(run)

        yield load


def _measure_missing(run: Run, store: RunStore, trackers: list[Tracker], load: Callable[[], PreTrainedModel]) -> None:
    """Measure and trace what the store lacks of this job's examples; the model loads only if that is anything.

    An example that some arms have answered is visited again with the baseline and the other arms.
    """
    todo = list[Case]()
    for number, case in enumerate(run.ours):
        answered = store.answered(case.key)
        if lacking := [arm for arm in run.arms if arm.label not in answered]:
            again = [arm for arm in run.arms if arm in lacking or arm.label == run.baseline]
            todo.append(replace(case, arms=in_turn(again, number)))
    untraced, ours = _untraced(run, store), len(run.ours)
    log.info("%s: %s, %d of them already measured", run.folder, counted(ours, "example"), ours - len(todo))
    if not todo and not untraced:
        return
    devices = () if run.is_served else devices_in_use(run.spec)
    with held(devices), _noted(store, len(todo)), released(devices):
        subject = Servers(run) if run.is_served else Bench(run, load())
        if todo:
            _measure(subject, todo, run.config.warmup, store, trackers)
        for case, labels in untraced.items():
            assert isinstance(subject, Bench)  # traces of servers are refused
            arms = [arm for arm in run.arms if arm.label in labels & store.answered(case.key)]
            try:
                for trace in traces(subject.model, run.tokenizer, case, arms) if arms else ():
                    write_whole(_trace_file(store, case, trace.arm), trace.to_json())
            except (RuntimeError, FloatingPointError) as error:  # out of memory: a trace has data of all layers
                log.warning("%s, row %s: no trace (%s)", *case.key, reason_of(error))


def _untraced(run: Run, store: RunStore) -> dict[Case, set[str]]:
    """{case: labels of arms} without the trace that the run asks for; the baseline's only if it is the only arm."""
    labels = {arm.label for arm in run.arms if arm.label != run.baseline or len(run.arms) == 1}
    untraced = dict[Case, set[str]]()
    for _, cases in groupby(run.cases, key=lambda case: case.dataset.name):
        for case in islice(cases, run.config.trace):
            lacking = {label for label in labels if not _trace_file(store, case, label).is_file()}
            if lacking and case in run.ours:
                untraced[case] = lacking
    return untraced


def _trace_file(store: RunStore, case: Case, label: str) -> Path:
    return store.folder / "traces" / Trace.file_name(*case.key, label)


def _measure(subject: Bench | Servers, todo: list[Case], warmup: int, store: RunStore, trackers: list[Tracker]) -> None:
    """Store each visit as soon as it is made, and log the progress."""
    log.info("warming up: %s of each arm", counted(warmup, "run"))
    subject.warm_up(todo, warmup)
    start = last = time.monotonic()
    for done, visit in enumerate(subject.measure(todo), start=1):
        for label, failure in visit.failures.items():
            log.warning("%s, row %s: %s failed: %s", *visit.key, label, failure.reason)
        store.append(visit)
        for tracker in trackers:
            tracker.visit(visit)
        now = time.monotonic()
        if now - last >= PROGRESS_EVERY_S or done == len(todo):
            last, each_s = now, (now - start) / done
            progress = f"{done} of {len(todo)} examples ({visit.dataset}), {60 / each_s:.3g} a minute"
            log.info("%s, ETA %.0f s", progress, each_s * (len(todo) - done))
