"""A search's study: an Optuna study in a file that several processes share, and that a kill does not hurt.

study.json       what the study is of (its identity), config, provenance
journal.log      Optuna's journal: every trial with its schedule, ideal speedup and score
trials/NAME/     records.jsonl: one `Record` an example of the tuning half, kept when a trial is killed
workers/ID.lock  held by a living process; a running trial whose process is gone is done again
"""

from __future__ import annotations

import fcntl
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial, TrialState

from eval.store.folder import fingerprint, write_whole
from eval.tune.space import Candidate, Ideal, Space
from lazyllm.errors import UserError

log = logging.getLogger(__name__)

IN_VAIN = 100  # so many candidates in a row that need no model: nothing new is to be expected
_NAME = "schedules"
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Scored:
    """A trial's outcome on the tuning half. score: 0 to 100, the mean over tasks. tasks: by task."""

    score: float
    tasks: Mapping[str, float]
    examples: int


@dataclass(frozen=True)
class Tried:
    """A measured schedule of the study."""

    candidate: Candidate
    ideal_speedup: float
    scored: Scored


@dataclass(frozen=True)
class Counts:
    """How many candidates were measured, refused by arithmetic, drawn again, failed or given up, and now run."""

    measured: int
    refused: int
    repeated: int
    failed: int
    running: int


