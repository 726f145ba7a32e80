"""The mechanism in one picture: the state of each token in each layer and step of a traced
example.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import lines, patches
from matplotlib.figure import Figure as MplFigure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.path import Path as Outline

from eval.analysis.columns import STUDIED
from eval.analysis.style import GREY, new_figure, styled, tabulate_trace
from eval.analysis.table import as_figure
from eval.store.results import Results
from eval.store.trace import Trace

# of a token in a layer in a step
State = IntEnum("State", "FUTURE PRUNED STORED CACHED COMPUTED REVIVED", start=0)
_LOOKS: dict[
    State, tuple[str, str, dict[str, Any]]
] = {  # fills of different lightness, and marks: more than hues
    State.COMPUTED: ("computed now", "#08306B", {}),
    State.CACHED: ("from the KV cache: attended to", "#9ECAE1", {}),
    State.REVIVED: (
        "revived: computed now, from the Aux Cache",
        "#E69F00",
        {"marker": "o", "color": "black"},
    ),
    State.STORED: (
        "stored, but not attended to in this step",
        "#EDEDED",
        {"marker": "_", "color": "#8A8A8A"},
    ),
    State.PRUNED: ("pruned: no K and V in this layer", "#FFFFFF", {}),
}
STANDARD, PRUNED = "Standard LLM", "LazyLLM"  # the two kinds of panels, as in the paper's Figure 3
# the prefill and decoding steps; a standard LLM's later ones look like the second
STANDARD_STEPS, STEPS = (2, 4)
_EDGE = "#C4C4C4"  # of a cell
_NAMES: Any = {
    "fontsize": 7, "family": "monospace", "rotation": 90, "rotation_mode": "anchor", "ha": "right",
    "va": "center", "parse_math": False,
}  # fmt: skip
_CORNERS = np.array([[-0.42, -0.42], [0.42, -0.42], [0.42, 0.42], [-0.42, 0.42]])  # of a cell
WINDOW = 44  # prompt tokens shown; more texts would not be legible side by side


def token_states(trace: Trace) -> np.ndarray:
    """Tell each token's `State`: [steps, layers, tokens], prefill first. Raises ValueError for a
    damaged trace.
    """
    n, steps, layers = len(trace.tokens), len(trace.selected), len(trace.importance)
    in_set = np.zeros((steps, layers, n + steps - 1), dtype=bool)  # attended to in this step
    for step, selected in enumerate(trace.selected):
        present = list(range(n + step))
        for layer in range(layers):
            present = selected.get(layer, present)
            in_set[step, layer, present] = True
    # before each step, and after
    held = np.logical_or.accumulate(np.concatenate([np.zeros_like(in_set[:1]), in_set]))
    counted = np.repeat(np.array(trace.computed), trace.group_layers, axis=1)
    if (held[1:, :, :n].sum(axis=2) != counted).any():
        raise ValueError(
            f"{trace.dataset}, row {trace.id}: the trace's selections and its counters disagree"
        )
    kinds = [State.CACHED, State.COMPUTED, State.STORED]
    states = np.select([held[:-1] & in_set, in_set, held[:-1]], kinds, State.PRUNED)
    later = states[1:, :, :n]
    later[later == State.COMPUTED] = State.REVIVED
    for step in range(steps):
        states[step, :, n + step :] = State.FUTURE
    return states


def mechanism_frame(trace: Trace) -> pd.DataFrame:
    """Give a row to each cell of the picture: of the prompt, the part with the most revived
    cells.
    """
    n, steps = len(trace.tokens), len(trace.selected)
    revived = (token_states(trace)[:STEPS, :, :n] == State.REVIVED).sum(axis=(0, 1))
    start = int(np.convolve(revived, np.ones(min(WINDOW, n), dtype=int), "valid").argmax())
    positions = np.array(
        [*range(start, min(start + WINDOW, n)), *range(n, n + min(STEPS, steps) - 1)]
    )
    whole = {
        "selected": [{}] * steps,
        "group_layers": [len(trace.importance)],
        "computed": [[n]] * steps,
    }
    unpruned = trace.model_copy(update=whole)
    standard = _cells(unpruned, STANDARD, positions, STANDARD_STEPS)
    return pd.concat([standard, _cells(trace, PRUNED, positions, STEPS)], ignore_index=True)


def _cells(trace: Trace, panels: str, positions: np.ndarray, steps: int) -> pd.DataFrame:
    states, texts, n = (
        token_states(trace)[:steps],
        [*trace.tokens, *trace.generated],
        len(trace.tokens),
    )
    computed = np.isin(states[:, :, :n], [State.COMPUTED, State.REVIVED]).sum(axis=2).cumsum(axis=0)
    step, layer, column = np.nonzero(states[:, :, positions] != State.FUTURE)
    position = positions[column]
    cells = {
        "dataset": trace.dataset,
        "id": trace.id,
        "prompt_tokens": n,
        "panels": panels,
        "step": step,
    }
    cells |= {
        "layer": layer + 1,
        "group": 1 + np.searchsorted(sorted(trace.selected[0]), layer + 1),
    }
    cells |= {"position": position, "kind": np.where(position < n, "prompt", "generated")}
    cells |= {"text": [texts[place] for place in position]}
    cells |= {"state": [State(state).name.lower() for state in states[step, layer, position]]}
    return pd.DataFrame(cells | {"computed": computed[step, layer]})


def data(results: Results) -> pd.DataFrame:
    """`mechanism_frame` of the first traced example of LazyLLM, with columns `model` and
    `label`.
    """
    return tabulate_trace(results, mechanism_frame, ["model", "label"], STUDIED)


@as_figure(
    90,
    "mechanism",
    data,
    title="What LazyLLM does with each token, layer by layer and step by step",
    caption=(
        "One traced example: columns are tokens, rows are layers, panels are steps of a standard "
        "LLM and of LazyLLM. In each step, every pruning layer (black lines) selects anew which "
        "tokens continue."
    ),
    notes=(
        "A selected token that was not computed there before is revived from the Aux Cache; no "
        "token is computed twice in a layer. Shown is the part of the prompt with the most revived "
        "tokens; the numbers on the right count the whole prompt."
    ),
    command="python run.py experiment=figure2 model=tiny",
)
@styled
def plot(frame: Any) -> MplFigure:
    """Draw a panel for each step, layer 1 on top: the prompt's window, then the generated
    tokens.
    """
    layers, n = int(frame["layer"].max()), frame["prompt_tokens"].iloc[0]
    steps = list(frame.groupby(["panels", "step"], sort=False))
    tokens = frame.drop_duplicates("position").sort_values("position").set_index("position")
    # with a gap
    columns = pd.Series(np.arange(len(tokens)) + (tokens["kind"] == "generated"), tokens.index)
    panel, end = min(max(1.0, 0.115 * layers), 2.0), columns.max() + 0.6
    mark = min(3.0, 0.6 * 72 * panel / layers)  # points; cells are lower with many layers
    figure = new_figure(min(11.0, 2.6 + 0.165 * end), 1.5 + len(steps) * (panel + 0.3))
    panels = figure.subplots(len(steps), 1, squeeze=False)[:, 0]
    has_texts = bool(tokens["text"].fillna("").ne("").any())  # records may leave them out
    for ((model, step), rows), axes in zip(steps, panels, strict=True):
        title = f"{model}: decoding step {step}" if step else f"{model}: prefill"
        if step and has_texts:
            title += (
                ", the newest token is "
                f"\u201c{_shorten(rows.loc[rows['position'].idxmax(), 'text'])}\u201d"
            )
        axes.set_title(title, fontweight="bold", parse_math=False)  # a token may be a dollar sign
        _draw_tokens(axes, rows, columns, mark)
        _draw_groups(axes, rows, end)
        axes.set(xlim=(-0.6, end), ylim=(layers + 0.6, 0.4), xticks=[])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(False)
    panels[0].set_title(
        f"prompt tokens computed so far, of {n}", loc="right", color=GREY, fontsize=8
    )
    names = (
        map(_shorten, tokens["text"]) if has_texts else [str(place + 1) for place in tokens.index]
    )
    panels[-1].set_xticks(columns, names, **_NAMES)
    last = tokens.index[tokens["kind"] == "prompt"][-1] + 1
    window = f"prompt tokens {tokens.index[0] + 1} to {last} of {n}, then the generated tokens"
    panels[-1].set_xlabel(window if has_texts else f"{window} (texts not stored)")
    _draw_legend(figure)
    return figure


def _draw_tokens(axes: Any, rows: Any, columns: Any, mark: float) -> None:
    """Draw a step's cells. columns: {position: place on the x axis}; mark: its size in points."""
    for state, cells in rows.groupby("state"):
        _, fill, look = _LOOKS[State[str(state).upper()]]
        x, y = cells["position"].map(columns), cells["layer"]
        corners = np.stack([x, y], axis=1)[:, None] + _CORNERS
        outline = Outline.make_compound_path_from_polys(corners)
        axes.add_patch(patches.PathPatch(outline, facecolor=fill, edgecolor=_EDGE, linewidth=0.4))
        if look:
            axes.plot(x, y, linestyle="none", markersize=mark, markeredgewidth=0.3 * mark, **look)


