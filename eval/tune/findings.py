"""The results of a search: finalists measured on the held-out half, and the files of a study.

front.csv, .md, .svg, .pdf, .png   every measured schedule on the tuning half; finalists also on the held-out half
front.json                         the same with the study's identity, config, counts and provenance
tuned.yaml, tuned-1.80x.yaml, ...  schedules for `method.schedule=tuned/...`: the best at the target, or the front
final/SCHEDULE/                    the finalists' runs, each example paired with the baseline
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.analysis.columns import forms
from eval.analysis.figures.front import plot_front
from eval.analysis.figures.style import save
from eval.analysis.table import markdown_lines
from eval.analysis.tables.cells import shown
from eval.benchmarks.subsets import HELD_OUT, RULE
from eval.run import identity
from eval.run.config import TimingConfig
from eval.run.loop import console, run
from eval.run.resolved import resolve
from eval.run.targets import FILE, as_yaml
from eval.store.aggregate import rows_of
from eval.store.folder import read_run
from eval.store.record import Record
from eval.store.runs import StoredRun, example_rows
from eval.tune.settings import TuneConfig, as_run
from eval.tune.space import Candidate, Ideal
from eval.tune.study import Study, Tried
from lazyllm.errors import UserError
from lazyllm.files import git_commit, write_whole

log = logging.getLogger(__name__)

_HELD_OUT = ("score", "ttft_speedup", "difference")  # columns of the held-out half that have intervals


def best(tried: Sequence[Tried]) -> Tried:
    """The best score on the tuning half; of equals the slowest, which is nearest to the target."""
    return max(tried, key=lambda point: (point.scored.score, -point.ideal_speedup))


def front(tried: Sequence[Tried]) -> list[Tried]:
    """The Pareto front of score and speedup, the slowest first."""
    points: list[Tried] = []
    for point in sorted(tried, key=lambda point: (-point.ideal_speedup, -point.scored.score)):
        if not points or point.scored.score > points[-1].scored.score:
            points.append(point)
    return points[::-1]


def told_apart(points: Sequence[Tried]) -> list[Tried]:
    """A front's points, the slowest first, without repeated names; of equal names the slowest, with the best score."""
    return list({_name(point): point for point in reversed(points)}.values())[::-1]


def _name(point: Tried) -> str:
    return f"tuned-{point.ideal_speedup:.2f}x"


def evenly(points: Sequence[Tried], count: int) -> list[Tried]:
    """At most `count` of the points, evenly spaced from the first to the last one."""
    numbers = np.linspace(0, len(points) - 1, min(count, len(points))).round().astype(int)
    return [points[number] for number in dict.fromkeys(numbers.tolist())]


def report(config: TuneConfig, study: Study, beside: Mapping[str, Candidate], num_layers: int) -> None:
    """Measure the finalists and write all files into the study's folder. beside: the `references`."""
    tried = study.tried()
    if config.target_speedup is not None:
        chosen = {"tuned": best(tried).candidate}
    else:
        points = evenly(told_apart(front(tried)), config.finalists)
        chosen = {_name(point): point.candidate for point in points}
    finalists = {**beside, **chosen}
    records = {name: _finalist(config, study, candidate) for name, candidate in finalists.items()}
    table = _table(study, tried, finalists, records)
    for name, candidate in chosen.items():
        shipped = study.folder.name + name.removeprefix("tuned")  # its name if it is copied to conf/tuned
        text = as_yaml(shipped, candidate.schedule, num_layers, _about(config, study, table, name))
        write_whole(study.folder / (FILE if name == "tuned" else f"{name}.yaml"), text)
    for file in study.folder.glob("tuned-*x.yaml"):  # of an earlier front of this study
        if file.stem not in chosen:
            file.unlink()
    title = f"{Path(config.model.name).name}, {_aim(config)}"
    content = json.loads((study.folder / "study.json").read_text(encoding="utf-8")) | {
        "counts": asdict(study.counts()),
        "reported": identity.now(),
        "git_commit": git_commit(),
        "rows": json.loads(table.to_json(orient="records") or "[]"),
    }
    write_whole(study.folder / "front.csv", table.to_csv(index=False, lineterminator="\n"))
    write_whole(study.folder / "front.md", _markdown(table, title, config, study))
    write_whole(study.folder / "front.json", json.dumps(content, indent=2, sort_keys=True) + "\n")
    save(plot_front(pd.read_csv(study.folder / "front.csv"), title), study.folder / "front", ("svg", "pdf", "png"))
    screen = console()
    screen.print((study.folder / "front.md").read_text(encoding="utf-8"), markup=False, highlight=False)
    screen.print(
        f"Run it: python run.py method.schedule={_reference(study.folder, next(iter(chosen)))}", highlight=False
    )