@dataclass(frozen=True)
class Study:
    """One process's hold of the study in `folder`. Open it with `open_study`."""

    folder: Path
    space: Space
    ideal: Ideal
    target: float | None
    seed: int
    optuna: optuna.Study
    worker: str

    def next(self, trials: int) -> tuple[Trial, Candidate] | None:
        """A candidate to be measured, which no other process measures; None where `trials` are, or nothing is new.

        Candidates that the constraints refuse, or that were measured before, are told to Optuna at once.
        """
        with locked(self.folder / ".lock"):
            self._retire_the_dead()
            for vain in range(IN_VAIN):
                counts = self.counts()
                if counts.measured + counts.running >= trials:
                    return None
                found = self._draw(at_random=vain >= IN_VAIN // 4)
                if found is not None:
                    return found
        log.info("%d candidates in a row were refused or known: the search ends", IN_VAIN)
        return None

    def tell(self, trial: Trial, candidate: Candidate, scored: Scored) -> None:
        """Write down a candidate's score."""
        trial.set_user_attr("tasks", dict(scored.tasks))
        trial.set_user_attr("examples", scored.examples)
        self.optuna.tell(trial, self._values(scored.score, self.ideal.speedup(candidate.schedule)))

    def fail(self, trial: Trial, reason: str) -> None:
        """Write down that a candidate could not be measured."""
        trial.set_user_attr("reason", reason)
        self.optuna.tell(trial, state=TrialState.FAIL)

    def counts(self) -> Counts:
        trials = self._trials()
        repeated = sum("repeats" in one.user_attrs for one in trials)
        states = [one.state for one in trials]
        return Counts(
            measured=states.count(TrialState.COMPLETE),
            refused=states.count(TrialState.PRUNED) - repeated,
            repeated=repeated,
            failed=states.count(TrialState.FAIL),
            running=states.count(TrialState.RUNNING),
        )

    def tried(self) -> list[Tried]:
        """All schedules that were measured, once each, in order."""
        return [
            Tried(
                _candidate(one),
                one.user_attrs["ideal_speedup"],
                Scored(one.values[0], one.user_attrs["tasks"], one.user_attrs["examples"]),
            )
            for one in self._trials()
            if one.state == TrialState.COMPLETE
        ]

    def _draw(self, at_random: bool) -> tuple[Trial, Candidate] | None:
        """The next candidate, if it is one to be measured. at_random: not where good ones were, all are known there."""
        ended = sum(one.state in _ENDED for one in self._trials())
        # a sampler for each trial, seeded by what the study holds: a search that goes on after a kill draws what it
        # would have drawn, and two processes do not draw the same
        self.optuna.sampler = _sampler(self.seed, ended + self.counts().running, at_random)
        trial = self.optuna.ask()
        trial.set_user_attr("worker", self.worker)
        candidate = self.space.draw(trial)
        if self.target is not None and not candidate.clashes:
            candidate = self.space.fitted(candidate, self.ideal, self.target)
        trial.set_user_attr("cuts", candidate.cuts)
        trial.set_constraint("layers that stand twice", candidate.clashes)
        if candidate.clashes:
            self.optuna.tell(trial, state=TrialState.PRUNED)
            return None
        speedup = self.ideal.speedup(candidate.schedule)
        trial.set_user_attr("ideal_speedup", speedup)
        if self.target is not None:
            trial.set_constraint("ideal speedup that is missing", self.target - speedup)
            if speedup < self.target:
                self.optuna.tell(trial, state=TrialState.PRUNED)
                return None
        for other in self._trials():
            if other.number == trial.number or _candidate(other) != candidate:
                continue
            if other.state == TrialState.COMPLETE:
                trial.set_user_attr("repeats", other.number)
                self.optuna.tell(trial, state=TrialState.PRUNED)  # its score again would draw the sampler to it
                return None
            if other.state == TrialState.RUNNING:
                self.fail(trial, f"trial {other.number} measures the same")
                return None
        return trial, candidate

    def _retire_the_dead(self) -> None:
        """Give up the running trials of processes that are gone, and put their candidates first in the queue."""
        for one in self._trials():
            if one.state == TrialState.RUNNING and not self._lives(one.user_attrs.get("worker")):
                parameters = {**one.system_attrs.get("fixed_params", {}), **one.params}
                self.optuna.tell(one.number, state=TrialState.FAIL)
                self.optuna.enqueue_trial(parameters)
                log.info("trial %d was broken off: it is done again", one.number)

    def _lives(self, worker: str | None) -> bool:
        """Whether the process that holds this worker's lock still runs. None: it ended while it drew."""
        return worker == self.worker or (worker is not None and _is_held(self.folder / "workers" / f"{worker}.lock"))

    def _values(self, score: float, speedup: float) -> list[float]:
        return [score] if self.target is not None else [score, speedup]

    def _trials(self) -> list[FrozenTrial]:
        return self.optuna.get_trials(deepcopy=False)


@contextmanager
def open_study(
    folder: Path,
    identity: dict[str, Any],
    about: dict[str, Any],
    *,
    space: Space,
    ideal: Ideal,
    target: float | None,
    seed: int,
    first: Sequence[Candidate],
) -> Iterator[Study]:
    """The study in `folder`, made if it is not there; this process counts as one of its workers until the block ends.

    identity: what must agree for a study to be gone on with. about: config and provenance, for people. first: what is
    tried before the sampler draws. Raises UserError: a study of another identity, or a folder that cannot be used.
    """
    try:
        (folder / "workers").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: the study's folder cannot be written ({error}); give another with out=") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    worker = uuid4().hex[:12]
    file = folder / "workers" / f"{worker}.lock"
    with locked(file):
        try:
            with locked(folder / ".lock"):
                _check_identity(folder / "study.json", identity, about)
                study = optuna.create_study(
                    storage=JournalStorage(JournalFileBackend(str(_mended_journal(folder, worker)))),
                    study_name=_NAME,
                    directions=["maximize"] if target is not None else ["maximize", "maximize"],
                    load_if_exists=True,
                )
                for candidate in first:
                    study.enqueue_trial(candidate.parameters, skip_if_exists=True)
            yield Study(folder, space, ideal, target, seed, study, worker)
        finally:
            file.unlink(missing_ok=True)


def search(study: Study, score: Callable[[Candidate], Scored], trials: int, goes_on: Callable[[], bool]) -> None:
    """Measure candidates until the study has `trials` of them, or `goes_on` says no.

    score: raises TrialFailed where a candidate cannot be measured; other candidates are tried then. Raises UserError
    after three of these in this process.
    """
    failures = 0
    while goes_on() and (found := study.next(trials)) is not None:
        trial, candidate = found
        log.info("trial %d: schedule %s", trial.number, candidate.schedule)
        try:
            scored = score(candidate)
        except TrialFailed as error:
            study.fail(trial, str(error))
            failures += 1
            log.warning("trial %d failed: %s", trial.number, error)
            if failures == 3:
                raise UserError(f"{study.folder}: three trials failed, the last one: {error}") from error
            continue
        study.tell(trial, candidate, scored)
        log.info("trial %d: score %.2f", trial.number, scored.score)


class TrialFailed(RuntimeError):  # noqa: N818 - an outcome
    """A candidate that could not be measured; the message says why."""


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock file, made if it is not there; waits for it. Raises UserError where the file system knows none."""
    with file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(f"{file}: cannot be locked ({error}); put the study where locks work, with out=") from error
        yield


def _sampler(seed: int, number: int, at_random: bool) -> BaseSampler:
    drawn = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    if at_random:
        return RandomSampler(drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # `group`
        # group: how many cuts there are decides which parameters there are
        return TPESampler(seed=drawn, multivariate=True, group=True)


def _candidate(trial: FrozenTrial) -> Candidate:
    return Candidate(tuple((layer, percent) for layer, percent in trial.user_attrs.get("cuts", [])))


def _check_identity(file: Path, identity: dict[str, Any], about: dict[str, Any]) -> None:
    """Write the study's identity down, or refuse to go on with another one's."""
    now = json.loads(json.dumps(identity, default=str))
    if not file.exists():
        if (file.parent / "journal.log").exists():
            raise UserError(f"{file.parent}: holds a journal but no study.json that says whose; give another out=")
        content = {"fingerprint": fingerprint(now), "identity": now, **about}
        write_whole(file, json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))["identity"]
        differing = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: cannot be read as a study's description ({type(error).__name__}: {error})") from error
    if differing:
        changes = "; ".join(f"{key}: {_short(before.get(key))} there, {_short(now.get(key))} now" for key in differing)
        raise UserError(
            f"{file.parent}: holds a study that differs ({changes}). Its trials do not mix with this one's: give "
            "another folder with out=FOLDER, or leave out= away to have one made"
        )


def _mended_journal(folder: Path, worker: str) -> Path:
    """The journal, without what a kill can leave: a lock that nobody holds, half a last line.

    Optuna waits half a minute for such a lock, and would write its next line behind the half one and read neither.
    """
    journal = folder / "journal.log"
    others = [file for file in (folder / "workers").glob("*.lock") if file.stem != worker]
    if not any(_is_held(file) for file in others):
        journal.with_name("journal.log.lock").unlink(missing_ok=True)
    if journal.exists():
        lock = JournalFileSymlinkLock(str(journal))  # Optuna's own: other processes may be writing
        lock.acquire()
        try:
            with journal.open("r+b") as opened:
                opened.truncate(opened.read().rfind(b"\n") + 1)
        finally:
            lock.release()
    return journal


def _is_held(file: Path) -> bool:
    """Whether a living process holds this lock file."""
    if not file.exists():
        return False
    with file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 80 else f"{text[:77]}..."