def _draw_legend(figure: MplFigure) -> None:
    """Draw the sign of each state of a token."""
    names, fills, looks = zip(*_LOOKS.values(), strict=True)
    squares = [patches.Rectangle((0, 0), 1, 1, facecolor=fill, edgecolor=_EDGE) for fill in fills]
    marks = [lines.Line2D([], [], linestyle="none", **look) for look in looks]
    handles: Any = list(zip(squares, marks, strict=True))
    overlaid: Any = {tuple: HandlerTuple(ndivide=1, pad=0)}
    figure.legend(
        handles, names, loc="outside lower center", ncols=3,
        handler_map=overlaid, handlelength=1.4, handleheight=1.2,
    )  # fmt: skip


def _draw_groups(axes: Any, rows: Any, end: float) -> None:
    """Draw a line at each pruning layer, layer numbers on the left and counters on the right."""
    names = {}
    for number, group in rows.groupby("group"):
        first, last = group["layer"].min(), group["layer"].max()
        names[(first + last) / 2] = (
            f"layer {first}" if first == last else f"layers {first}\u2013{last}"
        )
        if number > 1:
            axes.plot([-0.6, end], [first - 0.5] * 2, color="black", linewidth=0.9)
        axes.text(
            end + 0.2,
            (first + last) / 2,
            group["computed"].iloc[0],
            va="center",
            fontsize=8,
            color=GREY,
        )
    axes.set_yticks(list(names), names.values())


def _shorten(text: Any) -> str:
    """A token's text on one line, at most 12 characters, without outer spaces."""
    plain = (
        ("" if pd.isna(text) else str(text))
        .strip(" ")
        .translate({10: "\u21b5", 9: "\u21e5", 13: ""})
    )
    return (plain if len(plain) <= 12 else f"{plain[:11]}\u2026") or "\u2423"
