"""The search against an exhaustive one, and studies that processes share, leave or lose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import combinations, product
from pathlib import Path

import pytest

from eval.tune.findings import best, evenly, front
from eval.tune.space import Candidate, Ideal, Space
from eval.tune.study import Counts, Scored, Study, TrialFailed, Tried, open_study, search
from lazyllm.errors import UserError
from lazyllm.methods import Lazy
from tests.eval.tune.test_space import SHAPE

SPACE = Space(5, 2, 20, 80, 20)
IDEAL = Ideal.of(SHAPE, [("lookup", 100)], Lazy())
EVERY = [
    Candidate(tuple(zip(layers, keeps, strict=True)))
    for number in (1, 2)
    for layers in combinations(range(1, 5), number)
    for keeps in product(SPACE.ratios, repeat=number)
]


def quality(candidate: Candidate) -> float:
    """Lower for more pruning, much lower for early pruning."""
    return 100 - sum((100 - keep) ** 1.2 / (3 * layer) for layer, keep in candidate.cuts)


def scored(candidate: Candidate) -> Scored:
    return Scored(quality(candidate), {"single_doc_qa": quality(candidate)}, 1)


def opened(folder: Path, target: float | None = 2.0, seed: int = 0, first=(), space=SPACE, **identity):
    return open_study(
        folder, {"seed": seed, **identity}, {}, space=space, ideal=IDEAL, target=target, seed=seed, first=first
    )


def always() -> bool:
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("target", "seed"), [(1.5, 0), (2.0, 1)])
def test_the_best_under_the_target_is_that_of_an_exhaustive_search(tmp_path: Path, target: float, seed: int) -> None:
    feasible = [candidate for candidate in EVERY if IDEAL.speedup(candidate.schedule) >= target]
    assert len(EVERY) == 4 * 4 + 6 * 16
    asked = []

    def noted(candidate: Candidate) -> Scored:
        asked.append(candidate)
        return scored(candidate)

    with opened(tmp_path, target, seed) as study:
        search(study, noted, 24, always)
        tried, counts = study.tried(), study.counts()
    assert best(tried).candidate == max(feasible, key=quality)
    # no model runs for a candidate that arithmetic refuses, or twice for the same one
    assert len(asked) == len(set(asked)) == counts.measured <= 24 < len(feasible) / 2
    assert set(asked) <= set(feasible)
    assert counts.refused + counts.repeated > 0
    assert [point.candidate for point in tried] == asked


def test_the_whole_front_is_that_of_an_exhaustive_search(tmp_path: Path) -> None:
    space = Space(5, 1, 20, 80, 20)
    every = [candidate for candidate in EVERY if len(candidate.cuts) == 1]
    with opened(tmp_path, None, space=space) as study:
        search(study, scored, len(every), always)
        tried = study.tried()
    assert {point.candidate for point in tried} == set(every)
    points = {candidate: (quality(candidate), IDEAL.speedup(candidate.schedule)) for candidate in every}
    expected = {
        candidate
        for candidate, (score, speed) in points.items()
        if not any(s >= score and v >= speed and (s, v) != (score, speed) for s, v in points.values())
    }
    assert 1 < len(expected) < len(every)
    assert {point.candidate for point in front(tried)} == expected


def test_the_front_and_a_choice_of_it() -> None:
    points = [(1.0, 90), (2.0, 95), (3.0, 80), (3.0, 85), (4.0, 85), (5.0, 10)]
    tried = [Tried(Candidate(((n, 50),)), speed, Scored(score, {}, 1)) for n, (speed, score) in enumerate(points)]
    assert [(point.ideal_speedup, point.scored.score) for point in front(tried)] == [(2.0, 95), (4.0, 85), (5.0, 10)]
    assert best(tried).ideal_speedup == 2.0
    assert [point.ideal_speedup for point in evenly(front(tried), 2)] == [2.0, 5.0]
    assert evenly(front(tried), 9) == front(tried)
    assert best([*tried, Tried(Candidate(((9, 50),)), 2.5, Scored(95, {}, 1))]).ideal_speedup == 2.0


def test_what_is_given_is_tried_first_and_a_study_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = [Candidate(((1, 20), (3, 60))), Candidate(((2, 20),))]
    with opened(tmp_path / "whole", first=first) as study:
        search(study, scored, 12, always)
        whole = study.tried()
    assert [point.candidate for point in whole[:2]] == [SPACE.fitted(candidate, IDEAL, 2.0) for candidate in first]
    for trials in (3, 3, 12):
        with opened(tmp_path / "parts", first=first) as study:
            search(study, scored, trials, always)
            assert study.counts().measured == trials
            parts = study.tried()
    assert parts == whole
    with opened(tmp_path / "parts", first=first) as study:
        search(study, scored, 99, lambda: False)  # no time
        assert study.tried() == whole


def test_a_study_of_something_else_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, code="one"):
        pass
    differs = r"holds a study that differs \(code: \"one\" there, \"two\" now\)"
    with pytest.raises(UserError, match=differs), opened(tmp_path, code="two"):
        pass
    with pytest.raises(UserError, match=r"seed: 0 there, 1 now"), opened(tmp_path, seed=1, code="one"):
        pass
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as a study's description"), opened(tmp_path):
        pass
    (tmp_path / "study.json").unlink()
    with pytest.raises(UserError, match=r"holds a journal but no study\.json"), opened(tmp_path):
        pass


def test_a_candidate_that_fails_has_no_score_and_three_end_the_search(tmp_path: Path) -> None:
    def once(candidate: Candidate) -> Scored:
        calls.append(candidate)
        if len(calls) == 2:
            raise TrialFailed("out of memory")
        return scored(candidate)

    def never(candidate: Candidate) -> Scored:
        raise TrialFailed("out of memory")

    calls: list[Candidate] = []
    with opened(tmp_path / "once") as study:
        search(study, once, 4, always)
        assert [point.candidate for point in study.tried()] == [calls[0], *calls[2:]]
        assert (study.counts().measured, study.counts().failed) == (4, 1)
    ends = "three trials failed, the last one: out of memory"
    with opened(tmp_path / "never") as study, pytest.raises(UserError, match=ends):
        search(study, never, 4, always)


WORKER = """
import sys, time
from pathlib import Path
from tests.eval.tune.test_study import opened, scored, always, search
folder, log, waits = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def score(candidate):
    with log.open("a") as file:
        file.write(candidate.name + "\\n")
    while waits == "for ever" or (waits == "together" and len(list(log.parent.glob("*.log"))) < 2):
        time.sleep(0.01)
    time.sleep(0.02)
    return scored(candidate)
