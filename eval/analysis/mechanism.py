"""The mechanism in one picture: the state of each token in each layer and step of a traced example."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline

from eval.analysis.known_methods import STUDIED
from eval.analysis.style import GREY, as_published, new_figure, styled, traced_example
from eval.analysis.table import Figure
from eval.store.record import Trace
from eval.store.results import Results


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
    n, steps = len(trace.tokens), len(trace.computed)
    in_set = step_sets(trace)
    before = np.zeros_like(in_set)
    before[1:] = np.logical_or.accumulate(in_set)[:-1]
    _check_counts(trace, (before | in_set)[:, :, :n].sum(axis=2))
    states = np.full(in_set.shape, State.PRUNED, dtype=np.uint8)
    states[before & ~in_set] = State.PRUNED if _selects_in_prefill_only(trace) else State.STORED
    states[before & in_set] = State.CACHED
    states[~before & in_set] = State.COMPUTED
    states[1:, :, :n][(~before & in_set)[1:, :, :n]] = State.REVIVED
    for step in range(steps):
        states[step, :, n + step :] = State.FUTURE
    return states


def layer_groups(trace: Trace) -> list[range]:
    """The layers (from 1) between two pruning layers, first group first."""
    layers = len(trace.importance)
    cuts = sorted(layer for layer in trace.selected[0] if 0 < layer < layers)
    return [range(start + 1, end + 1) for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]


def counts_per_layer(trace: Trace) -> np.ndarray:
    """[steps, layers] distinct prompt tokens computed so far: the trace's counters, one column per layer."""
    ends = [*trace.group_starts[1:], len(trace.importance) + 1]
    widths = [end - start for start, end in zip(trace.group_starts, ends, strict=True)]
    return np.repeat(np.array(trace.computed), widths, axis=1)


def step_sets(trace: Trace) -> np.ndarray:
    """[steps, layers, n + steps - 1] bool: whether the token is in the step's set for the layer.

    After a pruning layer, the set is its selection; before the first one, all tokens so far. If a method selects in
    prefill only, all later steps use the tokens that its last selection kept, and the generated ones.
    """
    n, steps, layers = len(trace.tokens), len(trace.selected), len(trace.importance)
    in_set = np.zeros((steps, layers, n + steps - 1), dtype=bool)
    for step in range(steps):
        selected = trace.selected[step]
        present = list(range(n + step))
        if step > 0 and _selects_in_prefill_only(trace):
            present = [*trace.selected[0][max(trace.selected[0])], *range(n, n + step)]
        for layer in range(layers):
            present = selected.get(layer, present)
            in_set[step, layer, present] = True
    return in_set


def _selects_in_prefill_only(trace: Trace) -> bool:
    return bool(trace.selected[0]) and not any(trace.selected[1:])


def _check_counts(trace: Trace, found: np.ndarray) -> None:
    counted = counts_per_layer(trace)
    if (found != counted).any():
        step, layer = np.argwhere(found != counted)[0]
        raise ValueError(
            f"{trace.dataset}, row {trace.id}: its selections make {found[step, layer]} prompt tokens computed in "
            f"layer {layer + 1} by step {step}, its counters say {counted[step, layer]}: the trace is damaged, or its "
            "method does not report all of its selections in `selected`"
        )


# -------------------------------------------------------------------------------------------------------------- figure

STEPS = 4  # the prefill and three decoding steps
WINDOW = 44  # prompt tokens shown; more texts would not be legible side by side

# Fills of different lightness, and marks, so that states differ in more than hue
_FILL = {
    State.COMPUTED: "#08306B",
    State.REVIVED: "#E69F00",
    State.CACHED: "#9ECAE1",
    State.STORED: "#EDEDED",
    State.PRUNED: "#FFFFFF",
}
_MARK: dict[State, dict[str, Any]] = {
    State.REVIVED: {"marker": "o", "color": "black"},
    State.STORED: {"marker": "_", "color": "#8A8A8A"},
}
_NAMES = {
    State.COMPUTED: "computed now",
    State.CACHED: "from the KV cache: attended to",
    State.REVIVED: "revived: computed now, from the Aux Cache",
    State.STORED: "stored, but not attended to in this step",
    State.PRUNED: "pruned: no K and V in this layer",
}


