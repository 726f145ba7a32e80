"""The run: from a config to records and a table."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from eval.analysis.columns import marked
from eval.analysis.run_table import compared_table, difference, run_json, run_table
from eval.analysis.table import Table
from eval.run import device_lock, identity
from eval.run.config import DEFAULT_LABEL
from eval.run.measure import Bench, Case, released
from eval.run.prepare import Plan, prepare, within_reach
from eval.run.resolved import Resolved
from eval.run.served import Servers
from eval.run.wandb_run import Tracker, facts_of, open_tracker
from eval.store.folder import PLANNED, RunStore, fingerprint, open_store, planned_text, read_about
from eval.store.record import Failure, Trace
from eval.store.results import Results, tell_apart, with_baselines
from eval.store.runs import StoredRun, counted, short_name
from lazyllm.engine.devices import devices_of
from lazyllm.errors import FailedExamplesError, UserError, reason_of
from lazyllm.files import write_whole
from lazyllm.models.load import devices_in_use, load_weights

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 10.0  # between lines of progress if there is no terminal


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, and its results; None while other shards have examples to measure.

    names: as in `Plan`. failed: how many examples failed, and why; "" for none.
    """

    folder: Path
    results: Results | None
    names: tuple[str, ...]
    failed: str = ""


def run(run: Resolved, show: bool = True, load: Callable[[], PreTrainedModel] | None = None) -> RunResult:
    """Measure every example that the run folder does not hold yet, then summarise all of the run's examples.

    show: print the table. load: gives the model, if several runs share it. Raises UserError, before the model loads if
    possible.
    """
    if not run.config.control or run.method["name"] == "baseline":
        return _run(run, show, load)
    out = run.config.out  # first the baseline beside itself, as a run of its own, which shares the model
    control = run.changed(method={"name": "baseline"}, out=None if out is None else f"{out}-control")
    with loaded_once(run) as loaded:
        return _run(run, show, load or loaded, _run(control, False, load or loaded).results)


def _run(
    run: Resolved, show: bool, load: Callable[[], PreTrainedModel] | None, control: Results | None = None
) -> RunResult:
    log.info("reading %s", ", ".join(dataset.name for dataset in run.datasets))
    plan, config = prepare(run), run.config
    with open_store(plan.folder, plan.identity, plan.about, plan.file_part) as store:
        _check_prompts(plan.cases, store)
        write_whole(plan.folder / PLANNED, planned_text(_all_keys(plan, store)))
        group = config.tracker.group or (config.label if config.label != DEFAULT_LABEL else None)
        facts = facts_of(_stored(plan, store), plan.file_part)
        with open_tracker(config.tracker, plan.folder, group=group, **facts) as tracker:
            _measure_missing(plan, store, tracker, load or partial(load_model, run))
            if plan.file_part:
                store.reload()  # with the other shards' records so far
            results, failed = _results(plan, store)
            if results is not None:
                results.control = control
                _summarise(plan, results, tracker, show)
    if bad := plan.skipped:
        where, reason = bad[0].where, bad[0].reason
        log.warning("skipped %s (data.on_error=skip), the first: %s: %s", counted(len(bad), "row"), where, reason)
    return RunResult(plan.folder, results, plan.names, failed)


def _summarise(plan: Plan, results: Results, tracker: Tracker, show: bool) -> None:
    """Write the run's table into its folder, and show it in W&B and on the terminal."""
    table = run_table(results, ", ".join(filter(None, plan.names)))
    beside = {"difference": difference(results), "control": results.control and difference(results.control)}
    about = {key: told for key, told in beside.items() if told} | plan.about
    write_whole(plan.folder / "summary.json", run_json(table, about | {"identity": plan.identity}))
    write_whole(plan.folder / "summary.csv", table.to_csv())
    write_whole(plan.folder / "summary.md", table.to_markdown())
    log.info("records, summary.json, .csv and .md are in %s", plan.folder)
    pictures: list[Path] = []
    if plan.run.config.tracker.name != "none":
        from eval.analysis.registry import draw_all  # not at the top: matplotlib is slow to import

        pictures = draw_all(results, plan.folder / "figures")
    tracker.finish(table, results.runs[0].records, pictures, plan.folder)
    if show:
        console().print(table.to_rich())


