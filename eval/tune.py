"""The command `tune`: search LazyLLM's pruning layers and keep ratios at an ideal TTFT speedup.

lazyllm-bench tune model=tiny dataset=embedded limit=4 -m target_speedup=1.5,2    (a study of each)

Every other row decides: the best schedule has the least KL of the baseline's answer (`fidelity=answer`), then of the
gold one. The first is the default at this speedup. Both are then measured on the other rows. The same command resumes.
The study's folder holds a run of each schedule, and `tuned.yaml`, for `method.schedule=tuned/FOLDER`, with the rows.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any, cast

from omegaconf import DictConfig

from eval.benchmarks.suite import setting
from eval.run.asked import ask
from eval.run.config import to_run_config
from eval.run.job import job, start
from eval.run.settings import RunConfig
from eval.run.targets import FILE, as_yaml
from eval.store.folder import check_same, fingerprint
from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import nearest_ratio
from lazyllm.errors import FailedExamplesError, UserError, require
from lazyllm.files import write_whole
from lazyllm.methods import Lazy, by_name

CUTS = 9  # the most pruning layers of a schedule
Schedule = dict[int, float]  # {layer: keep ratio}
KLs = tuple[float, float]  # of the baseline's answer, of the gold one: means over rows


@dataclass
class TuneConfig(RunConfig):
    """A run's settings, and the search's. `seed` is also the search's; `out` is the study's folder."""

    target_speedup: float | None = setting(None, "ideal TTFT speedup to reach; `-m target_speedup=1.5,2`: two studies")
    trials: int = setting(32, "schedules to measure")


def to_tune_config(config: DictConfig) -> TuneConfig:
    """The composed config, checked as far as possible without a model. Raises UserError."""
    plain: Any = to_run_config(config)
    name, schedule = plain.method["name"], plain.method.get("schedule", "paper")
    require(plain.compare is None, "compare", plain.compare, "no such key in a search")
    require(plain.baseline, "baseline", plain.baseline, "true, as schedules are compared with it")
    require(issubclass(by_name(name), Lazy), "method.name", name, "method=lazy, or one that inherits from it")
    require(schedule == "paper", "method.schedule", schedule, "no such key: the search finds it")
    require(plain.trials >= 1, "trials", plain.trials, "1 or more")
    require((plain.target_speedup or 0) > 1, "target_speedup", plain.target_speedup, "more than 1, such as 1.5")
    return plain


def main(arguments: Sequence[str]) -> int:
    """The command `tune`. Returns the exit code. Raises UserError."""
    start(job()(lambda config: tune(to_tune_config(config))), arguments, TuneConfig)
    return 0


def draw(speedup: Callable[[Schedule], float], target: float, depth: Depth, trial: Any) -> Schedule | None:
    """A schedule that keeps `ratio ** power` after each of its layers, by the ratio that meets the target, if any does.

    speedup: the ideal one of a schedule. trial: Optuna's, which chooses the number of layers, the first and the last,
    between which they are spread evenly, and how the powers rise or fall from 1 in the middle.
    """
    cuts, first = trial.suggest_int("cuts", 1, CUTS), trial.suggest_int("first", 1, depth.count - 1)
    last, slope = trial.suggest_int("last", 1, depth.count - 1), trial.suggest_float("slope", -2, 2)
    shares = [cut / max(cuts - 1, 1) for cut in range(cuts)]
    powers = {depth.nearest(round(first + share * (last - first))): 2 ** (slope * (2 * share - 1)) for share in shares}

    def schedule(ratio: float) -> Schedule:
        return {layer: max(round(ratio**power, 4), 0.0001) for layer, power in sorted(powers.items())}

    ratio = nearest_ratio(lambda ratio: speedup(schedule(ratio)), target)
    return None if ratio is None else schedule(ratio)


def search(study: Any, drawn: Any, kls: Callable[[Schedule], KLs], default: Schedule, trials: int) -> Schedule:
    """The best of `trials` schedules, the default first; of equal ones, the first. Up to 20 are drawn for each."""
    import optuna

    def objective(trial: optuna.Trial) -> float:
        schedule = drawn(trial)
        schedule = schedule if done() else default  # what is drawn first is enqueued as the nearest to it
        if schedule is None:
            raise optuna.TrialPruned
        measured = kls(schedule)
        logging.info("%s: KL of the answer %.4f, of the gold one %.4f", schedule, *measured)
        trial.set_user_attr("measured", [measured, [*schedule.items()]])
        return measured[0]

    def done() -> list[Any]:
        return [trial.user_attrs["measured"] for trial in study.trials if trial.state.name == "COMPLETE"]

    if not done():
        study.enqueue_trial({"cuts": len(default), "first": min(default), "last": max(default), "slope": 0.0})
    study.optimize(objective, 20 * (trials - len(done())), callbacks=[optuna.study.MaxTrialsCallback(trials)])
    return dict(min(done(), key=lambda found: found[0])[1])


def tune(config: TuneConfig) -> Path:
    """Search, then measure on the other rows; returns the study's folder. Raises UserError, FailedExamplesError."""
    asked = ask(replace(config, fidelity="answer", warmup=0, out=config.out or "studies")).check()
    if find_spec("optuna") is None:
        raise UserError("the search needs the package optuna: pip install --editable '.[tune]' in the repository")
    import optuna  # this and others not at the top: arguments are checked first

    from eval.run.loop import measure
    from eval.run.run import prepare

    run, subject, target = prepare(asked), asked.subject, config.target_speedup or 0
    require(len(run.cases) > 1, "limit", config.limit, "two rows or more: every other one decides")
    cases = {"rows": run.cases[::2], "other_rows": run.cases[1::2]}
    rows = {part: [" ".join(case.key) for case in chosen] for part, chosen in cases.items()}
    shape, method = subject.shape, cast(Any, run.arms[-1].method(run.cases[0].dataset.name))
    depth, tokens = Depth.of(shape), round(mean(len(case.prompt.token_ids) for case in run.cases))
    default: Any = method.solve({}, shape, tokens, target)
    require(default is not None, "target_speedup", target, "less, as the default's layers cannot reach it")
    identity = run.identity | rows | {"target_speedup": target}
    folder = Path(config.out or f"studies/{subject.name}-{target:g}x-{fingerprint(identity)[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(storage=f"sqlite:///{folder}/study.db", study_name="schedules", load_if_exists=True)
    check_same(folder, "study", study.user_attrs.get("identity", identity), identity)
    study.set_user_attr("identity", identity)
    study.sampler = optuna.samplers.TPESampler(seed=config.seed + len(study.trials), multivariate=True)
    with subject.loaded_once() as load:

        def kls(part: str, schedule: Schedule) -> KLs:
            out = folder / part / "-".join(f"{layer}_{ratio}" for layer, ratio in schedule.items())
            trial = prepare(asked.changed(compare={"tuned": {**config.method, "schedule": schedule}}, out=str(out)))
            measured = measure(replace(trial, cases=cases[part]), show=False, load=load)
            if measured.failed:
                raise FailedExamplesError(measured.failures)
            found: Any = [visit.answers["tuned"] for visit in measured.visits if "tuned" in visit.answers]
            return mean(one.answer_kl for one in found), mean(one.gold_kl for one in found)

        drawn = partial(draw, lambda one: replace(method, schedule=one).ideal_speedup(shape, tokens), target, depth)
        best = search(study, drawn, partial(kls, "rows"), default, config.trials)
        both = (("tuned", best), ("default", default))
        measured = {f"{name} on {part}": [*kls(part, schedule)] for part in cases for name, schedule in both}
    about = {"model": subject.name, "target_speedup": target, **measured, **rows}
    write_whole(folder / FILE, as_yaml(str(folder), best, depth.count, about))
    print((folder / FILE).read_text(encoding="utf-8"), end="")
    return folder
