"""A search's study: an Optuna study in files that several processes share and that survive a kill.

study.json       the study's identity, config and provenance
journal.log      Optuna's journal: every trial with its schedule, ideal speedup and score
trials/NAME/     records.jsonl: one `Record` for each example of the tuning half; .lock: held by the process that
                 measures the schedule, so that a trial whose process has died is recognised and repeated
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from filelock import FileLock, Timeout
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from eval.store.folder import check_same, fingerprint
from eval.tune.space import Candidate, Ideal, Space
from lazyllm.errors import UserError, reason_of
from lazyllm.files import write_whole

log = logging.getLogger(__name__)

IN_VAIN = 100  # the search ends after N candidates in a row that are refused or known
_NAME = "schedules"
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Scored:
    """A trial's outcome on the tuning half. score: 0 to 100, mean over tasks. tasks: score by task."""

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
    """Numbers of candidates: measured, refused by their FLOPs, drawn again, failed, and running now."""

    measured: int
    refused: int
    repeated: int
    failed: int
    running: int


class TrialFailed(RuntimeError):  # noqa: N818 - an outcome
    """A candidate could not be measured."""


@dataclass(frozen=True)
class Study:
    """One process's part in the study in `folder`. Open it with `open_study`."""

    folder: Path
    space: Space
    ideal: Ideal
    target: float | None
    seed: int
    optuna: optuna.Study
    _locks: dict[int, FileLock] = field(default_factory=dict)  # of the trials that this process measures

    def next(self, trials: int) -> tuple[Trial, Candidate] | None:
        """A candidate to measure, reserved for this process; None if the study has `trials`, or finds no new one.

        Candidates that the constraints refuse, or that are known, are pruned in Optuna at once.
        """
        with lock_of(self.folder):
            self._retire_the_dead()
            for vain in range(IN_VAIN):
                counts = self.counts()
                if counts.measured + counts.running >= trials:
                    return None
                drawn = self._draw(at_random=vain >= IN_VAIN // 4)
                if drawn is not None:
                    self._locks[drawn[0].number] = lock = lock_of(self._trial_folder(drawn[1]))
                    lock.acquire()
                    return drawn
        log.info("%d candidates in a row were refused or known: end of the search", IN_VAIN)
        return None

    def tell(self, trial: Trial, candidate: Candidate, scored: Scored) -> None:
        """Store a candidate's score."""
        trial.set_user_attr("tasks", dict(scored.tasks))
        trial.set_user_attr("examples", scored.examples)
        speedup = self.ideal.speedup(candidate.schedule)
        self.optuna.tell(trial, [scored.score] if self.target is not None else [scored.score, speedup])
        self._locks.pop(trial.number).release()

    def fail(self, trial: Trial, reason: str) -> None:
        """Store that a candidate could not be measured."""
        trial.set_user_attr("reason", reason)
        self.optuna.tell(trial, state=TrialState.FAIL)
        if trial.number in self._locks:
            self._locks.pop(trial.number).release()

    def counts(self) -> Counts:
        trials = self._trials()
        repeated = sum("repeats" in trial.user_attrs for trial in trials)
        states = [trial.state for trial in trials]
        return Counts(
            measured=states.count(TrialState.COMPLETE),
            refused=states.count(TrialState.PRUNED) - repeated,
            repeated=repeated,
            failed=states.count(TrialState.FAIL),
            running=states.count(TrialState.RUNNING),
        )

    def tried(self) -> list[Tried]:
        """All measured schedules, in order."""
        return [
            Tried(
                _candidate(trial),
                trial.user_attrs["ideal_speedup"],
                Scored(trial.values[0], trial.user_attrs["tasks"], trial.user_attrs["examples"]),
            )
            for trial in self._trials()
            if trial.state == TrialState.COMPLETE
        ]

    def _draw(self, at_random: bool) -> tuple[Trial, Candidate] | None:
        """The next candidate; None if it need not be measured. at_random: drawn uniformly, not near good ones."""
        ended = sum(trial.state in _ENDED for trial in self._trials())
        # a new sampler for each trial, seeded by the study's trials: a resumed search draws as if it had not stopped,
        # and two processes draw different candidates
        self.optuna.sampler = _sampler(self.seed, ended + self.counts().running, at_random)
        trial = self.optuna.ask()
        candidate = self.space.draw(trial)
        if self.target is not None and not candidate.clashes:
            candidate = self.space.fitted(candidate, self.ideal, self.target)
        trial.set_user_attr("cuts", candidate.cuts)
        trial.set_constraint("layers that stand twice", candidate.clashes)
        speedup = 0.0 if candidate.clashes else self.ideal.speedup(candidate.schedule)
        if not candidate.clashes:
            trial.set_user_attr("ideal_speedup", speedup)
            if self.target is not None:
                trial.set_constraint("ideal speedup that is missing", self.target - speedup)
        if candidate.clashes or (self.target is not None and speedup < self.target):
            self.optuna.tell(trial, state=TrialState.PRUNED)
            return None
        for other in self._trials():
            if other.number == trial.number or _candidate(other) != candidate:
                continue
            if other.state == TrialState.COMPLETE:
                trial.set_user_attr("repeats", other.number)
                self.optuna.tell(trial, state=TrialState.PRUNED)  # a repeated score would attract the sampler
                return None
            if other.state == TrialState.RUNNING:
                self.fail(trial, f"trial {other.number} measures the same candidate")
                return None
        return trial, candidate

    def _retire_the_dead(self) -> None:
        """Fail the running trials whose process has died, and enqueue their candidates first."""
        for trial in self._trials():
            if trial.state == TrialState.RUNNING and not self._is_measured(trial):
                if self._trials()[trial.number].state != TrialState.RUNNING:
                    continue  # another process has ended it since
                self.optuna.tell(trial.number, state=TrialState.FAIL)
                self.optuna.enqueue_trial({**trial.system_attrs.get("fixed_params", {}), **trial.params})
                log.info("trial %d was killed: it is repeated", trial.number)

    def _is_measured(self, trial: FrozenTrial) -> bool:
        """Whether a living process measures the trial. A trial that was killed while drawing has no candidate."""
        if "cuts" not in trial.user_attrs:
            return False
        try:
            with lock_of(self._trial_folder(_candidate(trial))).acquire(timeout=0):
                return False
        except Timeout:
            return True

    def _trial_folder(self, candidate: Candidate) -> Path:
        return self.folder / "trials" / candidate.name

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
    """The study in `folder`, which is made if it does not exist.

    identity: must agree with that of an existing study. about: config and provenance, for people. first: candidates to
    try before the sampler draws. Raises UserError for a study of another identity, or a folder that cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    locks: dict[int, FileLock] = {}
    try:
        with lock_of(folder):
            _check_identity(folder / "study.json", identity, about)
            journal = folder / "journal.log"
            # the kernel frees this lock if its process is killed; Optuna's own lock expires after half a minute
            lock: Any = FileLock(folder / "journal.lock")
            with lock:
                _cut_half_line(journal)
            study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(journal), lock)),
                study_name=_NAME,
                directions=["maximize"] if target is not None else ["maximize", "maximize"],
                load_if_exists=True,
            )
            for candidate in first:
                study.enqueue_trial(candidate.parameters, skip_if_exists=True)
    except OSError as error:
        raise UserError(
            f"{folder}: the study's folder cannot be written or locked ({error}): give another one with out=FOLDER"
        ) from error
    try:
        yield Study(folder, space, ideal, target, seed, study, locks)
    finally:
        for held in locks.values():
            held.release()


def lock_of(folder: Path) -> FileLock:
    """The lock of a folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / ".lock")


