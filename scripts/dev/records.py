"""Copy runs without their texts, to commit them: python -m scripts.dev.records OUT RUN ...
[--undisturbed LABEL ...]

Each run becomes a folder of OUT with run.json, examples.json, visits.jsonl.gz and traces/*.json.gz.
Every number and every hash stays; what quotes a prompt, a gold answer or a model's answer goes
(`without_texts`). A run may still grow:
only the examples that every arm has answered are kept. OUT is made anew: it holds these runs alone.

A line names each visit that other work on the machine has disturbed (`disturbed`); --undisturbed
leaves out those of runs with these labels. To measure one again, remove its line from visits.jsonl
and give the run's command once more.
"""

import argparse
import gzip
import json
import shutil
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from eval.store.record import Failure, Visit
from eval.store.runs import StoredRun, stored_runs
from eval.store.trace import Trace, read_trace


def without_texts(visit: Visit) -> Visit:
    """The visit without texts: no prompt's end, gold answer, answer, token id or reason of a
    failure.

    Token ids become as many 0s, as their number is a measurement.
    """
    answers = {
        arm: answer.model_copy(update={"text": None, "token_ids": [0] * len(answer.token_ids)})
        for arm, answer in visit.answers.items()
    }
    failures = dict.fromkeys(visit.failures, Failure(error="not stored", traceback=""))
    arms = {arm: (answers | failures)[arm] for arm in visit.arms}
    return visit.model_copy(update={"prompt_end": "", "gold": [], "arms": arms})


def trace_without_texts(trace: Trace) -> Trace:
    """The trace with empty texts of tokens."""
    return trace.model_copy(
        update={"tokens": [""] * len(trace.tokens), "generated": [""] * len(trace.generated)}
    )


FACTOR = 1.5  # by which the speed of an arm beside the baseline's may differ from its median


def disturbed(run: StoredRun) -> dict[tuple[str, str], str]:
    """{(dataset, id): the arms, each with its factor} of the visits whose times are of other work
    too: an arm's rate of prefill FLOPs over that of the visit's baseline is not within `FACTOR` of
    the arm's median in the run."""
    frame = run.rows
    rates = (
        (frame["prefill_flops"] / frame["ttft_s"])
        .groupby([frame[name] for name in ("dataset", "id", "arm")])
        .first()
    )
    beside_baseline: Any = rates.unstack("arm")
    beside_baseline = beside_baseline.div(beside_baseline[run.identity["baseline"]], axis=0)
    factors = beside_baseline / beside_baseline.median()
    found: dict[tuple[str, str], str] = {}
    for key, row in factors[((factors > FACTOR) | (factors < 1 / FACTOR)).any(axis=1)].iterrows():
        odd = row[(row > FACTOR) | (row < 1 / FACTOR)]
        found[key] = ", ".join(f"{arm} {factor:.2f}" for arm, factor in odd.items())
    return found


def write(
    out: Path, runs: Iterable[StoredRun], left_out: Container[tuple[Path, str, str]] = ()
) -> None:
    """Write the records of these runs into `out`, and nothing else. left_out: (folder, dataset,
    id) of examples.
    """
    shutil.rmtree(out, ignore_errors=True)
    for run in runs:
        folder = out / run.folder.name
        folder.mkdir(parents=True)
        shutil.copy(run.folder / "run.json", folder)
        done = run.done
        visits = [
            visit
            for visit in run.visits
            if visit.key in done and (run.folder, *visit.key) not in left_out
        ]
        planned: dict[str, list[str]] = {}
        for dataset, example in dict.fromkeys(visit.key for visit in visits):
            planned.setdefault(dataset, []).append(example)
        (folder / "examples.json").write_text(json.dumps(planned) + "\n", encoding="utf-8")
        _write_gzip(
            folder / "visits.jsonl.gz",
            "".join(f"{without_texts(visit).to_json()}\n" for visit in visits),
        )
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
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--undisturbed", nargs="+", default=[], metavar="LABEL")
    options = parser.parse_args(arguments)
    runs = [run for run in stored_runs(options.runs) if run.done]
    left_out = set[tuple[Path, str, str]]()
    for run in runs:
        is_chosen = run.about["config"].get("label") in options.undisturbed
        for key, arms in disturbed(run).items():
            what = "left out" if is_chosen else "kept"
            print(
                f"{run.folder.name}, {', '.join(key)}: {what}, speed beside the baseline's over "
                f"the usual one: {arms}"
            )
            if is_chosen:
                left_out.add((run.folder, *key))
    write(options.out, runs, left_out)


if __name__ == "__main__":
    main()