def compare(comparison: Resolved) -> list[RunResult]:
    """Run each method of a comparison, then print one table of all; `runs/<label>-<model>.*` hold it too.

    With `only`, that method runs like any single run. A method that cannot reach its target speedup is left out.
    Raises UserError.
    """
    config, runs = comparison.config, within_reach(comparison)
    if config.only is not None:
        return [run(one) for one in runs.values()]
    if not runs:
        raise UserError(f"no method of {config.label} reaches its speedup on this model: give a lower one")
    runs = {marked(label, one.method["name"]): one for label, one in runs.items()}
    with loaded_once(comparison) as load:
        results = {name: run(one, show=False, load=load) for name, one in runs.items()}
    title = config.label if config.half is None else f"{config.label}, {config.half} half"
    model = short_name(vars(config.model))
    stem = Path("runs") / f"{config.label}-{model.replace('/', '-')}"
    # every run has its results, as shards are refused with compare
    table = _compared({name: result.results for name, result in results.items() if result.results}, title)
    abouts = {label: read_about(result.folder / "run.json") for label, result in results.items()}
    texts = {
        "md": table.to_markdown(),
        "csv": table.to_csv(),
        "json": json.dumps({"config": asdict(config), "runs": abouts}, indent=2, sort_keys=True, default=str) + "\n",
    }
    for suffix, text in texts.items():
        write_whole(Path(f"{stem}.{suffix}"), text)
    screen = console()
    screen.print(table.to_rich())
    pictures: list[Path] = []
    if config.timing.paired:  # the picture is of speedups
        from eval.analysis.field import plot_comparison  # not at the top: matplotlib is slow to import
        from eval.analysis.style import save

        methods = {name: one.method for name, one in runs.items()}
        pictures = save(plot_comparison(table.frame, f"{model}, {title}", methods), stem)
        group = config.tracker.group or config.label
        facts = {"name": f"{config.label}, figures", "job_type": "figures", "group": group}
        with open_tracker(config.tracker, Path("runs"), **facts) as tracker:
            tracker.show(pictures)
    paths = [*(result.folder for result in results.values()), f"{stem}.md", *pictures]
    lines = ["Files:", *(f"  {path}" for path in paths)]
    if config.model.name == "tiny":
        lines.append("A first look at a checkpoint on LongBench, on a GPU:")
        lines.append("  python run.py model=llama2 method=lazy dataset=hotpotqa")
    screen.print("\n".join(lines), highlight=False)
    return list(results.values())


def show_together(results: Sequence[RunResult]) -> None:
    """Print one table of a sweep's runs, named by their differences."""
    differ = [len(set(column)) > 1 for column in zip(*(result.names for result in results), strict=True)]
    differ[1] = True  # the setting is always named
    runs = {
        ", ".join(name for name, shown in zip(result.names, differ, strict=True) if name and shown): result.results
        for result in results
        if result.results is not None
    }
    if len(runs) > 1:
        console().print(_compared(runs, "All runs of the sweep").to_rich())


def _compared(results: Mapping[str, Results], title: str) -> Table:
    """`compared_table` of finished runs; those that timed only the baseline's first tokens have the rest of its run."""
    runs = with_baselines(tell_apart([run for of_one in results.values() for run in of_one.runs]))
    parts = {label: Results([run], results[label].control) for label, run in zip(results, runs, strict=True)}
    return compared_table(parts, title)


def _stored(plan: Plan, store: RunStore) -> StoredRun:
    """The run as stored in its folder, without reading it again, with the baseline's run beside it if it needs one."""
    about = {"fingerprint": fingerprint(plan.identity), "identity": plan.identity, **plan.about}
    baselines = plan.folder.parent.glob(f"*-{plan.baseline_fingerprint[:8]}") if plan.run.paired == "ttft" else ()
    beside = tuple(StoredRun(folder, read_about(folder / "run.json")) for folder in baselines)
    return StoredRun(plan.folder, about, list(store.records.values()), baselines=beside)


def _check_prompts(cases: list[Case], store: RunStore) -> None:
    """Raise UserError if the store holds an example with another prompt than the current one."""
    for case in cases:
        record = store.records.get(case.key)
        built = [case.prompt.sha256, *(turn.sha256 for turn in case.prompt.turns)]
        if record is not None and [turn.prompt_sha256 for turn in record.by_turn] != built:
            raise UserError(
                f"{store.folder}: holds {case.dataset.name}, row {case.example.id}, with another prompt than the "
                "current one; give another folder with out=FOLDER"
            )


@contextmanager
def _noted(store: RunStore, devices: tuple[torch.device, ...], examples: int) -> Iterator[None]:
    """Store when a job begins and ends to measure, why it ended early, and the machine's load at both times."""

    def end(error: str | None) -> None:
        store.note({"event": "end", "time": identity.now(), "error": error, "load": device_lock.load(*devices)})

    begin = {"event": "begin", "time": identity.now(), "host": socket.gethostname(), "process": os.getpid()}
    store.note({**begin, "examples": examples, "load": device_lock.load(*devices)})
    try:
        yield
    except BaseException as caught:
        try:
            end(f"{type(caught).__name__}: {caught}")
        except UserError as error:  # a full disk, for example: the log still gets the first error
            log.warning("%s", error)
        raise
    end(None)


def load_model(run: Resolved) -> PreTrainedModel:
    """The run's model, ready to be measured. Raises as `lazyllm.load_model`."""
    log.info("loading %s", run.spec.name)
    model = load_weights(run.spec)
    if run.spec.device_map is not None:
        log.info("layers run on %s", ", ".join(map(str, devices_of(model))))
    return model


@contextmanager
def loaded_once(run: Resolved) -> Iterator[Callable[[], PreTrainedModel]]:
    """A function that loads the run's model when it is first called. From then on until the block ends, its devices
    are held."""
    with ExitStack() as stack:

        @cache
        def load() -> PreTrainedModel:
            devices = devices_in_use(run.spec)
            stack.enter_context(device_lock.held(devices, f"process {os.getpid()} for {run.config.label}"))
            stack.enter_context(released(devices))
            stack.callback(load.cache_clear)
            return load_model(run)

        yield load