def _finalist(config: TuneConfig, study: Study, candidate: Candidate) -> list[Record]:
    """The schedule's records on the held-out half, paired with the baseline; existing records are reused.

    Raises UserError if an example failed.
    """
    folder = study.folder / "final" / candidate.name
    method = {**config.method, "schedule": candidate.schedule}
    timing = TimingConfig(paired=True, warmup=config.timing.warmup)
    run(resolve(as_run(config, method=method, half=HELD_OUT, out=str(folder), timing=timing)), show=False)
    measured = StoredRun(folder, *read_run(folder))
    if measured.failures:  # a schedule without its failed examples cannot be compared
        first = measured.failures[0]
        raise UserError(
            f"{len(measured.failures)} held-out examples failed with schedule {candidate.schedule}, the first: "
            f"{first.dataset}, row {first.id}: {first.reason}. No report without them: give the same command again"
        )
    return list(measured.records)


def _table(
    study: Study, tried: Sequence[Tried], finalists: Mapping[str, Candidate], records: Mapping[str, Sequence[Record]]
) -> pd.DataFrame:
    """kind ("trial", or a finalist's name), schedule, ideal_speedup (on the tuning half), on_front, tuning_score,
    tuning_examples; of finalists on the held-out half: held_out_examples, held_out_ideal_speedup, baseline_score, and
    with `_low` and `_high` score, ttft_speedup, and difference: the score minus "paper"'s on the same examples."""
    by_candidate = {point.candidate: point for point in tried}
    on_front = {point.candidate for point in front(tried)}
    rows = [_row(study.ideal, "trial", point.candidate, point, point.candidate in on_front) for point in tried]
    paper = records.get("paper")
    for name, candidate in finalists.items():
        row = _row(study.ideal, name, candidate, by_candidate.get(candidate), candidate in on_front)
        held_out = rows_of(example_rows(records[name]).assign(seed=0))[-1]
        prompts = [(record.dataset, record.prompt_tokens) for record in records[name]]
        ideal = Ideal.of(study.ideal.model_config, prompts, study.ideal.method)
        row |= {
            "held_out_examples": held_out["examples"],
            "held_out_ideal_speedup": ideal.speedup(candidate.schedule),
            "baseline_score": held_out["baseline_score"],
        }
        compared = difference(records[name], paper) if paper is not None and name != "paper" else (math.nan,) * 3
        measured = [[held_out[form] for form in forms(name)] for name in ("score", "ttft_speedup")]
        values = [*measured, compared]
        for column, (mean, low, high) in zip(_HELD_OUT, values, strict=True):
            row |= {column: mean, f"{column}_low": low, f"{column}_high": high}
        rows.append(row)
    return pd.DataFrame(rows)


def difference(records: Sequence[Record], other: Sequence[Record]) -> tuple[float, float, float]:
    """(mean, low, high) of the scores of `records` minus those of `other`, 0 to 100, on the examples of both.

    Mean over tasks; the interval is a bootstrap over examples (`eval.store.aggregate`), each with both of its scores.
    """
    theirs = {record.key: record.method.score for record in other}
    frame = example_rows([record for record in records if record.key in theirs]).assign(seed=0)
    keys = zip(frame["dataset"], frame["id"], strict=True)
    frame["score"] = frame["score"] - [100 * theirs[key] for key in keys]
    row = rows_of(frame)[-1]
    return row["score"], row["score_low"], row["score_high"]


