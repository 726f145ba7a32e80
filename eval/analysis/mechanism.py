"""The mechanism in one picture: the state of each token in each layer and step of a traced example."""

from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline

from eval.analysis.columns import STUDIED
from eval.analysis.style import GREY, new_figure, of_trace, styled
from eval.analysis.table import as_figure
from eval.store.results import Results
from eval.store.runs import is_ablation
from eval.store.visit import Trace


class State(IntEnum):
    """A token in one layer in one step."""

    FUTURE = 0  # not generated yet
    PRUNED = 1  # this layer has no K and V of it: never computed, or (static pruning) discarded
    STORED = 2  # K and V are stored, but the token is not in this step's set: not attended to
    CACHED = 3  # attended to, with K and V computed in an earlier step
    COMPUTED = 4  # computed in this step: the prompt in prefill, the newest token in decoding
    REVIVED = 5  # a prompt token computed in this decoding step, from the Aux Cache of this or an earlier layer


def token_states(trace: Trace) -> np.ndarray:
    """[steps, layers, n + steps - 1] uint8 of `State`. Step 0 is the prefill; generated tokens follow the prompt's n.

    The last generated token is never run, so it has no column. Raises ValueError if the states and the trace's counters
    disagree about the number of computed tokens.
    """
    n, in_set = len(trace.tokens), step_sets(trace)
    before = np.zeros_like(in_set)
    before[1:] = np.logical_or.accumulate(in_set)[:-1]
    held, counted = (before | in_set)[:, :, :n].sum(axis=2), counts_per_layer(trace)
    if (held != counted).any():
        step, layer = np.argwhere(held != counted)[0]
        raise ValueError(
            f"{trace.dataset}, row {trace.id}: its selections make {held[step, layer]} prompt tokens computed in "
            f"layer {layer + 1} by step {step}, its counters say {counted[step, layer]}: the trace is damaged, or its "
            "method does not report all of its selections in `selected`"
        )
    left_out = State.PRUNED if _selects_in_prefill_only(trace) else State.STORED
    kinds = {State.CACHED: before & in_set, State.COMPUTED: in_set, left_out: before}
    states = np.select(list(kinds.values()), list(kinds), State.PRUNED).astype(np.uint8)
    of_prompt = states[1:, :, :n]
    of_prompt[of_prompt == State.COMPUTED] = State.REVIVED
    for step, of_step in enumerate(states):
        of_step[:, n + step :] = State.FUTURE
    return states


def counts_per_layer(trace: Trace) -> np.ndarray:
    """[steps, layers] distinct prompt tokens computed so far: the trace's counters, one column per layer."""
    widths = np.diff([*trace.group_starts, len(trace.importance) + 1])
    return np.repeat(np.array(trace.computed), widths, axis=1)


def step_sets(trace: Trace) -> np.ndarray:
    """[steps, layers, n + steps - 1] bool: whether the token is in the step's set for the layer.

    After a pruning layer, the set is its selection; before the first one, all tokens so far. If a method selects in
    prefill only, all later steps use the tokens that its last selection kept, and the generated ones.
    """
    n, steps, layers = len(trace.tokens), len(trace.selected), len(trace.importance)
    in_set = np.zeros((steps, layers, n + steps - 1), dtype=bool)
    for step, selected in enumerate(trace.selected):
        present = list(range(n + step))
        if step > 0 and _selects_in_prefill_only(trace):
            present = [*trace.selected[0][max(trace.selected[0])], *range(n, n + step)]
        for layer in range(layers):
            present = selected.get(layer, present)
            in_set[step, layer, present] = True
    return in_set


def _selects_in_prefill_only(trace: Trace) -> bool:
    return bool(trace.selected[0]) and not any(trace.selected[1:])


STEPS = 4  # the prefill and three decoding steps
WINDOW = 44  # prompt tokens shown; more texts would not be legible side by side

# {state: (name, fill, mark)}: fills of different lightness, and marks, so that states differ in more than hue
_LOOKS: dict[State, tuple[str, str, dict[str, Any]]] = {
    State.COMPUTED: ("computed now", "#08306B", {}),
    State.CACHED: ("from the KV cache: attended to", "#9ECAE1", {}),
    State.REVIVED: ("revived: computed now, from the Aux Cache", "#E69F00", {"marker": "o", "color": "black"}),
    State.STORED: ("stored, but not attended to in this step", "#EDEDED", {"marker": "_", "color": "#8A8A8A"}),
    State.PRUNED: ("pruned: no K and V in this layer", "#FFFFFF", {}),
}


