"""The page of `paper`: one HTML text that refers to nothing outside itself and needs no script but
to sort.

Its frame and style are `page.html.jinja`, its script is `sort.js`.
"""

import base64
import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.analysis.table import Column, Table, cells, legend
from eval.report.content import Content
from eval.store.frame import numbers_of
from eval.store.record import Answer, Visit
from eval.store.results import Results
from eval.store.runs import StoredRun

_HERE = Path(__file__).parent
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def render(results: Results, content: Content, most: int | None = None) -> str:
    """Render the page of some runs. content: of these. most: examples of each run and dataset,
    None for all.
    """
    runs = results.runs
    script = (_HERE / "sort.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        title=", ".join(dict.fromkeys(run.model for run in runs)),
        warnings=warnings(runs, most),
        runs=runs_table(runs),
        tables=content.tables,
        legend=legend(content.tables),
        pictures=[
            (picture.name, picture.figure, _data_uri(picture.name, picture.drawn))
            for picture in content.pictures
        ],
        missing=content.missing,
        answers=[(run, answers_of(run, most)) for run in runs],
        script=Markup(script),
        # for the content security policy: no other script may run
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _data_uri(name: str, drawn: Any) -> str:
    """The picture as an SVG within an address. Its letters are paths."""
    written = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        drawn.savefig(written, format="svg", bbox_inches="tight", metadata=_NO_METADATA)
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}"


def runs_table(runs: Sequence[StoredRun]) -> Table:
    """List the runs with what tells them apart and where they were measured."""
    rows = [
        {
            "model": run.model,
            "arms": ", ".join(run.arms),
            "examples": len(run.answered),
            "datasets": len(run.datasets),
            "device": run.device or "unknown",
            "started": run.started,
            "commit": run.about["provenance"]["git_commit"] or "unknown",
            "fingerprint": run.about["fingerprint"],
            "folder": run.folder.name,
        }
        for run in runs
    ]
    values = pd.DataFrame(rows)
    caption = (
        "A fingerprint is a hash of everything that can change a number. Versions and settings: "
        "provenance.json."
    )
    return Table(
        "runs",
        "Runs",
        caption,
        values,
        cells(values, [Column(name, name) for name in values]),
        len(rows[0]),
    )


def warnings(runs: Sequence[StoredRun], most: int | None) -> list[str]:
    """Say in sentences what to know before comparing numbers. most: as of `render`."""
    concerned = {
        "Measured without a baseline: no speedup, and no answer to compare with": [
            run for run in runs if run.identity["baseline"] is None
        ],
        "Timed without warm-up: the first examples' times include one-off costs": [
            run for run in runs if run.identity["warmup"] == 0
        ],
        "Measured with uncommitted code: it cannot be checked out again": [
            run
            for run in runs
            if (run.about["provenance"]["git_commit"] or "+changes").endswith("+changes")
        ],
    }
    concerned |= {
        sign: [run for run in runs if sign in run.warnings] for run in runs for sign in run.warnings
    }
    sentences = Results(runs).unfinished + [
        f"{text} ({', '.join(run.folder.name for run in named)})."
        for text, named in concerned.items()
        if named
    ]
    if most is not None and any(
        max(Counter(dataset for dataset, _ in run.answered).values()) > most for run in runs
    ):
        sentences.append(
            f"Answers are shown of the first {most} of each dataset's examples; tables count all."
        )
    return sentences


def answers_of(run: StoredRun, most: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """Gather the answers of a run: {dataset: an entry for each example, with the answers of all
    arms}.

    most: as of `render`. An arm's answer is compared with the baseline's of the same visit.
    """
    datasets = dict[str, dict[str, dict[str, Any]]]()
    for visit in run.visits:
        entries = datasets.setdefault(visit.dataset, {})
        if most is not None and visit.id not in entries and len(entries) >= most:
            continue
        entry = entries.setdefault(visit.id, {"visit": visit, "answers": {}})
        baseline = visit.answers.get(run.identity["baseline"])
        for name, answer in visit.answers.items():
            compared = None if run.arms[name].is_baseline else baseline
            entry["answers"].setdefault(name, _describe_answer(visit, answer, compared))
    return {
        dataset: [
            entry
            | {
                "answers": {
                    name: entry["answers"][name] for name in run.arms if name in entry["answers"]
                }
            }
            for entry in entries.values()
            if entry["answers"]
        ]
        for dataset, entries in datasets.items()
    }


def _describe_answer(visit: Visit, answer: Answer, baseline: Answer | None) -> dict[str, Any]:
    """An answer's text (None if it is not stored), its numbers, and whether its text is the
    baseline's.
    """
    is_same = baseline is not None and answer.text is not None and answer.text == baseline.text
    return {
        "text": answer.text,
        "numbers": ", ".join(_numbers(visit, answer, baseline)),
        "is_same": is_same,
    }


def _numbers(visit: Visit, answer: Answer, baseline: Answer | None) -> Iterator[str]:
    """The numbers of an answer that were measured, each beside the baseline's."""
    if answer.score is not None:
        gain = (
            None
            if baseline is None or baseline.score is None
            else 100 * (answer.score - baseline.score)
        )
        yield f"score {100 * answer.score:.1f}" + ("" if gain is None else f" ({gain:+.1f})")
    ratio = "" if baseline is None else f" ({baseline.ttft_s / answer.ttft_s:.2f}x)"
    yield f"TTFT {1000 * answer.ttft_s:,.1f} ms{ratio}"
    yield f"{numbers_of(visit, answer)['pct_prompt_tokens_computed']:.1f} % of the prompt computed"
    if answer.kl is not None:
        yield f"KL {answer.kl:.3g}"
    if answer.answer_kl is not None:
        yield f"answer's KL {answer.answer_kl:.3g}"
    yield f"{len(answer.token_ids)} tokens"
