"""The verb `tune`: search pruning layers and keep ratios on one half of the examples; report on the other half.

lazyllm-bench tune model=tiny dataset=embedded target_speedup=2.3           the best score at an ideal TTFT speedup
lazyllm-bench tune model=tiny dataset=embedded -m target_speedup=1.5,2,3    a study of each
lazyllm-bench tune -m worker=1,2,3,4 hydra/launcher=joblib ...              four processes on one study
lazyllm-bench tune --help                                                   every setting

Every schedule is measured by an ordinary run, which is stored, locked and resumed as any other. The best one and the
references are an ordinary comparison in runs/. The same command resumes a study that was stopped or killed. The study's
folder holds

journal.log        Optuna's journal of all trials
trials/SCHEDULE/   the run of a schedule on the tuning half, without the baseline
schedules.csv      every measured schedule with its ideal speedup and its score on the tuning half, the best first
tuned.yaml         the best schedule, for `method.schedule=tuned/STUDY`
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from omegaconf import DictConfig, OmegaConf

from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.rows import sha256_of
from eval.benchmarks.subsets import HELD_OUT, TUNING
from eval.benchmarks.suite import setting
from eval.run.config import RunConfig, TimingConfig, TrackerConfig, to_run_config
from eval.run.job import job, start
from eval.run.resolved import Resolved, check_early, resolve
from eval.run.targets import FILE, as_yaml
from lazyllm.errors import UserError, require
from lazyllm.files import write_whole
from lazyllm.methods import METHODS, Baseline, Method, by_name
from lazyllm.methods.lazy import DEPTHS

if TYPE_CHECKING:
    import optuna

    from eval.run.prepare import Plan

log = logging.getLogger(__name__)

IN_VAIN = 100  # the search ends after N candidates in a row that are refused or already measured
CODE = ("eval/tune.py", "eval/store/aggregate.py")  # what can change a study besides the code that can change a record
_NOT_HERE = ("compare", "only", "shard", "half", "trace")  # keys of a run that a search refuses
_POWERS = 2**12  # steps of a schedule's strength

Cuts = tuple[tuple[int, int], ...]  # a schedule: (pruning layer, per cent kept), in the order of layers


@dataclass
class TuneConfig(RunConfig):
    """A run's settings, and the search's. `seed` is also the search's; `out` is the study's folder."""

    target_speedup: float | None = setting(
        None, "the ideal TTFT speedup that a schedule must reach; `-m target_speedup=1.5,2,3`: a study of each"
    )
    trials: int = setting(64, "schedules to measure")
    layers: int = setting(3, "maximum number of pruning layers of a schedule")
    timeout_s: float | None = setting(None, "seconds after which this process begins no further trial")
    worker: int | None = setting(None, "the number of this process; `-m worker=1,2,3,4` starts four on one study")


def to_tune_config(config: DictConfig) -> TuneConfig:
    """The composed config, checked as far as possible without a model. Raises UserError."""
    plain, default = to_run_config(config), TuneConfig()
    assert isinstance(plain, TuneConfig)
    searched = " or ".join(name for name, kind in METHODS.items() if kind.dial == "schedule")
    method, target, timeout = by_name(plain.method["name"]), plain.target_speedup, plain.timeout_s
    expected = {
        **{key: (getattr(plain, key) == getattr(default, key), "no such key in a search") for key in _NOT_HERE},
        "timing.paired": (plain.timing.paired is True, "true, as the finalists of a search are paired"),
        "method.name": (method.dial == "schedule", f"method={searched}, with a schedule to find"),
        "method.schedule": (plain.method.get("schedule", "paper") == "paper", "no such key: the search finds it"),
        "timeout_s": (timeout is None or timeout > 0, "more than 0 seconds, or null"),
        **{key: (getattr(plain, key) >= 1, "1 or more") for key in ("trials", "layers")},
        "target_speedup": (target is not None and target > 1, "more than 1, such as target_speedup=2"),
    }
    for key, (holds, instead) in expected.items():
        require(holds, key, OmegaConf.select(config, key), instead)
    return plain


def main(arguments: Sequence[str]) -> int:
    """The verb `tune`. Returns the exit code. Raises UserError."""
    if find_spec("optuna") is None and not {"-h", "--help"} & set(arguments):
        raise UserError("the search needs the package optuna: pip install --editable '.[tune]' in the repository")
    start(tune_job, arguments, TuneConfig)
    return 0


def tune_job(config: DictConfig) -> None:
    """One process's part in the search of a composed config."""
    with job():
        tune(to_tune_config(config))


def schedule_of(cuts: Cuts) -> dict[int, float]:
    """{layer: keep ratio}."""
    return {layer: percent / 100 for layer, percent in cuts}


