"""The states of tokens, by hand and against the reference implementation; and their picture."""

import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import PathPatch

import lazyllm
from eval.analysis import mechanism
from eval.analysis.mechanism import State, data, mechanism_frame, plot, token_states
from eval.store.results import Results
from eval.store.visit import Trace, compact_counts
from lazyllm.methods import Lazy
from scripts.dev import records
from tests.eval.analysis.made import ARM, drawn, small_trace, stored, texts, with_traces
from tests.reference import lazy_reference, random_model

LAYERS = 5


@pytest.mark.parametrize("seed", range(2))
def test_revived_tokens_are_those_that_the_reference_takes_from_its_aux_cache(seed: int) -> None:
    rng = random.Random(seed)
    prompt = rng.choices(range(97), k=21)
    schedule = {1: 0.6, 3: 0.5}
    expected = lazy_reference(random_model("llama", seed, num_layers=LAYERS), prompt, schedule, 6)
    out = lazyllm.generate(random_model("llama", seed, num_layers=LAYERS), prompt, Lazy(schedule), 6, eos_token_ids=())
    unimportant = [[0.0] * len(prompt)] * LAYERS
    words, counts = (["word"] * len(prompt), ["word"] * len(out.token_ids)), compact_counts(out.computed)
    states = token_states(Trace("lookup", "a", ARM, *words, unimportant, out.selected, *counts))
    for step, revived in enumerate(expected.revived):
        for layer in range(1, LAYERS + 1):
            passed = [cut for cut in schedule if cut < layer and step > 0]
            came_back = {position for cut in passed for position in revived[cut]}
            here = came_back & set(expected.selected[step][max(passed)]) if passed else set()
            assert set(np.flatnonzero(states[step, layer - 1] == State.REVIVED)) == here
    assert any(positions for step in expected.revived[1:] for positions in step.values())


def test_token_states_by_hand() -> None:
    """Three tokens, two layers, and one boundary, which keeps one token, and another one in the second step."""
    trace = small_trace()
    p, s, c, n, r, f = State.PRUNED, State.STORED, State.CACHED, State.COMPUTED, State.REVIVED, State.FUTURE
    assert token_states(trace).tolist() == [
        [[n, n, n, f, f], [p, p, n, f, f]],
        [[c, c, c, n, f], [r, p, s, n, f]],
        [[c, c, c, c, n], [c, p, s, c, n]],
    ]
    with pytest.raises(ValueError, match="row a: the trace's selections and its counters disagree"):
        token_states(replace(trace, computed=[[3, 1], [3, 3], [3, 3]]))


def long_trace() -> Trace:
    """A boundary after layer 2; the second step revives positions 70 to 79 and no others."""
    n, layers, steps = 120, 6, 5
    kept = [5, 70, n - 1]
    selected = [{2: kept}, {2: [*range(70, 80), n]}, *({2: [5, *range(n, n + step)]} for step in range(2, steps))]
    counts = [[n, 3], *([n, 12] for _ in range(steps - 1))]
    importance = [[1 / n] * n] * layers
    return Trace(
        "lookup", "long", ARM, [f"w{i}" for i in range(n)], list("vwxyz"), importance, selected, [1, 3], counts
    )


def test_mechanism_rows_are_the_states() -> None:
    trace = small_trace()
    both = mechanism_frame(trace)
    frame = both[both["panels"] == mechanism.PRUNED]
    states = token_states(trace)
    assert len(frame) == 2 * (3 + 4 + 5)  # generated tokens appear one by one
    for row in frame.itertuples():
        assert State[row.state.upper()] == states[row.step, row.layer - 1, row.position]
        assert row.group == row.layer  # the boundary lies between the two
        assert row.kind == ("prompt" if row.position < 3 else "generated")
    assert frame.drop_duplicates("position")["text"].tolist() == ["A", " $B$", "C\n", "D", "E"]
    assert frame.drop_duplicates(["step", "layer"])["computed"].tolist() == [3, 1, 3, 2, 3, 2]