def _row(ideal: Ideal, kind: str, candidate: Candidate, tried: Tried | None, on_front: bool) -> dict[str, Any]:
    return {
        "kind": kind,
        "schedule": json.dumps(candidate.schedule),
        "ideal_speedup": ideal.speedup(candidate.schedule),
        "on_front": on_front,
        "tuning_score": tried.scored.score if tried else math.nan,
        "tuning_examples": tried.scored.examples if tried else math.nan,
    }


def _reference(folder: Path, name: str) -> str:
    """Its name in `method.schedule`."""
    return f"tuned/{folder}" if name == "tuned" else f"tuned/{folder / name}.yaml"


def _aim(config: TuneConfig) -> str:
    target = config.target_speedup
    return "score against ideal TTFT speedup" if target is None else f"schedules of an ideal TTFT speedup of {target:g}"


def _about(config: TuneConfig, study: Study, table: pd.DataFrame, name: str) -> dict[str, Any]:
    row = table[table["kind"] == name].iloc[0]
    return {
        "model": Path(config.model.name).name,
        "datasets": sorted(study.ideal.lengths),
        "target_speedup": config.target_speedup,
        "ideal_speedup": round(float(row["ideal_speedup"]), 3),
        "tuning_score": round(float(row["tuning_score"]), 2),
        "held_out_score": [round(float(row[f"score{end}"]), 2) for end in ("", "_low", "_high")],
        "study": json.loads((study.folder / "study.json").read_text(encoding="utf-8"))["fingerprint"],
    }


def _markdown(table: pd.DataFrame, title: str, config: TuneConfig, study: Study) -> str:
    """A table of the finalists, the meaning of its columns, and each tuned schedule compared with the paper's."""
    finalists: Any = table[table["kind"] != "trial"]
    headings = ["schedule", "", "ideal speedup", "tuning score", "held-out score", "TTFT speedup", "less paper's"]
    lines = markdown_lines(headings, [_cells(row) for _, row in finalists.iterrows()], keys=2)
    counts, first, tuned_on = study.counts(), finalists.iloc[0], max(point.scored.examples for point in study.tried())
    caption = (
        f"{counts.measured} schedules of at most {config.layers} pruning layers were measured on {tuned_on} examples, "
        f"{counts.refused} more were refused by their FLOPs. The held-out half has {int(first['held_out_examples'])} "
        f"other examples ({RULE}). Scores 0 to 100, mean over tasks; the baseline's on the held-out half is "
        f"{first['baseline_score']:.2f}. ±: half of the 95 % bootstrap interval over examples; in the last column both "
        "schedules have the same examples. Ideal speedups are those of the tuning half's prompts. paper: pruning after "
        "the layers of the paper's Figure 4, or earlier ones if these cannot reach the target; uniform: after evenly "
        "spaced layers; each with one keep ratio."
    )
    return "\n".join([f"# {title}", "", *lines, "", caption, "", *_verdicts(finalists), ""])


def _cells(row: Any) -> list[str]:
    schedule = ", ".join(f"{layer}: {ratio:g}" for layer, ratio in json.loads(row["schedule"]).items())
    tuning = "-" if math.isnan(row["tuning_score"]) else f"{row['tuning_score']:.2f}"
    held_out = [shown(row, column, 2, missing="-") for column in _HELD_OUT]
    return [row["kind"], f"{{{schedule}}}", f"{row['ideal_speedup']:.2f}", tuning, *held_out]


def _verdicts(finalists: Any) -> list[str]:
    """A sentence for each tuned schedule: its score on the held-out half compared with the paper's schedule."""
    if "paper" not in set(finalists["kind"]):
        return ["No schedule of one keep ratio at the paper's layers, or at earlier ones, reaches the target."]
    lines = []
    paper = finalists[finalists["kind"] == "paper"].iloc[0]
    for _, row in finalists[finalists["kind"].str.startswith("tuned")].iterrows():
        low, high = row["difference_low"], row["difference_high"]
        verdict = "better than" if low > 0 else "worse than" if high < 0 else "the same within the interval as"
        lines.append(
            f"- {row['kind']}, ideal speedup {row['ideal_speedup']:.2f}, scores {verdict} paper, ideal speedup "
            f"{paper['ideal_speedup']:.2f}: {row['difference']:+.2f} [{low:+.2f}, {high:+.2f}]."
        )
    return lines