STANDARD, PRUNED = "Standard LLM", "LazyLLM"  # the two kinds of panels, as in the paper's Figure 3
_STANDARD_STEPS = 2  # later ones look like the second


def mechanism_frame(trace: Trace) -> pd.DataFrame:
    """One row per cell of the picture: panels, step, layer, group, position, kind (prompt, generated), text, state,
    computed.

    It shows the first `STEPS` steps, the `WINDOW` neighbouring prompt tokens with the most revived cells, and all
    tokens that these steps generate; above them the first two steps of a standard LLM on the same text.
    panels: `STANDARD` or `PRUNED`. state: a name of `State` in lower case; tokens that are not generated yet have no
    row. computed: number of `prompt_tokens` computed in the layer so far.
    """
    n, steps = len(trace.tokens), len(trace.selected)
    busiest = _busiest(token_states(trace)[:STEPS, :, :n])
    positions = np.array([*busiest, *range(n, n + min(STEPS, steps) - 1)])
    standard = replace(trace, selected=[{}] * steps, group_starts=[1], computed=[[n]] * steps)
    parts = [_cells_of(standard, STANDARD, positions, _STANDARD_STEPS), _cells_of(trace, PRUNED, positions, STEPS)]
    return pd.concat(parts, ignore_index=True)


def _cells_of(trace: Trace, panels: str, positions: np.ndarray, steps: int) -> pd.DataFrame:
    """The rows of the first steps of one of the two models."""
    states, counts = token_states(trace)[:steps], counts_per_layer(trace)
    texts, n = [*trace.tokens, *trace.generated], len(trace.tokens)
    step, layer, column = np.nonzero(states[:, :, positions] != State.FUTURE)
    position = positions[column]
    return pd.DataFrame(
        {
            "dataset": trace.dataset,
            "id": trace.id,
            "prompt_tokens": n,
            "panels": panels,
            "step": step,
            "layer": layer + 1,
            "group": 1 + np.searchsorted(sorted(trace.selected[0]), layer + 1),  # between two pruning layers
            "position": position,
            "kind": np.where(position < n, "prompt", "generated"),
            "text": [texts[place] for place in position],
            "state": [State(state).name.lower() for state in states[step, layer, position]],
            "computed": counts[step, layer],
        }
    )


def data(results: Results) -> pd.DataFrame:
    """`mechanism_frame` of the first traced example of LazyLLM, with columns `model` and `label`."""
    return of_trace(
        results,
        mechanism_frame,
        ["model", "label"],
        lambda arm: arm.method == STUDIED and not is_ablation(arm.settings),
    )