def search(study: Study, score: Callable[[Candidate], Scored], trials: int, goes_on: Callable[[], bool]) -> None:
    """Measure candidates until the study has `trials` of them, or `goes_on` returns False.

    score: raises TrialFailed if a candidate cannot be measured; the search then tries others. Raises UserError after
    three failures in this process.
    """
    failures = 0
    while goes_on() and (drawn := study.next(trials)) is not None:
        trial, candidate = drawn
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


def _sampler(seed: int, number: int, at_random: bool) -> BaseSampler:
    drawn = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    if at_random:
        return RandomSampler(drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # `group`
        # group: the set of parameters depends on the number of cuts
        return TPESampler(seed=drawn, multivariate=True, group=True)


def _candidate(trial: FrozenTrial) -> Candidate:
    return Candidate(tuple((layer, percent) for layer, percent in trial.user_attrs.get("cuts", [])))


def _check_identity(file: Path, identity: dict[str, Any], about: dict[str, Any]) -> None:
    """Store the study's identity, or refuse a folder with another identity."""
    now = json.loads(json.dumps(identity, default=str))
    if not file.exists():
        if (file.parent / "journal.log").exists():
            raise UserError(f"{file.parent}: holds a journal but no study.json: give another folder with out=")
        content = {"fingerprint": fingerprint(now), "identity": now, **about}
        write_whole(file, json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")
        return
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8"))["identity"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read as a study's description ({reason_of(error)})") from error
    check_same(file.parent, "study", before, now)


def _cut_half_line(journal: Path) -> None:
    """Remove an incomplete last line, left by a kill: Optuna would append its next line to it and read neither."""
    if journal.exists():
        with journal.open("r+b") as opened:
            opened.truncate(opened.read().rfind(b"\n") + 1)
