"""The command `tune`: search pruning layers and keep ratios on half of the examples; report on the other half.

lazyllm-bench tune model=tiny dataset=embedded target_speedup=2.3           the best score at an ideal TTFT speedup
lazyllm-bench tune model=tiny dataset=embedded -m target_speedup=1.5,2,3    a study of each

The halves are every second example of each dataset. Each schedule that Optuna draws is measured by an ordinary run in
`trials/`. The best one and one like the paper's are compared in runs/. The same command resumes. The study's folder
also holds Optuna's `study.db`, `schedules.csv` (ideal speedups, scores) and `tuned.yaml`, for
`method.schedule=tuned/STUDY`.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.rows import sha256_of
from eval.benchmarks.suite import setting
from eval.run.asked import Asked, ask
from eval.run.config import to_run_config
from eval.run.job import job, start
from eval.run.settings import RunConfig, TrackerConfig
from eval.run.targets import FILE, as_yaml
from eval.store.folder import check_same, fingerprint
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError, require
from lazyllm.files import write_whole
from lazyllm.methods import Baseline, Method, by_name
from lazyllm.methods.lazy import reference_layers
from lazyllm.presets import PRESETS

if TYPE_CHECKING:
    import optuna

    from eval.run.run import Run

log = logging.getLogger(__name__)

Cuts = tuple[tuple[int, int], ...]  # a schedule: (pruning layer, per cent kept), in the order of layers
Score = Callable[[Cuts], float]  # of a schedule; NaN if it could not be measured, which Optuna leaves out


@dataclass
class TuneConfig(RunConfig):
    """A run's settings, and the search's. `seed` is also the search's; `out` is the study's folder."""

    target_speedup: float | None = setting(None, "ideal TTFT speedup to reach; `-m target_speedup=1.5,2`: two studies")
    trials: int = setting(64, "schedules to measure")
    layers: int = setting(3, "maximum number of pruning layers of a schedule")
    timeout_s: float | None = setting(None, "seconds after which no further trial begins")


def to_tune_config(config: DictConfig) -> TuneConfig:
    """The composed config, checked as far as possible without a model. Raises UserError."""
    plain, default = to_run_config(config), TuneConfig()
    assert isinstance(plain, TuneConfig)
    refused = ("compare", "trace")
    expected = {
        **{key: (getattr(plain, key) == getattr(default, key), "no such key in a search") for key in refused},
        "baseline": (plain.baseline, "true, as the finalists of a search are compared with it"),
        "method.name": (
            by_name(plain.method["name"]).target_parameter == "schedule",
            "method=lazy, or one with a schedule",
        ),
        "method.schedule": (plain.method.get("schedule", "paper") == "paper", "no such key: the search finds it"),
        "timeout_s": (plain.timeout_s is None or plain.timeout_s > 0, "more than 0 seconds, or null"),
        **{key: (getattr(plain, key) >= 1, "1 or more") for key in ("trials", "layers")},
        "target_speedup": ((plain.target_speedup or 0) > 1, "more than 1, such as target_speedup=2"),
    }
    for key, (holds, instead) in expected.items():
        require(holds, key, OmegaConf.select(config, key), instead)
    return plain


def main(arguments: Sequence[str]) -> int:
    """The command `tune`. Returns the exit code. Raises UserError."""
    if find_spec("optuna") is None and not {"-h", "--help"} & set(arguments):
        raise UserError("the search needs the package optuna: pip install --editable '.[tune]' in the repository")

    def work(config: DictConfig) -> None:
        with job():
            tune(to_tune_config(config))

    start(work, arguments, TuneConfig)
    return 0


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

    @property
    def places(self) -> list[int]:
        """The layers after which tokens may be dropped: those that see the whole prompt, but for the last layer."""
        depth = Depth.of(self.model_config)
        return [layer for layer in depth.full if layer < depth.count]

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
        cuts, places = {}, self.places
        for number in range(1, trial.suggest_int("cuts", 1, self.max_cuts) + 1):
            place = trial.suggest_int(f"layer_{number}", 1, len(places))
            percent = trial.suggest_int(f"keep_{number}", self.ratios[0], self.ratios[-1], step=self.ratios.step)
            cuts[places[place - 1]] = percent
        return self.fitted(tuple(sorted(cuts.items())))

    def parameters(self, cuts: Cuts) -> dict[str, int]:
        """The parameters of which `draw` makes the schedule; a layer by its number among `places`."""
        chosen = {"cuts": len(cuts)}
        for number, (layer, percent) in enumerate(cuts, start=1):
            chosen |= {f"layer_{number}": self.places.index(layer) + 1, f"keep_{number}": percent}
        return chosen

    def fitted(self, cuts: Cuts) -> Cuts:
        """The schedule with the highest keep ratios that reach the target: all raised or lowered by the same per cent,
        but within `ratios`. If the schedule's layers cannot reach the target, the result prunes most at them."""
        least, most = self.ratios[0], self.ratios[-1]
        steps = range(least - most, most - least + 1, self.ratios.step)
        lowered = [tuple((layer, min(max(percent - by, least), most)) for layer, percent in cuts) for by in steps]
        return lowered[bisect_left(lowered, True, hi=len(lowered) - 1, key=self.reaches)]

    def references(self) -> dict[str, Cuts]:
        """{"paper": the schedule to compare the tuned one with}, or {}. Its one keep ratio is the highest that reaches
        the target, after 30, 60 and 90 % of the depth (Figure 4) or the next earlier `reference_layers` that can."""
        for layers in reference_layers(Depth.of(self.model_config)):
            cuts = self.fitted(tuple((layer, self.ratios[-1]) for layer in layers))
            if self.reaches(cuts):
                return {"paper": cuts}
        return {}


