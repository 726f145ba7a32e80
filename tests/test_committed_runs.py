"""Every run in results/ scores as its answers do, answers all that was planned, and names its
origin."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from eval.benchmarks.datasets import DATASETS, load
from eval.benchmarks.metrics import needs_classes, score_example
from eval.benchmarks.suite import DataSettings
from eval.store.folder import PLANNED, fingerprint
from eval.store.record import Visit
from eval.store.runs import StoredRun, stored_runs
from lazyllm.errors import UserError
from lazyllm.machine import accelerator
from scripts.dev.records import is_private
from tests.conftest import ROOT
from tests.eval.made import write_run
from tests.eval.store.visits import visit

COMMITTED = sorted(file.parent for file in (ROOT / "results").rglob("run.json"))


def problems(folder: Path) -> list[str]:
    """A line for each score that differs from the stored answer's, missing answer and missing fact
    of a run."""
    [run] = stored_runs([folder])
    return [*faults_of_origin(run), *missing(run), *wrong_scores(run)]


def faults_of_origin(run: StoredRun) -> Iterator[str]:
    known = run.about.get("provenance") or {}
    for name in ("git_commit", "versions", "machine"):
        if not known.get(name):
            yield f"run.json lacks {name}"
    if (known.get("git_commit") or "").endswith("+changes"):
        yield "the code had uncommitted changes"
    if run.about.get("fingerprint") != fingerprint(run.identity):
        yield "the fingerprint is not the identity's"
    for dataset in run.datasets:
        if not run.identity["data"].get(dataset):
            yield f"run.json lacks the data hash of {dataset}"
    kind = accelerator(run.device)
    try:
        if kind is not None:
            kind.share(float((run.rows["prefill_flops"] / run.rows["ttft_s"]).max()))
    except UserError as error:
        yield str(error)


def missing(run: StoredRun) -> Iterator[str]:
    if run.planned is None:
        yield f"lacks {PLANNED}"
    for key in run.planned or ():
        if run.answered.get(key, set()) < run.arms.keys():
            yield f"{key[0]}, row {key[1]}: an arm has no answer"


def wrong_scores(run: StoredRun) -> Iterator[str]:
    for example in (made for made in run.visits if not leaves_out_texts(made)):
        dataset = DATASETS[example.dataset]
        # visits lack the class names
        classes = classes_of(example.dataset)[example.id] if needs_classes(dataset) else None
        for arm, stored in example.answers.items():
            score = score_example(dataset, stored.text or "", example.gold, classes)
            # versions of Python may add floats in another order
            if stored.score is None or abs(score - stored.score) > 1e-9:
                where = f"{example.dataset}, row {example.id}, {arm}"
                yield f"{where}: stored score {stored.score}, computed {score:g}"


def leaves_out_texts(visit: Visit) -> bool:
    """Whether it is of a suite whose texts may not be published (tests/test_records.py holds that
    they are not)."""
    return is_private(visit.dataset) and all(
        answer.text is None for answer in visit.answers.values()
    )


@cache
def classes_of(dataset: str) -> dict[str, Sequence[str]]:
    """{row: its class names}."""
    return {
        example.id: example.all_classes
        for example in load(DATASETS[dataset], DataSettings()).examples
    }


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_committed_run_scores_as_its_answers_do(folder: Path) -> None:
    assert problems(folder) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("run.json", '"git_commit": "abc"', '"git_commit": null', "run.json lacks git_commit"),
        (
            "run.json",
            '"git_commit": "abc"',
            '"git_commit": "abc+changes"',
            "the code had uncommitted changes",
        ),
        (
            "run.json",
            '"hotpotqa": "aa bb v1"',
            '"trec": "aa bb v1"',
            "lacks the data hash of hotpotqa",
        ),
        (
            "run.json",
            '"schedule": "paper"',
            '"schedule": "table1"',
            "the fingerprint is not the identity's",
        ),
        ("run.json", '"a device"', '"NVIDIA H100 80GB HBM3"', "impossible clock"),
        (PLANNED, '"row-2"', '"row-2", "row-3"', "hotpotqa, row row-3: an arm has no answer"),
        (
            "visits.jsonl",
            '"score":0.5',
            '"score":0.6',
            "hotpotqa, row row-1, lazy: stored score 0.6, computed 0.5",
        ),
    ],
)
def test_fault_is_seen(tmp_path: Path, file: str, old: str, new: str, fault: str) -> None:
    # by hand: one of three words is right, and the one gold word is found: 2 * (1/3 * 1) / (1/3 +
    # 1)
    lazy = {"text": "because of it", "score": 0.5, "prefill_flops": 10**15, "gold": ["because"]}
    visits = [visit(row, "hotpotqa", {"text": "because"}, **lazy) for row in (1, 2)]
    run = write_run(tmp_path / "run", visits, data={"hotpotqa": "aa bb v1"})
    (run / PLANNED).write_text('{"hotpotqa": ["row-1", "row-2"]}')
    assert problems(run) == []
    text = (run / file).read_text(encoding="utf-8")
    assert old in text
    (run / file).write_text(text.replace(old, new), encoding="utf-8")
    assert fault in "\n".join(problems(run))