def mechanism_frame(trace: Trace) -> pd.DataFrame:
    """One row per cell of the picture: step, layer, group, position, kind (prompt, generated), text, state, computed.

    It shows the first `STEPS` steps, the `WINDOW` neighbouring prompt tokens with the most revived cells, and all
    tokens that these steps generate.
    state: a name of `State` in lower case; tokens that are not generated yet have no row.
    computed: number of `prompt_tokens` computed in the layer so far.
    """
    states = token_states(trace)[:STEPS]
    n, steps = len(trace.tokens), states.shape[0]
    positions = np.array([*_busiest(states[:, :, :n]), *range(n, n + steps - 1)])
    texts = [*trace.tokens, *trace.generated]
    group_of = {layer: number for number, group in enumerate(layer_groups(trace), start=1) for layer in group}
    counts = counts_per_layer(trace)
    step, layer, column = np.nonzero(states[:, :, positions] != State.FUTURE)
    position = positions[column]
    return pd.DataFrame(
        {
            "dataset": trace.dataset,
            "id": trace.id,
            "prompt_tokens": n,
            "step": step,
            "layer": layer + 1,
            "group": [group_of[number] for number in (layer + 1).tolist()],
            "position": position,
            "kind": np.where(position < n, "prompt", "generated"),
            "text": [texts[place] for place in position],
            "state": [State(state).name.lower() for state in states[step, layer, position]],
            "computed": counts[step, layer],
        }
    )


def plot_mechanism(trace: Trace) -> MplFigure:
    """The picture of one trace."""
    return plot(mechanism_frame(trace))


def data(results: Results) -> pd.DataFrame:
    """`mechanism_frame` of the first traced example of a LazyLLM run, with columns `model` and `label`."""
    example = traced_example(as_published(results).where(lambda run: run.method == STUDIED))
    if example is None:
        return pd.DataFrame()
    run, trace = example
    frame = mechanism_frame(trace)
    frame.insert(0, "model", run.model)
    frame.insert(1, "label", run.label)
    return frame


