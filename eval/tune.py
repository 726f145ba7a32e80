"""The command `tune`: search LazyLLM's pruning layers and keep ratios at an ideal TTFT speedup.

lazyllm-bench tune model=tiny dataset=embedded limit=4 -m target_speedup=1.5,2    (a study of each)

Every other row decides: the best schedule has the least KL of the baseline's answer
(`fidelity=answer`), then of the gold one. The first is the default at this speedup. Both are then
measured on the other rows. The same command resumes. The study's folder holds a run of each
schedule, and `tuned.yaml` with the best one and the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any, cast

import yaml
from pydantic import Field, model_validator

from eval.benchmarks.datasets import format_value
from eval.config import ArmSettings, RunConfig
from eval.run.check import check
from eval.run.job import start
from eval.settings import Positive
from eval.store.folder import check_same, fingerprint
from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import nearest_ratio
from lazyllm.errors import FailedExamplesError, UserError, require
from lazyllm.files import write_whole
from lazyllm.methods import Lazy, by_name, settings_of

if TYPE_CHECKING:
    from eval.benchmarks.prompts import Prompt
    from eval.run.bench import Load

FILE = "tuned.yaml"  # of a study
CUTS = 9  # the most pruning layers of a schedule
Schedule = dict[int, float]  # {layer: keep ratio}
KLs = tuple[float, float]  # of the baseline's answer, of the gold one: means over rows


class TuneConfig(RunConfig):
    """A run's settings, and the search's. `seed` is also the search's; `out` is the study's
    folder.
    """

    target_speedup: Annotated[float, Field(gt=1)] = Field(
        description="ideal TTFT speedup to reach; `-m target_speedup=1.5,2`: two studies"
    )
    trials: Positive = Field(default=32, description="schedules to measure")

    @model_validator(mode="after")
    def _is_a_search(self) -> TuneConfig:
        [arm, *others] = self.arms
        given = (arm.model_extra or {}).get("schedule", "paper")
        speedup = self.speedup if arm.speedup is None else arm.speedup
        if others or not issubclass(by_name(arm.name), Lazy):
            names = ", ".join(arm.name for arm in self.arms)
            raise ValueError(f"arms={names}: expected method=lazy, or one that inherits from it")
        if given != "paper":
            raise ValueError(f"method.schedule={given}: leave it out, as the search finds it")
        if speedup is not None:
            raise ValueError(
                f"speedup={speedup}: leave it out, as target_speedup is what is reached"
            )
        if not self.baseline:
            raise ValueError("baseline=false: expected true, as schedules are compared with it")
        return self


def main(arguments: Sequence[str]) -> int:
    """The command `tune`. Returns the exit code. Raises UserError."""
    start(tune, arguments, TuneConfig)
    return 0


def draw(
    speedup: Callable[[Schedule], float], target: float, depth: Depth, trial: Any
) -> Schedule | None:
    """A schedule that keeps `ratio ** power` after each of its layers, by the ratio that meets the
    target, if any does.

    speedup: the ideal one of a schedule. trial: Optuna's, which chooses the number of layers, the
    first and the last, between which they are spread evenly, and how the powers rise or fall from 1
    in the middle.
    """
    cuts, first = trial.suggest_int("cuts", 1, CUTS), trial.suggest_int("first", 1, depth.count - 1)
    last, slope = trial.suggest_int("last", 1, depth.count - 1), trial.suggest_float("slope", -2, 2)
    shares = [cut / max(cuts - 1, 1) for cut in range(cuts)]
    powers = {
        depth.nearest(round(first + share * (last - first))): 2 ** (slope * (2 * share - 1))
        for share in shares
    }

    def schedule(ratio: float) -> Schedule:
        return {
            layer: max(round(ratio**power, 4), 0.0001) for layer, power in sorted(powers.items())
        }

    ratio = nearest_ratio(lambda ratio: speedup(schedule(ratio)), target)
    return None if ratio is None else schedule(ratio)


def search(
    study: Any, drawn: Any, kls: Callable[[Schedule], KLs], default: Schedule, trials: int
) -> Schedule:
    """The best of `trials` schedules, the default first; of equal ones, the first. Up to 20 are
    drawn for each.
    """
    import optuna

    def objective(trial: optuna.Trial) -> float:
        schedule = drawn(trial)
        # what is drawn first is enqueued as the nearest to it
        schedule = schedule if done() else default
        if schedule is None:
            raise optuna.TrialPruned
        measured = kls(schedule)
        logging.info("%s: KL of the answer %.4f, of the gold one %.4f", schedule, *measured)
        trial.set_user_attr("measured", [measured, [*schedule.items()]])
        return measured[0]

    def done() -> list[Any]:
        return [
            trial.user_attrs["measured"] for trial in study.trials if trial.state.name == "COMPLETE"
        ]

    if not done():
        study.enqueue_trial(
            {"cuts": len(default), "first": min(default), "last": max(default), "slope": 0.0}
        )
    study.optimize(
        objective, 20 * (trials - len(done())), callbacks=[optuna.study.MaxTrialsCallback(trials)]
    )
    return dict(min(done(), key=lambda found: found[0])[1])


def tune(config: TuneConfig) -> Path:
    """Search, then measure on the other rows; returns the study's folder. Raises UserError,
    FailedExamplesError.
    """
    config = config.model_copy(update={"fidelity": "answer", "warmup": 0})
    check(config, Path("studies"))
    if find_spec("optuna") is None:
        raise UserError(
            "the search needs the package optuna: pip install --editable '.[tune]' in the "
            "repository"
        )
    # not at the top: arguments are checked first
    from eval.run.bench import load_model
    from eval.run.device import held_and_released
    from eval.run.prepare import prepare
    from lazyllm.models.config import as_device, shape_of

    run, target = prepare(config), config.target_speedup
    require(
        len(run.prompts) > 1, "limit", config.limit, "two rows or more: every other one decides"
    )
    prompts = {"rows": run.prompts[::2], "other_rows": run.prompts[1::2]}
    rows = {part: [" ".join(prompt.key) for prompt in chosen] for part, chosen in prompts.items()}
    shape = shape_of(run.spec)
    method = cast(Any, run.methods[run.arms[-1].label, run.prompts[0].dataset.name])
    depth, tokens = Depth.of(shape), round(mean(len(prompt.token_ids) for prompt in run.prompts))
    default: Any = method.solve({}, shape, tokens, target)
    require(
        default is not None,
        "target_speedup",
        target,
        "less, as the default's layers cannot reach it",
    )
    identity = run.identity | rows | {"target_speedup": target}
    name = Path(config.model.name).name
    folder = Path(config.out or f"studies/{name}-{target:g}x-{fingerprint(identity)[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    study = open_study(folder, identity, config.seed)
    load = cache(partial(load_model, run))
    kls = partial(_measure, config, folder, prompts, load)
    with held_and_released(as_device(run.spec.device)):
        drawn = partial(
            draw,
            lambda schedule: replace(method, schedule=schedule).ideal_speedup(shape, tokens),
            target,
            depth,
        )
        best = search(study, drawn, partial(kls, "rows"), default, config.trials)
        both = (("tuned", best), ("default", default))
        measured = {
            f"{name} on {part}": [*kls(part, schedule)]
            for part in prompts
            for name, schedule in both
        }
    about = {"schedule": best, "model": name, "target_speedup": target, **measured, **rows}
    text = yaml.safe_dump(about, sort_keys=False, default_flow_style=None, width=1000)
    write_whole(folder / FILE, f"# {command_of(config.arms[0], best)}\n{text}")
    print((folder / FILE).read_text(encoding="utf-8"), end="")
    return folder


def open_study(folder: Path, identity: dict[str, Any], seed: int) -> Any:
    """Open Optuna's study in the folder, or begin it. Raises UserError for another identity's."""
    import optuna

    study = optuna.create_study(
        storage=f"sqlite:///{folder}/study.db", study_name="schedules", load_if_exists=True
    )
    check_same(folder, "study", study.user_attrs.get("identity", identity), identity)
    study.set_user_attr("identity", identity)
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), multivariate=True)
    return study


def _measure(
    config: TuneConfig,
    folder: Path,
    prompts: Mapping[str, Sequence[Prompt]],
    load: Load,
    part: str,
    schedule: Schedule,
) -> KLs:
    """Measure a schedule on a part of the rows, in a run of its own below the study's folder."""
    from eval.run.loop import measure
    from eval.run.prepare import prepare

    out = folder / part / "-".join(f"{layer}_{ratio}" for layer, ratio in schedule.items())
    extra = config.arms[0].model_extra or {}
    given = {"name": config.arms[0].name, "label": "tuned", **extra, "schedule": schedule}
    arm = ArmSettings.model_validate(given)
    trial = prepare(config.model_copy(update={"arms": [arm], "out": str(out)}))
    measured = measure(replace(trial, prompts=prompts[part]), show=False, load=load)
    if measured.failed:
        raise FailedExamplesError(measured.failures)
    answers: Any = [visit.answers["tuned"] for visit in measured.visits if "tuned" in visit.answers]
    return mean(answer.answer_kl for answer in answers), mean(answer.gold_kl for answer in answers)


def command_of(arm: ArmSettings, schedule: Schedule) -> str:
    """The begin of a command that runs the arm with a schedule."""
    extra, defaults = arm.model_extra or {}, settings_of(by_name(arm.name))
    changed = {key: value for key, value in extra.items() if value != defaults[key]}
    words = [f"method.{key}={format_value(value)}" for key, value in changed.items()]
    words.append(f"'method.schedule={format_value(schedule)}'")
    return " ".join(["python run.py", f"method={arm.name}", *words])
