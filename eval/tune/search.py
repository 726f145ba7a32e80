"""The search: from a config to a study with its front and schedules."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedModel

from eval.benchmarks.subsets import RULE, TUNING
from eval.run import device_lock, identity
from eval.run.config import TimingConfig
from eval.run.loop import free, load_model, released
from eval.run.measure import Bench, Case
from eval.run.prepare import Plan, prepare
from eval.run.resolved import resolve
from eval.store.aggregate import rows_of
from eval.store.folder import RunStore, fingerprint
from eval.store.runs import example_rows
from eval.tune.findings import report
from eval.tune.settings import TuneConfig, as_run
from eval.tune.space import Candidate, Ideal, Space, references, with_schedule
from eval.tune.study import Scored, TrialFailed, open_study, search
from lazyllm.errors import UserError, reason_of
from lazyllm.models.load import load_config

# Code that can change a study, in addition to the code that can change a record
CODE = ("eval/tune/space.py", "eval/tune/study.py", "eval/store/aggregate.py")

log = logging.getLogger(__name__)


def tune(config: TuneConfig) -> Path:
    """Search, then report; returns the study's folder.

    If several processes work on one study, the one that ends its last trial reports. Raises UserError, before a model
    loads if possible.
    """
    started = time.monotonic()
    # trials are compared by score only, so they need no paired baseline
    plan = prepare(resolve(as_run(config, out=None, half=TUNING, timing=TimingConfig(paired=False, warmup=0))))
    model_config = load_config(plan.run.spec)
    space = Space(model_config.num_hidden_layers, config.layers)
    prompts = [(case.dataset.name, len(case.prompt.token_ids)) for case in plan.cases]
    ideal = Ideal.of(model_config, prompts, plan.cases[0].method)
    _check_reach(config, space, ideal)
    beside = references(space, ideal, config.target_speedup)
    identity = study_identity(config, plan)
    folder = Path(config.out) if config.out else Path("studies") / _folder_name(config, plan, identity)
    about = {"config": asdict(config), "provenance": plan.about["provenance"], "split": RULE}
    with open_study(
        folder,
        identity,
        about,
        space=space,
        ideal=ideal,
        target=config.target_speedup,
        seed=config.seed,
        first=[candidate for candidate in beside.values() if space.holds(candidate)],
    ) as study:
        log.info("%s: %d examples to tune on, %s", folder, len(plan.cases), study.counts())
        with released(plan.devices), _Scorer(plan, folder) as score:  # before the finalists are timed
            search(study, score, config.trials, lambda: _has_time(config.timeout_s, started))
        with FileLock(folder / "report.lock"):
            counts = study.counts()
            if counts.running:
                log.info("%s: %d trials run in other processes; the last process reports", folder, counts.running)
            elif not counts.measured:
                log.warning("%s: no schedule has been measured; the same command resumes the search", folder)
            else:
                report(config, study, beside, model_config.num_hidden_layers)
    return folder


def study_identity(config: TuneConfig, plan: Plan) -> dict[str, Any]:
    """Everything that must agree to resume a study: the run's identity, the examples, the objective and the space.

    The number of trials is not part of it and may be raised.
    """
    keys = "\n".join(f"{dataset}\0{example}" for dataset, example in sorted(case.key for case in plan.cases))
    method = {key: value for key, value in plan.identity["method"].items() if key != "schedule"}
    run = {key: value for key, value in plan.identity.items() if key not in ("parameters", "paired", "warmup")}
    return run | {
        "method": method,
        "tuned_on": f"{len(plan.cases)} examples, {hashlib.sha256(keys.encode()).hexdigest()[:16]}",
        "search_code": identity.code_sha256(CODE)[:16],
        "target_speedup": config.target_speedup,
        "layers": config.layers,
    }


class _Scorer:
    """Scores candidates on the tuning half; the model loads with the first new example.

    A candidate's records are stored in `trials/NAME`, so a killed trial resumes with the next example.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._model: PreTrainedModel | None = None

    def __enter__(self) -> Callable[[Candidate], Scored]:
        return self._score

    def __exit__(self, *_: object) -> None:
        self._model = None

    def _score(self, candidate: Candidate) -> Scored:
        folder = self._folder / "trials" / candidate.name
        folder.mkdir(parents=True, exist_ok=True)
        store = RunStore(folder)
        todo = [case for case in self._plan.cases if case.key not in store.records]
        with device_lock.held(self._plan.devices, f"process {os.getpid()} for {folder}"):  # disturb no timed run
            for case in todo:
                self._measure(replace(case, method=with_schedule(case.method, candidate.schedule)), store)
        rows = rows_of(example_rows([store.records[case.key] for case in self._plan.cases]).assign(seed=0))
        return Scored(
            score=rows[-1]["score"],
            tasks={row["name"]: row["score"] for row in rows if row["level"] == "task"},
            examples=len(self._plan.cases),
        )

    def _measure(self, case: Case, store: RunStore) -> None:
        if self._model is None:
            self._model = load_model(self._plan.run)
        bench = Bench(self._model, self._plan.tokenizer, self._plan.run.chat, paired=False)
        try:
            store.append(bench.measure(case, baseline_first=True))
        except UserError:
            raise
        except Exception as error:  # out of memory, or logits that are not finite: no score, rather than 0
            free(*self._plan.devices)
            raise TrialFailed(f"{case.dataset.name}, row {case.example.id}: {reason_of(error)}") from error


def _check_reach(config: TuneConfig, space: Space, ideal: Ideal) -> None:
    if space.max_cuts >= space.num_layers:
        raise UserError(
            f"layers={config.layers}: expected less than the model's {space.num_layers}, as pruning after the last one "
            "saves nothing"
        )
    best = ideal.speedup(space.fastest.schedule)
    if config.target_speedup is not None and config.target_speedup > best:
        raise UserError(
            f"target_speedup={config.target_speedup}: out of reach. The best ideal speedup of a schedule with "
            f"layers={config.layers} here is {best:.2f} ({space.fastest.schedule}): lower it or raise layers"
        )


def _has_time(timeout_s: float | None, started: float) -> bool:
    return timeout_s is None or time.monotonic() - started < timeout_s


def _folder_name(config: TuneConfig, plan: Plan, identity: dict[str, Any]) -> str:
    aim = "front" if config.target_speedup is None else f"{config.target_speedup:g}x"
    return f"{plan.folder.name.rpartition('-')[0]}-{aim}-{fingerprint(identity)[:8]}"
