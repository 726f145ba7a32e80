"""One page of all submitted results: lazyllm-bench board [FOLDER] [--out PAGE]

FOLDER (results/board) holds a folder for each submission: its runs, as written by `lazyllm-bench run` (visits.jsonl may
be gzipped), and a README.md that begins with a title. Every stored answer is scored again. No page is written if a
score differs, if an arm has not answered a planned example, if a run lacks its commit, versions, machine or the hash of
its rows, or if a prefill was faster than its accelerator can be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.metrics import needs_classes, score_example
from eval.store.folder import fingerprint
from eval.store.results import Results, with_variants
from eval.store.runs import StoredRun, counted, stored_runs
from eval.store.visit import Answer, Turn
from lazyllm.errors import UserError, parser_of
from lazyllm.files import write_whole
from lazyllm.machine import accelerator

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 10  # reasons for a refusal that are printed
_SAME = 1e-9  # tolerance of scores: versions of Python may add floats in another order
_INTRODUCTION = """\
# Board

Made by `lazyllm-bench board` from {answers} answers. It scored every stored answer anew, and all scores agree. Times,
FLOPs, KL and gold answers are as submitted. How to submit: docs/adding.md.
"""
_CAPTION = """
Mean over tasks. ±: half of the 95 % bootstrap interval over examples. KL: of the first token's distribution from the
baseline's, in nats. Ideal: the FLOPs of the baseline's prefills over the method's, scoring included. FLOPs
for 99 %: the least share of a prefill's FLOPs at which the method keeps 99 % of its own baseline's score, over all of
its settings in the submission; 100: at none. Diagnostic: a reference, no method; selection time excluded. -: not
measured. Machine: a hash of machine, attention kernel and versions; times compare within one. MFU: FLOPs of the
prefill over TTFT and the accelerator's dense peak (on a CPU: the rate of a measured matrix product).
"""


@dataclass(frozen=True)
class Submission:
    """A folder of runs. title: its README's first line."""

    folder: Path
    title: str
    results: Results

    @property
    def problems(self) -> list[str]:
        """The reasons to refuse it: a line for each bad run or answer."""
        return [problem for run in self.results.runs for problem in (*_lacking(run), *_disagreeing(run))]


def read_board(folder: Path) -> list[Submission]:
    """The submissions in a folder, by name. Raises UserError if there is none, or if one cannot be read."""
    board = [_submission(child) for child in sorted(folder.glob("*")) if child.is_dir()]
    if not board:
        raise UserError(f"{folder}: no submission; expected folders, each with runs and a README.md")
    return board


def _submission(folder: Path) -> Submission:
    readme = folder / "README.md"
    first = readme.read_text(encoding="utf-8").partition("\n")[0] if readme.is_file() else ""
    if not first.startswith("# "):
        raise UserError(f"{readme}: expected a title in its first line (# ...), then how and where it was run")
    try:
        runs = with_variants(stored_runs([folder]))
    except KeyError as error:
        raise UserError(f"{folder}: a run.json lacks {error}; submit it as `lazyllm-bench run` wrote it") from error
    if not any(len(run.rows) for run in runs):
        raise UserError(f"{folder}: no answers; expected runs, as `lazyllm-bench run` wrote them")
    return Submission(folder, first[2:].strip(), Results(runs))


def _lacking(run: StoredRun) -> Iterator[str]:
    """A line for each missing fact of a run's provenance, and for missing answers."""
    known, about = run.about.get("provenance") or {}, run.folder / "run.json"
    lacking = [name for name in ("git_commit", "versions", "machine") if not known.get(name)]
    lacking += [f"the data hash of {name}" for name in run.datasets if not run.identity["data"].get(name)]
    if lacking:
        yield f"{about}: lacks {', '.join(lacking)}"
    if (known.get("git_commit") or "").endswith("+changes"):
        yield f"{about}: the code had uncommitted changes; commit them, then run again"
    if run.about.get("fingerprint") != fingerprint(run.identity):
        yield f"{about}: the fingerprint differs from the identity's; the file was edited"
    yield from _impossible(run)
    if run.planned is None:
        yield f"{run.folder}: lacks examples.json, the list of planned examples"
        return
    missing = [(*key, arm) for key in run.planned for arm in run.arms if arm not in run.answered.get(key, ())]
    if missing:
        dataset, example, arm = missing[0]
        lacks = counted(len(missing), "planned answer")
        yield f"{run.folder}: no record of {lacks}, such as {dataset}, row {example}, {arm}"


def _impossible(run: StoredRun) -> Iterator[str]:
    """A line for a run whose clock its accelerator forbids: its fastest prefill, over the peak in 16 bits."""
    kind = accelerator(run.device)
    if kind is None:
        return
    answers: Any = run.rows
    for arm, rows in answers.groupby("arm", sort=False):
        try:
            kind.share(float((rows["prefill_flops"] / rows["ttft_s"]).max()))
        except UserError as error:
            yield f"{run.folder}: {arm}: {error}"


def _disagreeing(run: StoredRun) -> Iterator[str]:
    """A line for each answer whose stored score is not the suite's, or that cannot be scored."""
    for visit in run.visits:
        for arm, answers in visit.answers.items():
            for turn, stored in zip(visit.turns, answers, strict=True):
                if problem := _disagrees(run, visit.key, turn, stored):
                    yield f"{run.folder}: {visit.dataset}, row {visit.id}, {arm}: {problem}"