@as_figure(
    90,
    "mechanism",
    data,
    title="What LazyLLM does with each token, layer by layer and step by step",
    caption=(
        "One traced example: columns are tokens, rows are layers, panels are steps of a standard LLM and of LazyLLM. "
        "In each step, every pruning layer (black lines) selects anew which tokens continue."
    ),
    notes=(
        "A selected token that was not computed there before is revived from the Aux Cache; no token is computed twice "
        "in a layer. Shown is the part of the prompt with the most revived tokens; the numbers on the right count the "
        "whole prompt."
    ),
    command="python run.py experiment=figure2 model=tiny",
)
@styled
def plot(frame: Any) -> MplFigure:
    """A panel for each step of a standard LLM, then of LazyLLM, layer 1 on top; the prompt's window, then the generated
    tokens."""
    layers, n = int(frame["layer"].max()), frame["prompt_tokens"].iloc[0]
    shown = list(frame.groupby(["panels", "step"], sort=False))
    tokens = frame.drop_duplicates("position").sort_values("position").set_index("position")
    columns = pd.Series(np.arange(len(tokens)) + (tokens["kind"] == "generated"), tokens.index)  # with a gap
    panel = min(max(1.0, 0.115 * layers), 2.0)
    mark = min(3.0, 0.6 * 72 * panel / layers)  # points; cells are lower with many layers
    end = columns.max() + 0.6
    figure = new_figure(min(11.0, 2.6 + 0.165 * end), 1.5 + len(shown) * (panel + 0.3))
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    has_texts = bool(tokens["text"].fillna("").ne("").any())  # records may leave them out
    for ((model, step), rows), axes in zip(shown, panels, strict=True):
        newest = _shown(rows.loc[rows["position"].idxmax(), "text"])
        what = f"decoding step {step}" if step else "prefill"
        what += f", the newest token is \u201c{newest}\u201d" if step and has_texts else ""
        title = f"{model}: {what}"
        axes.set_title(title, fontweight="bold", parse_math=False)  # a token may be a dollar sign
        for state, cells in rows.groupby("state"):
            _draw_cells(axes, State[str(state).upper()], cells["position"].map(columns), cells["layer"], mark)
        _draw_groups(axes, rows, end)
        axes.set(xlim=(-0.6, end), ylim=(layers + 0.6, 0.4), xticks=[])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(False)
    panels[0].set_title(f"prompt tokens computed so far, of {n}", loc="right", color=GREY, fontsize=8)
    names = map(_shown, tokens["text"]) if has_texts else [str(place + 1) for place in tokens.index]
    panels[-1].set_xticks(
        columns, names, rotation=90, fontsize=7, family="monospace", rotation_mode="anchor",
        ha="right", va="center", parse_math=False,
    )  # fmt: skip
    prompt = tokens.index[tokens["kind"] == "prompt"]
    unknown = "" if has_texts else " (texts not stored)"
    shown_tokens = f"prompt tokens {prompt[0] + 1} to {prompt[-1] + 1} of {n}, then the generated tokens"
    panels[-1].set_xlabel(f"{shown_tokens}{unknown}")
    handles: Any = [
        (Rectangle((0, 0), 1, 1, facecolor=fill, edgecolor="#C4C4C4"), Line2D([], [], linestyle="none", **look))
        for _, fill, look in _LOOKS.values()
    ]
    figure.legend(
        handles, [name for name, _, _ in _LOOKS.values()], loc="outside lower center", ncols=3,
        handler_map={tuple: HandlerTuple(ndivide=1, pad=0)}, handlelength=1.4, handleheight=1.2,
    )  # fmt: skip
    return figure


def _busiest(states: np.ndarray) -> range:
    """The first `WINDOW` neighbouring prompt positions with the most revived cells."""
    n = states.shape[2]
    if n <= WINDOW:
        return range(n)
    revived = np.concatenate([[0], (states == State.REVIVED).sum(axis=(0, 1)).cumsum()])
    start = int(np.argmax(revived[WINDOW:] - revived[:-WINDOW]))
    return range(start, start + WINDOW)


def _draw_cells(axes: Any, state: State, x: Any, y: Any, mark: float) -> None:
    """Draw the cells of a state as a single outline, for small files."""
    _, fill, look = _LOOKS[state]
    corners = np.array([[-0.42, -0.42], [0.42, -0.42], [0.42, 0.42], [-0.42, 0.42], [-0.42, -0.42]])
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    outline = Outline((np.stack([x, y], axis=1)[:, None] + corners).reshape(-1, 2), codes * len(x))
    axes.add_patch(PathPatch(outline, facecolor=fill, edgecolor="#C4C4C4", linewidth=0.4))
    if look:
        axes.plot(x, y, linestyle="none", markersize=mark, markeredgewidth=0.3 * mark, **look)


def _draw_groups(axes: Any, rows: Any, end: float) -> None:
    """Draw a line at each pruning layer, layer numbers on the left and counters on the right."""
    names = {}
    for number, group in rows.groupby("group"):
        first, last = group["layer"].min(), group["layer"].max()
        names[(first + last) / 2] = f"layer {first}" if first == last else f"layers {first}\u2013{last}"
        if number > 1:
            axes.plot([-0.6, end], [first - 0.5] * 2, color="black", linewidth=0.9)
        axes.text(end + 0.2, (first + last) / 2, group["computed"].iloc[0], va="center", fontsize=8, color=GREY)
    axes.set_yticks(list(names), names.values())


def _shown(text: Any) -> str:
    """A token's text on one line, at most 12 characters, without outer spaces."""
    text = "" if pd.isna(text) else str(text)
    plain = text.strip(" ").replace("\n", "\u21b5").replace("\t", "\u21e5").replace("\r", "")
    plain = plain if len(plain) <= 12 else f"{plain[:11]}\u2026"
    return plain or "\u2423"