@styled
def plot(frame: Any) -> MplFigure:
    """A panel for each step, layer 1 on top; the prompt's window, then the generated tokens."""
    steps = sorted(frame["step"].unique())
    layers = int(frame["layer"].max())
    columns = _columns(frame)
    width = max(columns.values()) + 1
    panel = min(max(1.0, 0.115 * layers), 2.0)
    mark = min(3.0, 0.6 * 72 * panel / layers)  # points; cells are lower with many layers
    figure = new_figure(min(11.0, 2.6 + 0.165 * width), 1.5 + len(steps) * (panel + 0.3))
    panels = figure.subplots(len(steps), 1, squeeze=False)[:, 0]
    for step, axes in zip(steps, panels, strict=True):
        rows = frame[frame["step"] == step]
        _draw_cells(axes, rows, columns, mark)
        _draw_groups(axes, rows, width)
        axes.set(xlim=(-0.6, width - 0.4), ylim=(layers + 0.6, 0.4))
        axes.set_title(_panel_title(rows, step), fontweight="bold", parse_math=False)  # a token may be a dollar sign
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xticks([])
    n = frame["prompt_tokens"].iloc[0]
    panels[0].set_title(f"prompt tokens computed so far, of {n}", loc="right", color=GREY, fontsize=8)
    _write_tokens(panels[-1], frame, columns)
    figure.legend(
        [_handle(state) for state in _NAMES], list(_NAMES.values()), loc="outside lower center", ncols=3,
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


def _columns(frame: Any) -> dict[int, int]:
    """{position: column}, with a gap between the prompt and the generated tokens."""
    prompt = sorted(frame.loc[frame["kind"] == "prompt", "position"].unique())
    generated = sorted(frame.loc[frame["kind"] == "generated", "position"].unique())
    return {int(position): column for column, position in enumerate(prompt)} | {
        int(position): len(prompt) + 1 + column for column, position in enumerate(generated)
    }


def _draw_cells(axes: Any, rows: Any, columns: dict[int, int], mark: float) -> None:
    """Draw each state's cells as a single outline, for small files."""
    for state in _NAMES:
        cells = rows[rows["state"] == state.name.lower()]
        if cells.empty:
            continue
        x, y = cells["position"].map(columns).to_numpy(dtype=float), cells["layer"].to_numpy(dtype=float)
        axes.add_patch(PathPatch(_boxes(x, y), facecolor=_FILL[state], edgecolor="#C4C4C4", linewidth=0.4))
        if state in _MARK:
            axes.plot(x, y, linestyle="none", markersize=mark, markeredgewidth=0.3 * mark, **_MARK[state])


def _boxes(x: np.ndarray, y: np.ndarray) -> Outline:
    corners = np.array([[-0.42, -0.42], [0.42, -0.42], [0.42, 0.42], [-0.42, 0.42], [-0.42, -0.42]])
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    return Outline((np.stack([x, y], axis=1)[:, None] + corners).reshape(-1, 2), codes * len(x))


def _draw_groups(axes: Any, rows: Any, width: int) -> None:
    """Draw a line at each pruning layer, layer numbers on the left and counters on the right."""
    ticks, names = [], []
    for number, group in rows.groupby("group"):
        first, last = group["layer"].min(), group["layer"].max()
        ticks.append((first + last) / 2)
        names.append(f"layer {first}" if first == last else f"layers {first}\u2013{last}")
        if number > 1:
            axes.plot([-0.6, width - 0.4], [first - 0.5] * 2, color="black", linewidth=0.9)
        count = int(group["computed"].iloc[0])
        axes.text(width - 0.2, (first + last) / 2, f"{count}", va="center", fontsize=8, color=GREY)
    axes.set_yticks(ticks, names)


def _panel_title(rows: Any, step: int) -> str:
    if step == 0:
        return "Prefill"
    newest = rows.loc[rows["position"].idxmax(), "text"]
    return f"Decoding step {step}: the newest token is \u201c{_shown(newest)}\u201d"


def _write_tokens(axes: Any, frame: Any, columns: dict[int, int]) -> None:
    texts = frame.drop_duplicates("position").set_index("position")["text"]
    axes.set_xticks(
        list(columns.values()), [_shown(texts[key]) for key in columns], rotation=90, fontsize=7, family="monospace",
        rotation_mode="anchor", ha="right", va="center", parse_math=False,
    )  # fmt: skip
    prompt = frame.loc[frame["kind"] == "prompt", "position"]
    axes.set_xlabel(
        f"prompt tokens {prompt.min() + 1} to {prompt.max() + 1} of {frame['prompt_tokens'].iloc[0]}, "
        "then the generated tokens"
    )


def _shown(text: Any) -> str:
    """A token's text on one line, at most 12 characters, without outer spaces."""
    text = "" if pd.isna(text) else str(text)
    plain = text.strip(" ").replace("\n", "\u21b5").replace("\t", "\u21e5").replace("\r", "")
    plain = plain if len(plain) <= 12 else f"{plain[:11]}\u2026"
    return plain or "\u2423"


def _handle(state: State) -> Any:
    box = Rectangle((0, 0), 1, 1, facecolor=_FILL[state], edgecolor="#C4C4C4", linewidth=0.6)
    if state not in _MARK:
        return (box,)
    return (box, Line2D([], [], linestyle="none", markersize=4, **_MARK[state]))


FIGURE = Figure(
    name="mechanism",
    title="What LazyLLM does with each token, layer by layer and step by step",
    caption=(
        "One traced example: columns are tokens, rows are layers, panels are steps. In each step, every pruning layer "
        "(black lines) selects anew which tokens continue. A selected token that was not computed there before is "
        "revived from the Aux Cache; no token is computed twice in a layer. Shown is the part of the prompt with the "
        "most revived tokens; the numbers on the right count the whole prompt."
    ),
    data=data,
    plot=plot,
)