def _disagrees(run: StoredRun, key: tuple[str, str], turn: Turn, stored: Answer) -> str | None:
    dataset, classes = DATASETS[key[0]], None
    try:
        if needs_classes(dataset):  # visits lack the class names
            sha256, names = _rows_of(dataset.name)
            if not run.identity["data"].get(dataset.name, "").startswith(sha256):
                raise UserError(f"its class names are in the rows of {dataset.name}, which differ here from the run's")
            classes = names.get(key[1])
        score = score_example(dataset, stored.text, turn.answers, classes)
    except ValueError as error:  # UserError is one
        return f"cannot be scored here: {error}"
    return f"stored score {stored.score:g}, computed {score:g}" if abs(score - stored.score) > _SAME else None


@cache
def _rows_of(dataset: str) -> tuple[str, dict[str, Sequence[str]]]:
    """The rows' hash, and {row: its class names}. Raises UserError as the suite does."""
    loaded = load_rows(DATASETS[dataset])
    return loaded.data_sha256[:16], {example.id: example.all_classes for example in loaded.examples}


def board_page(board: Sequence[Submission], beside: Path) -> str:
    """The page in Markdown. beside: the folder that its links are relative to."""
    import pandas as pd

    from eval.analysis.columns import in_order
    from eval.analysis.table import EXAMPLES, LABEL, Column, cells, markdown_lines

    frame = in_order(pd.concat(_settings(submission, beside) for submission in board))
    columns = [
        LABEL,
        EXAMPLES,
        Column("score", "score", 2),
        Column("kl", "KL, nats", 5),
        Column("ttft_speedup", "TTFT speedup", 2),
        Column("ideal_ttft_speedup", "ideal", 2),
        Column("keep", "FLOPs for 99 %, %", 1),
        Column("prefill_mfu", "MFU, %", 1, interval=False),
        Column("machines", "machine"),
        Column("runs", "runs"),
    ]
    lines = [_INTRODUCTION.format(answers=sum(len(submission.results.frame) for submission in board))]
    lines += [_described(submission, beside) for submission in board]
    for names, rows in frame.groupby(["suite", "model"], sort=False):
        shown = cells(rows, columns)
        lines += ["", f"## {names[0]}: {names[1]}", ""]
        lines += markdown_lines(list(shown.columns), shown.to_numpy().tolist(), keys=1)
    return "\n".join([*lines, _CAPTION])


def _described(submission: Submission, beside: Path) -> str:
    """A submission's line in the list of all."""
    runs = submission.results.runs
    about = [run.about["provenance"] for run in runs]
    details = (
        (counted(len(runs), "run"),),
        (f"commit {known['git_commit'][:7]}" for known in about),
        (known["machine"].get("device") for known in about),
        (kernel for run in runs for kernel in run.kernels),
        (run.identity.get("dtype") for run in runs),
        (known.get("started", "")[:10] for known in about),
    )
    text = "; ".join(listed for values in details if (listed := ", ".join(sorted(set(map(str, values))))))
    cautions = "".join(f". Caution: {sentence}" for sentence in sorted({s for run in runs for s in run.warnings}))
    return f"- {_link(submission.folder.name, submission.folder, beside)}: {submission.title} ({text}){cautions}"


def _settings(submission: Submission, beside: Path) -> pd.DataFrame:
    """A row for each setting: its mean over tasks, FLOPs needed for 99 % of the score, its runs and machines."""
    from eval.analysis.columns import SECTION
    from eval.analysis.ranking import effective_keep
    from eval.analysis.table import random_models

    results = submission.results
    means = results.by_task[results.by_task["level"] == "all"]
    keep: Any = effective_keep(results).frame
    keep = keep[(keep["task"] == "all") & (keep["prompt_tokens"] == "all")]
    rows = means.merge(keep[[*SECTION, "method", "keep", "keep_low", "keep_high"]], how="left", on=[*SECTION, "method"])
    key = ["model", "method", "settings"]
    folders = {of: set(map(str, part)) for of, part in results.counting.groupby(key)["folder"]}
    origins = [_origin(submission, folders[of], beside) for of in rows[key].itertuples(index=False)]
    rows["runs"], rows["machines"] = zip(*origins, strict=True)
    return rows.replace({"model": {name: f"{name} (random weights)" for name in random_models(results)}})


def _origin(submission: Submission, folders: set[str], beside: Path) -> tuple[str, str]:
    """Links to the runs in these folders, and fingerprints of their machines, attention kernels and versions."""
    of_setting, name = [run for run in submission.results.runs if str(run.folder) in folders], submission.folder.name
    links = [_link(f"{name} {run.folder.name.rpartition('-')[2]}", run.folder, beside) for run in of_setting]
    abouts = [(run.about["provenance"], run.kernels) for run in of_setting]
    machines = {fingerprint({"of": [one["machine"], kernels, one["versions"]]})[:6] for one, kernels in abouts}
    return ", ".join(links), ", ".join(sorted(machines))


def _link(text: str, folder: Path, beside: Path) -> str:
    return f"[{text}]({Path(os.path.relpath(folder, beside)).as_posix()})"


def main(arguments: Sequence[str]) -> int:
    """The command `board`. Returns the exit code. Raises UserError for no submission, or one that is refused."""
    parser = parser_of("board", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results/board"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="default: FOLDER/README.md")
    options = parser.parse_args(arguments)
    board = read_board(options.folder)
    problems = [problem for submission in board for problem in submission.problems]
    for problem in problems[:_SHOWN]:
        print(f"refused: {problem}", file=sys.stderr)
    if problems:
        raise UserError(f"{options.folder}: no page is written, because of {counted(len(problems), 'problem')}")
    out = options.out or options.folder / "README.md"
    write_whole(out, board_page(board, out.parent))
    print(f"{out}: every score of {', '.join(submission.folder.name for submission in board)} agrees")
    return 0