def tune(config: TuneConfig) -> Path:
    """Search, then report; returns the study's folder. Raises UserError, before a model loads if possible."""
    plain = RunConfig(**{key.name: getattr(config, key.name) for key in fields(RunConfig)})
    quiet: Any = {"baseline": False, "warmup": 0, "tracker": TrackerConfig(), "fidelity": None}
    asked = ask(replace(plain, out=None, **quiet)).check()  # compared by score only
    model = asked.subject
    from eval.run.identity import code_sha256  # not at the top, as all heavy imports: arguments are checked first
    from eval.run.loop import measure
    from eval.run.run import prepare
    from eval.store.aggregate import rows_of

    trials = _take_half(prepare(asked), 0)
    lengths = dict[str, Counter[int]]()
    for case in trials.cases:
        lengths.setdefault(case.dataset.name, Counter())[len(case.prompt.token_ids)] += 1
    assert config.target_speedup is not None  # as `to_tune_config` makes sure
    method = trials.arms[0].method(asked.datasets[0].name)
    space = Space(model.model_config, method, lengths, config.layers, config.target_speedup)
    fastest = space.speedup(tuple((layer, space.ratios[0]) for layer in space.places[: config.layers]))
    within = f"less, as the best ideal speedup with layers={config.layers} is {fastest:.2f}: lower it or raise layers"
    require(fastest >= space.target, "target_speedup", space.target, within)
    # what must agree to resume a study; the number of trials may be raised
    identity = trials.identity | {
        "tuned_on": f"{len(trials.cases)} examples, {sha256_of(sorted(case.key for case in trials.cases))[:16]}",
        "search_code": code_sha256(("eval/tune.py", "eval/store/aggregate.py")),
        "target_speedup": space.target,
        "layers": config.layers,
    }
    name = f"{trials.folder.name.rpartition('-')[0]}-{space.target:g}x-{fingerprint(identity)[:8]}"
    folder = Path(config.out or f"studies/{name}")
    study = open_study(folder, identity, config.seed)
    log.info("%s: %d examples to tune on, %d schedules measured", folder, len(trials.cases), len(tried_in(study)))
    with model.loaded_once() as load:

        def score(cuts: Cuts) -> float:
            label = "-".join(f"{layer}_{percent}" for layer, percent in cuts)
            arms = {label: {**config.method, "schedule": schedule_of(cuts)}}
            trial = prepare(asked.changed(compare=arms, out=str(folder / "trials" / label)))
            run = measure(_take_half(trial, 0), show=False, load=load)
            return math.nan if run.failed else rows_of(run.rows, run.rows)[-1]["score"]

        search(study, space, score, config.trials, config.timeout_s)
    if tried_in(study):
        report(config, ask(replace(plain, out=None)), space, study, folder)
    else:
        log.warning("%s: no schedule has been measured; the same command resumes the search", folder)
    return folder


def _take_half(run: Run, first: int) -> Run:
    """Leave every second example of each dataset. first: 0 for the half to search on, 1 for the other.

    Raises UserError if a dataset has a single example.
    """
    datasets = {name: [*cases] for name, cases in groupby(run.cases, key=lambda case: case.dataset.name)}
    for name, cases in datasets.items():
        require(len(cases) > 1, "limit", run.asked.limit, f"2 or more examples of {name}, one for each half")
    return replace(run, cases=tuple(chain.from_iterable(cases[first::2] for cases in datasets.values())))


