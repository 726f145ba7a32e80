"""Copy runs without their texts, to commit them: python -m scripts.dev.records --out OUT RUN ...

Each run becomes a folder of OUT with run.json, examples.json, visits.jsonl.gz and traces/*.json.gz.
Every number and every hash stays; what quotes a prompt, a gold answer or a model's answer goes
(`without_texts`), unless the project itself made the dataset. A run may still grow: only the
examples that every arm has answered are kept. OUT then holds these runs alone.

A line names each visit that other work on the machine has slowed (`slow_visits`). --again removes
these visits from the runs: given once more, a run's command measures them again.
"""

import argparse
import gzip
import json
import shutil
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from eval.benchmarks.datasets import DATASETS
from eval.store.record import Failure, Visit
from eval.store.runs import StoredRun, stored_runs
from eval.store.trace import Trace, read_trace
from lazyllm.errors import UserError
from lazyllm.files import write_whole

MADE_HERE = ("embedded", "needle", "random")  # suites whose texts are the project's own


def is_private(dataset: str) -> bool:
    """Whether its texts may not be published: they are LongBench's, RULER's or a user's."""
    return dataset not in DATASETS or DATASETS[dataset].suite not in MADE_HERE


def without_texts(visit: Visit) -> Visit:
    """The visit without private texts: no prompt's end, gold answer, answer, token id or reason of
    a failure.

    Token ids become as many 0s, as their number is a measurement.
    """
    if not is_private(visit.dataset):
        return visit
    answers = {
        arm: answer.model_copy(update={"text": None, "token_ids": [0] * len(answer.token_ids)})
        for arm, answer in visit.answers.items()
    }
    failures = dict.fromkeys(visit.failures, Failure(error="not stored", traceback=""))
    arms = {arm: (answers | failures)[arm] for arm in visit.arms}
    return visit.model_copy(update={"prompt_end": "", "gold": [], "arms": arms})


def trace_without_texts(trace: Trace) -> Trace:
    """The trace with empty texts of tokens, if they are private."""
    if not is_private(trace.dataset):
        return trace
    return trace.model_copy(
        update={"tokens": [""] * len(trace.tokens), "generated": [""] * len(trace.generated)}
    )


LEAST_RATE = 0.8  # of an arm's usual one: a slower visit ran beside other work


def slow_visits(run: StoredRun) -> dict[tuple[str, str], str]:
    """Find visits of which an arm's rate of prefill FLOPs is below `LEAST_RATE` of its median in
    the run: {(dataset, id): such arms, each with the rate over the median}.
    """
    frame: Any = run.rows
    rates = frame["prefill_flops"] / frame["ttft_s"]
    frame = frame.assign(share=rates / rates.groupby(frame["arm"]).transform("median"))
    found: dict[tuple[str, str], str] = {}
    for key, rows in frame[frame["share"] < LEAST_RATE].groupby(["dataset", "id"], sort=False):
        arms = (f"{arm} {share:.2f}" for arm, share in zip(rows["arm"], rows["share"], strict=True))
        found[key] = ", ".join(arms)
    return found


def drop_visits(run: StoredRun, keys: Container[tuple[str, str]]) -> None:
    """Remove these visits from a run, whose command then measures them again."""
    file = run.folder / "visits.jsonl"
    if not file.exists():
        raise UserError(f"{file}: no such file; was the run compressed?")
    kept = (visit for visit in run.visits if visit.key not in keys)
    write_whole(file, "".join(f"{visit.to_json()}\n" for visit in kept))


def write(out: Path, runs: Iterable[StoredRun]) -> None:
    """Write the records of these runs into `out`, and nothing else."""
    shutil.rmtree(out, ignore_errors=True)
    for run in runs:
        folder = out / run.folder.name
        folder.mkdir(parents=True)
        shutil.copy(run.folder / "run.json", folder)
        done = run.done
        visits = [without_texts(visit) for visit in run.visits if visit.key in done]
        planned: dict[str, list[str]] = {}
        for dataset, example in dict.fromkeys(visit.key for visit in visits):
            planned.setdefault(dataset, []).append(example)
        (folder / "examples.json").write_text(json.dumps(planned) + "\n", encoding="utf-8")
        _write_gzip(folder / "visits.jsonl.gz", "".join(f"{visit.to_json()}\n" for visit in visits))
        for file in run.traces:
            (folder / "traces").mkdir(exist_ok=True)
            name = f"{file.name.removesuffix('.gz')}.gz"
            _write_gzip(folder / "traces" / name, trace_without_texts(read_trace(file)).to_json())


def _write_gzip(file: Path, text: str) -> None:
    file.write_bytes(gzip.compress(text.encode(), mtime=0))  # equal texts make equal files


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("runs", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    runs = [run for run in stored_runs(options.runs) if run.done]
    for run in runs:
        slow = slow_visits(run)
        for key, arms in slow.items():
            print(f"{run.folder.name}, {', '.join(key)}: speed over the usual one: {arms}")
        if options.again and slow:
            drop_visits(run, slow)
    if options.out:
        write(options.out, runs)


if __name__ == "__main__":
    main()