@dataclass(frozen=True)
class Space:
    """Schedules of 1 to `max_cuts` pruning layers that reach `target`, and their ideal TTFT speedups on many prompts.

    lengths: {dataset: {prompt tokens: number of prompts}}. method: takes the schedules. ratios: per cent, ascending.
    """

    model_config: Any
    method: Method
    lengths: Mapping[str, Mapping[int, int]]
    max_cuts: int
    target: float
    ratios: range = range(5, 96)

    @classmethod
    def of(cls, plan: Plan, config: TuneConfig) -> Space:
        """The search's space. Raises UserError if it cannot reach the target."""
        depth, lengths = plan.model_config.num_hidden_layers, dict[str, Counter[int]]()
        assert config.target_speedup is not None  # as `to_tune_config` makes sure
        for case in plan.cases:
            lengths.setdefault(case.dataset.name, Counter())[len(case.prompt.token_ids)] += 1
        space = cls(plan.model_config, plan.cases[0].method, lengths, config.layers, config.target_speedup)
        fastest = tuple((layer, space.ratios[0]) for layer in range(1, min(config.layers + 1, depth)))
        if space.reaches(fastest):
            return space
        raise UserError(
            f"target_speedup={config.target_speedup}: out of reach. The best ideal speedup of a schedule with "
            f"layers={config.layers} here is {space.speedup(fastest):.2f}: lower it or raise layers"
        )

    def speedup(self, cuts: Cuts) -> float:
        """The ideal speedup, aggregated as measured ones are (`eval.store.aggregate`): a dataset's is the baseline's
        summed FLOPs over the schedule's, a task's the mean over its datasets, the total the mean over tasks."""
        pruned: Method = replace(self.method, schedule=schedule_of(cuts))  # type: ignore[type-var]  # a dataclass
        tasks: dict[str, list[float]] = {}
        for name, counts in self.lengths.items():
            whole, less = (
                sum(times * method.first_token_flops(self.model_config, n) for n, times in counts.items())
                for method in (Baseline(), pruned)
            )
            tasks.setdefault(DATASETS[name].task, []).append(whole / less)
        return mean(map(mean, tasks.values()))

    def reaches(self, cuts: Cuts) -> bool:
        return self.speedup(cuts) >= self.target

    def draw(self, trial: optuna.Trial) -> Cuts:
        """A schedule drawn by the trial's sampler, and fitted to the target."""
        cuts = {}
        for number in range(1, trial.suggest_int("cuts", 1, self.max_cuts) + 1):
            layer = trial.suggest_int(f"layer_{number}", 1, self.model_config.num_hidden_layers - 1)
            cuts[layer] = trial.suggest_int(f"keep_{number}", self.ratios[0], self.ratios[-1], step=self.ratios.step)
        return self.fitted(tuple(sorted(cuts.items())))

    def fitted(self, cuts: Cuts) -> Cuts:
        """The schedule with all keep ratios raised to the least power that reaches the target, then rounded to a ratio.

        So no model runs for a schedule that prunes more than necessary. If the schedule's layers cannot reach the
        target, the result prunes most at these layers.
        """
        greatest = math.log(self.ratios[0] / 100) / math.log(self.ratios[-1] / 100)  # takes the highest to the lowest

        def raised(step: int) -> Cuts:
            keeps = [(layer, 100 * (percent / 100) ** (step / _POWERS * greatest)) for layer, percent in cuts]
            return tuple((layer, min(self.ratios, key=lambda ratio: abs(ratio - keep))) for layer, keep in keeps)

        return raised(bisect_left(range(_POWERS), True, key=lambda step: self.reaches(raised(step))))

    def references(self) -> dict[str, Cuts]:
        """Schedules to compare the tuned one with, {"paper": ..., "uniform": ...}, without those that miss the target.

        paper: pruning after 30, 60 and 90 % of the depth (Figure 4), or after the next earlier layers of
        `lazyllm.methods.lazy.DEPTHS` that reach the target. uniform: after `max_cuts` evenly spaced layers, or the
        fewest more that reach it. Each has one keep ratio: the highest that reaches the target.
        """
        depth, most = self.model_config.num_hidden_layers, self.max_cuts
        even = [[depth * number // (cuts + 1) for number in range(1, cuts + 1)] for cuts in range(most, depth)]
        places = {"paper": [[depth * share // 100 for share in shares] for shares in DEPTHS], "uniform": even}
        references = {}
        for name, choices in places.items():
            equal = (self.fitted(tuple((layer, 70) for layer in sorted({*layers} - {0}))) for layers in choices)
            if (cuts := next(filter(self.reaches, equal), None)) is not None:
                references[name] = cuts
        return references


def tune(config: TuneConfig) -> Path:
    """Search, then report; returns the study's folder. Raises UserError, before a model loads if possible."""
    plain = RunConfig(**{key.name: getattr(config, key.name) for key in fields(RunConfig)})
    unpaired = TimingConfig(paired=False, warmup=0)  # trials are compared by score only
    trials = resolve(
        replace(plain, half=TUNING, out=None, timing=unpaired, tracker=TrackerConfig(), fidelity=None, evidence=False)
    )
    check_early(trials)
    from eval.run.loop import loaded_once, run  # not at the top, as all heavy imports: arguments are checked first
    from eval.run.prepare import prepare
    from eval.store.aggregate import rows_of
    from eval.store.folder import fingerprint

    plan = prepare(trials)
    space = Space.of(plan, config)
    identity = study_identity(config, plan)
    name = f"{plan.folder.name.rpartition('-')[0]}-{space.target:g}x-{fingerprint(identity)[:8]}"
    folder = Path(config.out or f"studies/{name}")
    study = open_study(folder, identity, config)
    log.info("%s: %d examples to tune on, %d schedules measured", folder, len(plan.cases), len(tried_in(study)))
    with loaded_once(trials) as load:

        def score(cuts: Cuts) -> float | None:
            out = folder / "trials" / "-".join(f"{layer}_{percent}" for layer, percent in cuts)
            method = {**config.method, "schedule": schedule_of(cuts)}
            result = run(trials.changed(method=method, out=str(out)), show=False, load=load)
            return None if result.failed or result.results is None else rows_of(result.results.frame)[-1]["score"]

        search(study, space, score, config.trials, config.timeout_s)
    if tried_in(study):
        with FileLock(folder / "report.lock"):  # other processes of the study report too, when they end
            report(config, resolve(replace(plain, half=HELD_OUT, out=None)), space, study, folder)
    else:
        log.warning("%s: no schedule has been measured; the same command resumes the search", folder)
    return folder


def study_identity(config: TuneConfig, plan: Plan) -> dict[str, Any]:
    """What must agree to resume a study: the run's identity, the examples, the objective and the space.

    The number of trials may be raised.
    """
    from eval.run.identity import code_sha256

    run = {key: value for key, value in plan.identity.items() if key not in ("parameters", "paired", "warmup")}
    return run | {
        "method": {key: value for key, value in plan.identity["method"].items() if key != "schedule"},
        "tuned_on": f"{len(plan.cases)} examples, {sha256_of(sorted(case.key for case in plan.cases))[:16]}",
        "search_code": code_sha256(CODE)[:16],
        "target_speedup": config.target_speedup,
        "layers": config.layers,
    }


def open_study(folder: Path, identity: dict[str, Any], config: TuneConfig) -> optuna.Study:
    """The study in a folder, made if there is none. Raises UserError for another identity, or a bad folder."""
    import numpy as np
    import optuna
    from optuna.storages.journal import JournalFileBackend

    from eval.store.folder import check_same

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal = folder / "journal.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # the kernel frees this lock if its process is killed; Optuna's own lock expires after half a minute
        lock: Any = FileLock(folder / "journal.lock")
        with lock:
            journal.touch()
            with journal.open("r+b") as opened:  # Optuna cannot read a line that a full disk left incomplete
                opened.truncate(opened.read().rfind(b"\n") + 1)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal), lock))
        study = optuna.create_study(storage=storage, study_name="schedules", direction="maximize", load_if_exists=True)
        now = json.loads(json.dumps(identity, default=str))
        check_same(folder, "study", study.user_attrs.get("identity", now), now)
        study.set_user_attr("identity", now)
    except OSError as error:
        raise UserError(f"{folder}: the study cannot be written ({error}): give another folder with out=") from error
    # another seed for each process, and for a resumed search
    seed = np.random.SeedSequence([config.seed, config.worker or 0, len(study.trials)]).generate_state(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # group: the set of parameters depends on the number of cuts
        study.sampler = optuna.samplers.TPESampler(seed=int(seed), multivariate=True, group=True)
    return study


def tried_in(study: optuna.Study) -> dict[Cuts, float]:
    """{schedule measured on the tuning half: its score (0 to 100, mean over tasks)}, in order."""
    trials = study.get_trials(deepcopy=False)
    return {_cuts_of(trial): trial.values[0] for trial in trials if trial.state.name == "COMPLETE"}


def _cuts_of(trial: Any) -> Cuts:
    return tuple((layer, percent) for layer, percent in trial.user_attrs.get("cuts", ()))


def search(
    study: optuna.Study,
    space: Space,
    score: Callable[[Cuts], float | None],
    trials: int,
    timeout_s: float | None = None,
) -> None:
    """Measure schedules until the study has `trials` of them; none begins after `timeout_s` seconds.

    score: None if the schedule could not be measured; it counts as a trial of this process. References come first, then
    trials that an earlier process left unfinished. Several processes may measure a few schedules more.
    """
    from optuna import TrialPruned
    from optuna.trial import TrialState

    from eval.store.folder import InUseError

    known, begun = tried_in(study), len(study.trials)
    if len(known) >= trials:
        return
    broken = [_cuts_of(trial) for trial in study.trials if trial.state in (TrialState.RUNNING, TrialState.FAIL)]
    for cuts in [*space.references().values(), *broken]:
        if 0 < len(cuts) <= space.max_cuts and cuts not in known:
            drawn = {f"layer_{number}": layer for number, (layer, _) in enumerate(cuts, start=1)}
            drawn |= {f"keep_{number}": percent for number, (_, percent) in enumerate(cuts, start=1)}
            study.enqueue_trial({"cuts": len(cuts), **drawn})

    def objective(trial: optuna.Trial) -> Any:
        cuts = space.draw(trial)
        trial.set_user_attr("cuts", cuts)
        trial.set_constraint("ideal speedup that is missing", space.target - space.speedup(cuts))
        if not space.reaches(cuts) or cuts in tried_in(study):
            raise TrialPruned  # a repeated score would attract the sampler
        try:
            value = score(cuts)
        except InUseError as error:  # another process measures the same schedule
            raise TrialPruned from error
        log.info("trial %d: schedule %s, score %s", trial.number, schedule_of(cuts), value)
        return value

    def stop(study: optuna.Study, _: Any) -> None:
        all_trials = study.get_trials(deepcopy=False)
        failed = sum(trial.state == TrialState.FAIL and trial.number >= begun for trial in all_trials)
        in_vain = [trial.state for trial in all_trials[begun:][-IN_VAIN:]] == [TrialState.PRUNED] * IN_VAIN
        if in_vain:
            log.info("%d schedules in a row were refused or already measured: end of the search", IN_VAIN)
        if in_vain or len(tried_in(study)) + failed >= trials:
            study.stop()

    study.optimize(objective, timeout=timeout_s, callbacks=[stop])


def ranked(tried: Mapping[Cuts, float], space: Space) -> list[Cuts]:
    """The schedules by score, the best first; of equal ones, the slowest first."""
    return sorted(tried, key=lambda cuts: (-tried[cuts], space.speedup(cuts)))


def report(config: TuneConfig, held_out: Resolved, space: Space, study: optuna.Study, folder: Path) -> None:
    """Compare the best schedule and the references on the held-out half, and write the study's files.

    Raises UserError if examples failed.
    """
    import pandas as pd

    from eval.analysis.columns import with_ends
    from eval.run.loop import compare
    from eval.store.aggregate import drawn_means, on_common_examples
    from eval.store.folder import fingerprint

    tried = tried_in(study)
    order = ranked(tried, space)
    rows = [(json.dumps(schedule_of(cuts)), space.speedup(cuts), tried[cuts]) for cuts in order]
    table = pd.DataFrame(rows, columns=["schedule", "ideal_speedup", "tuning_score"])
    write_whole(folder / "schedules.csv", table.to_csv(index=False, lineterminator="\n"))
    tuned = order[0]
    finalists = space.references() | {"tuned": tuned}
    methods = {name: {**config.method, "schedule": schedule_of(cuts)} for name, cuts in finalists.items()}
    results = compare(held_out.changed(method={}, compare=methods, label=folder.name))
    if any(result.failed for result in results):
        raise UserError("held-out examples failed, so no schedule is written: the same command tries them again")
    named = zip(finalists, results, strict=True)
    examples = [result.results.frame.assign(label=name) for name, result in named if result.results]
    scores = on_common_examples(pd.concat(examples), "score")
    drawn = dict(zip(scores.columns, drawn_means(scores).T, strict=True))
    held_out_score, speedup, schedule = with_ends(drawn["tuned"]), space.speedup(tuned), schedule_of(tuned)
    about = {
        "model": Path(config.model.name).name,
        "datasets": sorted(space.lengths),
        "target_speedup": space.target,
        "ideal_speedup": round(speedup, 3),
        "tuning_score": round(tried[tuned], 2),
        "held_out_score": [round(value, 2) for value in held_out_score],
        "study": fingerprint(study.user_attrs["identity"]),
    }
    write_whole(folder / FILE, as_yaml(folder.name, schedule, space.model_config.num_hidden_layers, about))
    print(f"tuned {schedule}: ideal speedup {speedup:.2f}, held-out score {held_out_score[0]:.2f}", end="")
    if "paper" in drawn:
        print(", {:+.2f} [{:+.2f}, {:+.2f}] to paper's".format(*with_ends(drawn["tuned"] - drawn["paper"])), end="")
    print(f"\nRun it: python run.py method.schedule=tuned/{folder}")
