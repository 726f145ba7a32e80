"""Figure 6: score and KL against the layer of a single pruning point."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.analysis import style
from eval.analysis.columns import KLS, SECTION, STUDIED, single_layer
from eval.analysis.table import as_figure, forms
from eval.store.results import Results


def data(results: Results) -> pd.DataFrame:
    """Means over tasks of LazyLLM with one pruning layer and default settings: model, suite, layer,
    keep (0 to 1), examples, and score, reference_score, score_difference, relative_score,
    ttft_speedup, kl, answer_kl, gold_kl, with `_low` and `_high`.
    """
    table: Any = style.as_published(results.by_task)
    table = table[(table["level"] == "all") & (table["method"] == STUDIED)]
    table = table.assign(point=table["settings"].map(single_layer)).dropna(subset="point")
    table = table.join(
        pd.DataFrame(table["point"].tolist(), index=table.index, columns=["layer", "keep"])
    )
    values = forms(
        "score", "reference_score", "score_difference", "relative_score", "ttft_speedup", *KLS
    )
    table = table.sort_values([*SECTION, "keep", "layer"])
    return table[[*SECTION, "layer", "keep", "examples", *values]].reset_index(drop=True)


@as_figure(
    120,
    "figure6",
    data,
    title="Score against the layer of a single pruning point (the paper's Figure 6)",
    caption=(
        "LazyLLM with one pruning layer, mean over tasks: the score, and the KL divergence of the "
        "first token's distribution from the baseline's. The paper claims that scores fall if "
        "fewer tokens are kept and rise if pruning is later; it gives no numbers."
    ),
    notes="Bars: 95 % bootstrap intervals over examples. KL has a log scale.",
    command="python run.py -m experiment=figure6 model=llama2,xgen",
)
@style.styled
def plot(frame: Any) -> MplFigure:
    """One line per model and suite: the score, then each KL that was measured; one curve per
    kept share.
    """
    kls = style.kls_in(frame)
    title = "LazyLLM with one pruning layer, mean over tasks"
    figure, sections = style.sections_of(frame, title, 5.6 + 4.4 * len(kls), lambda _: 3.6)
    for part, rows in sections:
        panels = part.subplots(1, 1 + len(kls), squeeze=False)[0]
        _draw_curves(panels[0], rows, "score", "score (0 to 100)")
        panels[0].axhline(rows["reference_score"].mean(), label="baseline", **style.REFERENCE)
        low, high = rows["examples"].min(), rows["examples"].max()
        panels[0].set_title(f"{low if low == high else f'{low} to {high}'} examples")
        for axes, (name, label) in zip(panels[1:], kls.items(), strict=True):
            _draw_curves(axes, rows, name, label)
            axes.set_yscale("log", nonpositive="clip")
        handles, labels = panels[0].get_legend_handles_labels()
        style.legend_beside(panels[-1], handles=handles, labels=labels)
    return figure


def _draw_curves(axes: Any, rows: Any, column: str, label: str) -> None:
    shares = sorted(set(rows["keep"]))
    for number, keep in enumerate(shares):
        look = style.look_of(number, len(shares))
        style.draw(
            axes,
            rows[rows["keep"] == keep],
            "layer",
            column,
            label=f"keep {100 * keep:g} %",
            **look,
        )
    axes.set_xticks(sorted(set(rows["layer"])))
    axes.set(xlabel="layer after which tokens are pruned, once", ylabel=label)