with opened(folder) as study:
    search(study, score, 12, always)
"""


def worker(folder: Path, log: Path, waits: str) -> subprocess.Popen:
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen([sys.executable, "-c", WORKER, str(folder), str(log), waits], cwd=root, env=environment)


@pytest.mark.slow
def test_two_processes_share_a_study(tmp_path: Path) -> None:
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    processes = [worker(tmp_path / "study", log, "together") for log in logs]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    measured = [log.read_text().splitlines() for log in logs]
    assert all(measured)  # both took part
    names = [name for names_of in measured for name in names_of]
    assert len(names) == len(set(names)) == 12
    with opened(tmp_path / "study") as study:
        assert {point.candidate.name for point in study.tried()} == set(names)
        assert study.counts().running == 0


def test_a_trial_that_ends_while_it_is_looked_for_is_not_taken_for_dead(tmp_path: Path, monkeypatch) -> None:
    with opened(tmp_path / "study") as ours, opened(tmp_path / "study") as theirs:
        drawn = theirs.next(1)
        assert drawn is not None

        def ends(study: Study, trial: object) -> bool:
            theirs.tell(*drawn, scored(drawn[1]))
            return False  # as its lock is free now

        monkeypatch.setattr(Study, "_is_measured", ends)
        assert ours.next(1) is None
        assert ours.counts() == Counts(measured=1, refused=0, repeated=0, failed=0, running=0)


def test_a_killed_trial_is_done_again_and_the_search_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    with opened(tmp_path / "whole") as study:
        search(study, scored, 12, always)
        whole = study.tried()
    folder, log = tmp_path / "killed", tmp_path / "killed.log"
    with opened(folder) as study:
        search(study, scored, 4, always)
    process = worker(folder, log, "for ever")
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.01)
    with opened(folder) as study:  # while it lives, its trial is its own
        assert study.counts().running == 1
        assert study.next(5) is None
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with (folder / "journal.log").open("a") as journal:
        journal.write('{"op_code": 5, "half a li')  # as after a kill in the middle of a write
    with opened(folder) as study:
        assert study.counts().running == 1
        search(study, scored, 12, always)
        assert study.tried() == whole
        assert (study.counts().running, study.counts().failed) == (0, 1)
    assert [point.candidate.name for point in whole][4] == log.read_text().strip()
    assert all(json.loads(line) for line in (folder / "journal.log").read_text().splitlines())