def open_study(folder: Path, identity: dict[str, Any], seed: int) -> optuna.Study:
    """The study in a folder, made if there is none. Raises UserError for another identity, or a bad folder."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(
            storage=f"sqlite:///{folder / 'study.db'}",
            study_name="schedules",
            direction="maximize",
            load_if_exists=True,
        )
    except (OSError, optuna.exceptions.StorageInternalError) as error:
        raise UserError(f"{folder}: the study cannot be written ({error}): give another folder with out=") from error
    now = json.loads(json.dumps(identity, default=str))
    check_same(folder, "study", study.user_attrs.get("identity", now), now)
    study.set_user_attr("identity", now)
    # another seed if the search is resumed; groups: by `cuts`
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), multivariate=True, group=True)
    return study


def tried_in(study: optuna.Study) -> dict[Cuts, Any]:
    """{schedule: its score (0 to 100, mean over tasks)} of all measured."""
    trials = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    return {tuple(map(tuple, trial.user_attrs["cuts"])): trial.value for trial in trials}


def search(study: optuna.Study, space: Space, score: Score, trials: int, timeout_s: float | None = None) -> None:
    """Measure schedules until the study has `trials` of them; none begins after `timeout_s` seconds.

    The reference comes first. A schedule that misses the target, or was measured, counts as pruned. Optuna draws at
    most 20 candidates for each schedule to measure, as a small space has few.
    """
    import optuna

    if len(tried_in(study)) >= trials:
        return
    if not study.trials:
        for cuts in space.references().values():
            if len(cuts) <= space.max_cuts:
                study.enqueue_trial(space.parameters(cuts))

    def objective(trial: optuna.Trial) -> float:
        cuts = space.draw(trial)
        trial.set_user_attr("cuts", cuts)
        if not space.reaches(cuts) or cuts in tried_in(study):
            raise optuna.TrialPruned
        value = score(cuts)
        log.info("trial %d: schedule %s, score %s", trial.number, schedule_of(cuts), value)
        return value

    enough = optuna.study.MaxTrialsCallback(trials)  # of those that were measured
    study.optimize(objective, n_trials=20 * trials, timeout=timeout_s, callbacks=[enough])


def ranked(tried: Mapping[Cuts, float], space: Space) -> list[Cuts]:
    """The schedules by score, the best first; of equal ones, the slowest first."""
    return sorted(tried, key=lambda cuts: (-tried[cuts], space.speedup(cuts)))


def report(config: TuneConfig, test: Asked, space: Space, study: optuna.Study, folder: Path) -> None:
    """Compare the best schedule and the reference on the other half; write the files. Raises UserError if it failed."""
    import pandas as pd

    from eval.analysis.columns import with_ends
    from eval.run.loop import measure
    from eval.run.run import prepare
    from eval.store.aggregate import NO_INTERVAL, drawn_means, on_common_examples

    tried = tried_in(study)
    order = ranked(tried, space)
    rows = [(json.dumps(schedule_of(cuts)), space.speedup(cuts), tried[cuts]) for cuts in order]
    table = pd.DataFrame(rows, columns=["schedule", "ideal_speedup", "dev_score"])
    write_whole(folder / "schedules.csv", table.to_csv(index=False, lineterminator="\n"))
    references = space.references()
    # a run refuses two arms of equal settings: a reference that is the best one has no arm of its own
    finalists = {name: cuts for name, cuts in references.items() if cuts != order[0]} | {"tuned": order[0]}
    methods = {name: {**config.method, "schedule": schedule_of(cuts)} for name, cuts in finalists.items()}
    compared = prepare(test.changed(compare=methods, label=f"tuned_{space.target:g}x"))
    run = measure(_take_half(compared, 1))
    if run.failed:
        raise UserError("answers failed, so no schedule is written: the same command tries them again")
    frame: Any = run.rows
    examples = frame[frame["arm"].isin([*finalists])]
    scores = on_common_examples(examples.assign(label=examples["arm"]), "score")
    drawn = dict(zip(scores.columns, drawn_means(scores).T, strict=True))
    score, schedule = with_ends(drawn["tuned"]), schedule_of(order[0])
    about = {"model": Path(config.model.name).name, "datasets": sorted(space.lengths), "target_speedup": space.target}
    about["test_score"] = [None if pd.isna(value) else round(value, 2) for value in score]
    write_whole(folder / FILE, as_yaml(folder.name, schedule, space.model_config.num_hidden_layers, about))
    print(f"tuned {schedule}: ideal speedup {space.speedup(order[0]):.2f}, score on test {score[0]:.2f}", end="")
    if "paper" in drawn:
        more, *ends = with_ends(drawn["tuned"] - drawn["paper"])
        interval = "[{:+.2f}, {:+.2f}]".format(*ends) if ends[0] == ends[0] else f"(no interval: {NO_INTERVAL})"
        print(f", {more:+.2f} {interval} to paper's", end="")
    elif references:
        print("; it is the one like the paper's", end="")
    model = config.model.name
    chosen = [f"model={model}"] if model in PRESETS else ["model=custom", f"model.name={model}"]
    command = shlex.join([*chosen, f"method.schedule=tuned/{folder}"])
    print(f"\nRun it: python run.py {command}")
