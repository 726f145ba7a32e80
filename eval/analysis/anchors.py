"""Published scores of unpruned models beside ours: whether this harness measures what others measure."""

from typing import Any

import pandas as pd

from eval.analysis.columns import BASELINE
from eval.analysis.paper_tables import PUBLISHED
from eval.analysis.table import EXAMPLES, MODEL, Column, Rows, as_table, cells, forms, random_models
from eval.benchmarks.datasets import DATASETS
from eval.store.results import Results

_LEVELS = ("all", "task", "dataset")
_KEYS = ("model", "suite", "part", "examples")
_SHOWN = (
    MODEL,
    Column("suite", "suite"),
    Column("part", "part"),
    EXAMPLES,
    Column("published", "published", 2),
    Column("score", "ours", 2),
    Column("ratio", "ratio", 3),
    Column("allowed", "allowed"),
    Column("settings", "published with"),
    Column("source", "source"),
)


@as_table(
    25,
    title="Scores of unpruned models beside published ones",
    caption="Ratio: ours over the published score; a ! marks one outside the allowed range.",
    notes=(
        "Only models with a published score, and only tasks and datasets of which every example was run. The allowed "
        "range is ours: 5 % for a mean over tasks, 10 % for a part, as answer lengths, kernels and dtypes differ."
    ),
    command="python run.py model=llama2 method=baseline dataset=all",
)
def anchors(results: Results) -> Rows:
    """The baseline's scores, each beside the published one of the same model, suite and part."""
    published: Any = pd.read_csv(PUBLISHED / "anchors.csv", keep_default_na=False)
    rows = []
    for row in _whole(results):
        for anchor in published.to_dict("records"):
            same = (anchor["suite"], anchor["part"]) == (row["suite"], row["part"])
            if same and row["short"] in anchor["models"].split():
                ratio, most = row["score"] / anchor["published"], anchor["allowed_pct"] / 100
                allowed = f"{1 - most:g} to {1 + most:g}{'' if abs(ratio - 1) <= most else ' !'}"
                rows.append(row | anchor | {"ratio": ratio, "allowed": allowed})
    columns = [*_KEYS, "published", *forms("score"), "ratio", "allowed", "allowed_pct", "settings", "source"]
    frame: Any = pd.DataFrame(rows, columns=columns)
    return Rows(frame, cells(frame, _SHOWN), keys=3)


def _whole(results: Results) -> list[dict[str, Any]]:
    """The baseline's rows of `by_task` whose every example was answered, with the model's name."""
    sizes, variants = dict[tuple[str, str], int](), dict[str, str]()
    for run in results.runs:
        variants[run.model] = run.model.removesuffix(run.variant)
        sizes |= {(run.model, name): size for name, size in run.about.get("examples", {}).items()}
    found = []
    table: Any = results.by_task
    table = table[(table["method"] == BASELINE) & table["level"].isin(_LEVELS)]
    for row in table[~table["model"].isin(random_models(results))].to_dict("records"):
        names = [
            name
            for name, data in DATASETS.items()
            if data.suite == row["suite"] and row["name"] in ("all", data.task, name)
        ]
        known = [sizes.get((row["model"], name), 0) for name in names]
        if row["datasets"] == len(names) and all(known) and row["examples"] >= sum(known):
            short = variants[row["model"]].removeprefix("Meta-")
            found.append(row | {"part": row["name"], "short": short})
    return found