def test_mechanism_begins_with_a_standard_llm_that_computes_all_once() -> None:
    frame = mechanism_frame(small_trace())
    rows = frame[frame["panels"] == mechanism.STANDARD]
    assert frame["panels"].tolist()[: len(rows)] == [mechanism.STANDARD] * len(rows)
    assert len(rows) == 2 * (3 + 4)  # two layers; the prefill, and the first decoding step
    is_new = (rows["step"] == 0) | (rows["position"] == 3)
    assert rows["state"].tolist() == is_new.map({True: "computed", False: "cached"}).tolist()
    assert (set(rows["group"]), set(rows["computed"])) == ({1}, {3})


def test_mechanism_shows_the_first_steps_and_the_window_with_most_revived() -> None:
    frame = mechanism_frame(long_trace())
    assert sorted(set(frame["step"])) == [0, 1, 2, 3]
    assert sorted(set(frame.query("kind == 'generated'")["position"])) == [120, 121, 122]
    shown = sorted(set(frame.query("kind == 'prompt'")["position"]))
    assert len(shown) == mechanism.WINDOW
    assert set(range(71, 80)) <= set(shown)  # 70 was computed in prefill
    alike = replace(long_trace(), selected=[{2: [5, 70, 119]}] * 5, computed=[[120, 3]] * 5)  # revives nothing
    found = mechanism_frame(alike).query("kind == 'prompt'")["position"]
    assert sorted(set(found)) == list(range(mechanism.WINDOW))


def test_mechanism_figure_shows_every_cell(tmp_path: Path) -> None:
    frame = data(Results([stored([], "static_pruning"), with_traces(stored([]), tmp_path, long_trace())]))
    picture = drawn(plot, frame)
    panels = list(frame.groupby(["panels", "step"], sort=False))
    assert len(picture.axes) == len(panels) == 2 + 4
    for ((name, step), rows), axes in zip(panels, picture.axes, strict=True):
        counts = {
            patch.get_facecolor(): len(patch.get_path().codes) // 5
            for patch in axes.patches if isinstance(patch, PathPatch)
        }  # fmt: skip
        assert sorted(counts.values()) == sorted(rows["state"].value_counts())
        assert sum(counts.values()) == 6 * (mechanism.WINDOW + step)
        groups = ["layers 1–6"] if name == mechanism.STANDARD else ["layers 1–2", "layers 3–6"]
        assert [label.get_text() for label in axes.get_yticklabels()] == groups
    written = texts(picture)
    for text in ("LazyLLM: prefill", "Standard LLM: decoding step 1, the newest token is “v”",
                 "prompt tokens computed so far, of 120", "120",
                 "3", "12", "w75", *(name for name, _, _ in mechanism._LOOKS.values())):  # fmt: skip
        assert text in written


def test_mechanism_figure_writes_any_token() -> None:
    picture = plot(mechanism_frame(replace(small_trace(), generated=["$x_1$", "\n\t", "F"])))
    written = texts(picture)
    for text in ("A", "$B$", "C↵", "$x_1$", "↵⇥"):
        assert text in written
    assert mechanism._shown(" ") == "␣"
    assert mechanism._shown("abcdefghijklmnop") == "abcdefghijk…"
    assert mechanism._shown(float("nan")) == "␣"  # an empty text of a CSV


def test_mechanism_figure_without_texts_numbers_the_tokens() -> None:
    trace = small_trace()
    picture = plot(mechanism_frame(records.trace_without_texts(trace)))
    written = texts(picture)
    places = [str(place + 1) for place in range(len(trace.tokens) + len(trace.generated) - 1)]
    assert [tick.get_text() for tick in picture.axes[-1].get_xticklabels()] == places
    assert "LazyLLM: decoding step 1" in written
    assert "␣" not in "".join(written)


def test_states_differ_in_lightness_or_mark() -> None:
    for (_, fill, mark), (_, other, others) in combinations(mechanism._LOOKS.values(), 2):
        lightness, of_other = (np.dot(to_rgb(colour), [0.2126, 0.7152, 0.0722]) for colour in (fill, other))
        assert bool(mark) != bool(others) or abs(lightness - of_other) > 0.2