def _measure_missing(plan: Plan, store: RunStore, tracker: Tracker, load: Callable[[], PreTrainedModel]) -> None:
    """Measure and trace this job's examples that the store lacks; the model loads only if there are any."""
    todo = [case for case in plan.cases if case.key in plan.ours and case.key not in store.records]
    traces = {case.key: f"traces/{Trace.file_name(*case.key)}" for case in plan.traced}
    untraced = [case for case in plan.traced if not (store.folder / traces[case.key]).is_file()]
    ours = len(plan.ours)
    log.info("%s: %s, %d of them already measured", plan.folder, counted(ours, "example"), ours - len(todo))
    if not todo and not untraced:
        return
    holder = f"process {os.getpid()} for {plan.folder}"
    noted = _noted(store, plan.devices, len(todo))
    with device_lock.held(plan.devices, holder), noted, _opened(plan, load) as subject:
        if todo:
            _measure(subject, todo, plan.run.config.timing.warmup, store, tracker)
        for case in untraced:
            assert isinstance(subject, Bench)  # traces of servers are refused
            if case.key in store.records:
                try:
                    write_whole(store.folder / traces[case.key], subject.trace(case).to_json())
                except (RuntimeError, FloatingPointError) as error:  # out of memory: a trace has data of all layers
                    log.warning("%s, row %s: no trace (%s)", *case.key, reason_of(error))


@contextmanager
def _opened(plan: Plan, load: Callable[[], PreTrainedModel]) -> Iterator[Bench | Servers]:
    """What the run measures: its servers, or its model in this process."""
    config = plan.run.config
    if plan.servers:
        sides = plan.servers if plan.run.paired else {"method": plan.servers["method"]}
        yield Servers(plan.run, plan.tokenizer, sides)
        return
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    parts = plan.tokenizer, plan.run.chat, plan.run.paired, config.fidelity is not None, config.evidence
    with released(plan.devices):
        yield Bench(load(), *parts, plan.rows)


def _measure(subject: Bench | Servers, cases: list[Case], warmup: int, store: RunStore, tracker: Tracker) -> None:
    """Store the outcome of each case as soon as it is there. Progress is a bar on a terminal, else lines."""
    log.info("warming up: %s", counted(warmup, "run"))
    subject.warm_up(cases, warmup)
    screen, start, last = Console(stderr=True), time.monotonic(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    eta = (TextColumn("ETA"), TimeRemainingColumn())
    with Progress(*columns, *eta, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=len(cases))
        for done, outcome in enumerate(subject.measure(cases), start=1):
            if isinstance(outcome, Failure):
                log.warning("%s, row %s failed: %s", *outcome.key, outcome.reason)
                store.fail(outcome)
            else:
                store.append(outcome)
                tracker.record(outcome)
            bar.update(task, advance=1, description=outcome.dataset)
            now = time.monotonic()
            if not screen.is_terminal and (now - last >= PROGRESS_EVERY_S or done == len(cases)):
                last, eta_s = now, (now - start) / done * (len(cases) - done)
                log.info("%d of %d examples (%s), ETA %.0f s", done, len(cases), outcome.dataset, eta_s)


def _all_keys(plan: Plan, store: RunStore) -> list[tuple[str, str]]:
    """(dataset, id) of the planned examples, then of others in the folder from a wider run."""
    return list(dict.fromkeys([*(case.key for case in plan.cases), *store.records]))


def _results(plan: Plan, store: RunStore) -> tuple[Results | None, str]:
    """All the run's examples, planned ones first; None while other shards have examples to measure.

    And which examples failed, as in `RunResult`. Raises FailedExamplesError if all did.
    """
    keys = _all_keys(plan, store)
    done = [store.records[key] for key in keys if key in store.records]
    failed, told = [failure for failure in store.failures if failure.key in keys], ""
    if failed:
        first = f"the first: {failed[0].dataset}, row {failed[0].id}: {failed[0].reason}"
        file = store.folder / "failures.jsonl"
        if len(failed) == len(keys):  # never while other shards have examples to measure
            helps = "a longer model.timeout_s" if plan.servers else "another model.dtype, more memory"
            raise FailedExamplesError(
                f"every example failed ({len(failed)}), {first}. {file} has all; {helps} or a smaller "
                "model.max_prompt_tokens may help"
            )
        told = (
            f"{len(failed)} of {len(keys)} examples failed and are not in the table, {first}. {file} holds all; the "
            "same command tries them again"
        )
    pending = len(keys) - len(done) - len(failed)
    if pending:
        log.info("%s: other shards have %d examples to measure; the last shard makes the table", plan.folder, pending)
        return None, told
    return Results([replace(_stored(plan, store), source=done)]), told


def console() -> Console:
    """A console for tables; a file or a pipe gets a fixed width."""
    return Console() if Console().is_terminal else Console(width=120)
